"""How fast `paceline generate` writes text, beside `transformers` on the same processor, and how fast it reads a prompt.

    cargo build --release && cargo build --release -p paceline-model --example prompt_speed
    python3 bench/generate.py --peer .peer/bin/python

The model has 135 M parameters (the sizes of SmolLM2-135M, random weights), which both programs read from the same folder. In f32 and
bf16 both write greedily after the same short prompt, in turn, `--rounds` times; then each reads a prompt of 512 tokens. Loading is not
counted. Apart from that, the example `prompt_speed` reads 512 tokens in one pass and token by token.

Prints one table, and writes `results/generate.json` with date, machine and commit. Exits with 0 if everything was measured, whatever
came, and with 1 otherwise.
"""
import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, Record, RunFailed, aligned, program, provenance, run, shown

PEER = ROOT / "bench/peer/generate.py"
RUN_SECONDS = 600
TOKENS = 100
SHORT, LONG = "Once upon a time", "a b c d e f " * 42 + "a b c d "
GOALS = {"tokens_per_s": 1.5, "prompt": 10.0}
LINE = re.compile(r"(\d+) tokens? read in ([\d.]+) s, (\d+) tokens? generated in ([\d.]+) s")


def ours(binary: Path, model: Path, precision: str, prompt: str, tokens: int, threads: int) -> Record:
    command = [binary, "generate", "--model", model, "--precision", precision, "--prompt", prompt, "--max-tokens", str(tokens)]
    done = subprocess.run(command + ["--threads", str(threads)], capture_output=True, text=True, timeout=RUN_SECONDS, errors="replace")
    found = LINE.search(done.stderr)
    if done.returncode or not found:
        raise RunFailed(f"paceline generate ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    # The first of the tokens needs no pass of its own.
    read, count, written = float(found[2]), int(found[3]), float(found[4])
    rate = (count - 1) / max(written, 1e-9)
    return {"prompt_tokens": int(found[1]), "read_s": read, "tokens_per_s": rate, "text": done.stdout[len(prompt):].rstrip("\n")}


def theirs(peer: Path, model: Path, precision: str, prompt: str, tokens: int, threads: int) -> Record:
    command = [peer, PEER, "--model", model, "--precision", precision, "--prompt", prompt, "--tokens", str(tokens), "--threads", str(threads)]
    return json.loads(run(command, ROOT, RUN_SECONDS).strip().splitlines()[-1])


def compared(arguments: argparse.Namespace, model: Path, precision: str) -> Record:
    runs: list[tuple[Record, Record]] = []
    for _ in range(arguments.rounds):
        pair = []
        for of in ((ours, arguments.paceline), (theirs, arguments.peer)):
            short = of[0](of[1], model, precision, SHORT, TOKENS, arguments.threads)
            long = of[0](of[1], model, precision, LONG, 2, arguments.threads)
            pair.append(short | {"long_tokens": long["prompt_tokens"], "long_read_s": long["read_s"]})
        runs.append((pair[0], pair[1]))
    result: Record = {"precision": precision, "runs": runs, "same_text": runs[0][0]["text"] == runs[0][1]["text"]}
    for key, sign in (("tokens_per_s", 1), ("long_read_s", -1)):
        mine, peer = (statistics.median(pair[at][key] for pair in runs) for at in (0, 1))
        ratios = sorted((pair[0][key] / pair[1][key]) ** sign for pair in runs)
        result[key] = {"ours": mine, "theirs": peer, "ratio": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paceline", type=Path, default=ROOT / "target/release/paceline", metavar="PATH")
    parser.add_argument("--example", type=Path, default=ROOT / "target/release/examples/prompt_speed", metavar="PATH")
    parser.add_argument("--peer", type=Path, default=ROOT / ".peer/bin/python", metavar="PATH", help="a Python with torch and transformers")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="of each program (default: 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "results/generate.json", metavar="FILE")
    arguments = parser.parse_args()
    for flag in ("paceline", "example", "peer"):
        setattr(arguments, flag, program(parser, f"--{flag}", getattr(arguments, flag)))
    rows, results, prompts = [["", "ours", "transformers", "ratio", "range"]], [], []
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            run([arguments.peer, PEER, "--make", model], ROOT, RUN_SECONDS)
            for precision in ("f32", "bf16"):
                result = compared(arguments, model, precision)
                results.append(result)
                for key, what in (("tokens_per_s", "tokens/s"), ("long_read_s", "s for a prompt of 512")):
                    of = result[key]
                    numbers = [f"{of[name]:.2f}" for name in ("ours", "theirs", "ratio")]
                    rows.append([f"{precision}, {what}", *numbers, f"{of['low']:.2f} to {of['high']:.2f}"])
        for precision in ("f32", "bf16"):
            printed = run([arguments.example, precision, str(arguments.threads)], ROOT, RUN_SECONDS)
            prompts.append(json.loads(printed))
            of = prompts[-1]
            rows.append([f"{precision}, 512 tokens, one by one over one pass", f"{of['one_by_one_s']:.2f}", f"{of['one_pass_s']:.2f}",
                         f"{of['one_by_one_s'] / of['one_pass_s']:.1f}", ""])
    except (RunFailed, subprocess.TimeoutExpired) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print(aligned(rows, left={0}))
    record = provenance() | {"threads": arguments.threads, "goals": GOALS, "beside": results, "prompts": prompts}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {shown(arguments.out)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
