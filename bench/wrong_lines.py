"""Wrong command lines: the exit code and the answer of each, and the files that it left.

    python3 bench/wrong_lines.py                                    # records all lines
    python3 bench/wrong_lines.py --compare results/wrong_lines.json # runs the lines of that file again, and lists the differences

The lines are those of `wrong_lines.txt`, and by rule: each flag that the help of a command lists gets a value that cannot be right and, with its
last letter doubled, is misspelled. Each runs in an empty folder, within limits of time and memory, two at a time.

A line is wrong if it is refused. Its fault is noted when it is not answered as a mistake should be: with exit code 2, by a message that names a flag
or a word of the line, and with nothing written. `results/wrong_lines.json` has it all; of a line that is accepted, it has the first line of the
output only. Only the standard library is needed.
"""
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT, Record, arguments_for, ended, parsed, provenance, write

LIMIT_S, LIMIT_KIB, SHOWN_LINES = 5.0, 8 << 20, 20
# Each command with the words that it needs. A flag of several commands belongs to the first.
COMMANDS = [
    "train", "evaluate --checkpoint nosuch", "generate --model nosuch --prompt a", "tokenizer train --data-dir nosuch --vocab 300 --to t.json",
    "fetch model nosuch/nosuch", "fetch data nosuch", "checkpoint export nosuch --to x", "launch", "bench all_reduce", "bench scaling",
    "check", "lab async-copy", "sweep --vary lr=1,2 --output s", "predict", "analyze nosuch", "compare nosuch", "schedule 1f1b", "new ../in/folder",
    "trace merge nosuch -o m.json"]  # fmt: skip
FILES = {
    "broken.toml": "lr = [\n", "unknown.toml": "learning_rate = 0.1\n", "kind.toml": 'lr = "fast"\n', "range.toml": "nproc = 0\n", "empty.toml": "",
    "table.toml": "[training]\nlr = 0.1\n", "twice.toml": "lr = 0.1\nlr = 0.2\n", "excluded.toml": "batch-size = 2\nglobal-batch-size = 4\n",
    "list.json": "[1, 2]\n", "broken.json": '{"lr": ', "bytes.bin": b"\xff\xfe\x00\x01" * 9, "notes.txt": "mine\n", "folder/notes.txt": "mine\n",
    "empty/.keep": "", "table.csv": "text,label\ngood,1\nbad,0\n", "ck/step-00000002/index.json": '{"sha256": "00", "index": {}}\n',
    "traces/rank_0/a.json": '{"traceEvents": [{"ph": "X"}], "distributedInfo": {"rank": 0}}\n', "traces/rank_1/a.json": "{",
    "run/summary.json": '{"steps": 1}\n'}  # fmt: skip


def lines_by_rule(binary: Path) -> list[str]:
    """A wrong value and a wrong spelling of each flag, from the help of the first command that lists it."""
    lines, known = [], set()
    for command in COMMANDS:
        words = command.split()[: 2 if command.split()[0] in ("bench", "checkpoint", "fetch", "tokenizer", "trace") else 1]
        output = subprocess.run([binary, *words, "--help-all" if words == ["train"] else "--help"], capture_output=True, text=True).stdout
        for flag, value in re.findall(r"^ +(?:-\w, )?--([a-z0-9-]+)((?:\[=| \[?<)\S+)?(?:  .*| <.*)?$", output, re.MULTILINE):
            if flag in known | {"help", "help-all"}:
                continue
            known.add(flag)
            lines += [f"{command} --{flag}{flag[-1]} 1"]
            if not re.search("DIR|FILE|WORD|URL|HOST|TEXT|FOLDER|PATH|REVISION|^(name|text-column|label-column) ", f"{flag} {value}"):
                lines += [f"{command} --{flag}{'=' if '[=' in value or not value else ' '}no,such"]
    return lines


def answer(text: str, replaced: dict[str, str]) -> list[str]:
    for path, shown in replaced.items():
        text = text.replace(path, shown)
    return [line.rstrip() for line in re.sub(r"(?<=process )\d+|\d[\d.]*(?= s;)|\b\d{8}-\d{6}\b", "N", text).splitlines()[:SHOWN_LINES]]


def judged(binary: Path, root: Path, number: int, line: str) -> Record:
    """Runs a line in an empty folder."""
    folder = root / f"{number:04d}"
    folder.mkdir()
    words = shlex.split(line)
    at = next((at for at, word in enumerate(words) if not re.match("[A-Z_]+=", word)), len(words))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(root / "tmp"), "HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8"}
    environment |= dict(word.split("=", 1) for word in words[:at])
    limited = ["sh", "-c", f'ulimit -c 0; ulimit -v {LIMIT_KIB}; exec "$0" "$@"', binary, *(word.encode().replace(b"%ff", b"\xff") for word in words[at:])]
    code, *streams = ended(limited, folder, LIMIT_S, env=environment, stdin=subprocess.DEVNULL)
    output, errors = (stream.decode(errors="replace") for stream in streams)
    code = "time limit" if code is None else code
    wrote = sorted({path.relative_to(folder).parts[0] for path in folder.rglob("*")})
    replaced = {str(folder): "FOLDER", str(root): "ROOT", str(ROOT): "REPOSITORY"}
    is_refused = code not in (0, "time limit")
    record: Record = {"line": line, "code": code, "errors": answer(errors, replaced) if is_refused else [], "wrote": wrote}
    record["output"] = answer(output, replaced)[: SHOWN_LINES if is_refused else 1]
    named = [*re.findall(r"[\w./-]{2,}", line), "\ufffd", *(['""'] if "" in words else [])]
    faults = {
        f"ends with {code}": code != 2, "panics": "panicked at" in errors + output, "writes": bool(wrote),
        "names no flag": is_refused and not re.search("--[a-z]|[A-Z]{2,}_", errors) and not any(word in errors for word in named)}  # fmt: skip
    return record | {"faults": [fault for fault, is_so in faults.items() if is_so]}


def main() -> int:
    parser = arguments_for(__doc__, "wrong_lines.json", rounds=0)
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a file that this script has written")
    arguments = parsed(parser)
    with tempfile.TemporaryDirectory(prefix="wrong_lines_") as name:
        root = Path(name)
        # Messages have the name under which the program was started.
        binary = root / "paceline"
        binary.symlink_to(arguments.paceline)
        (root / "tmp").mkdir()
        for path, contents in FILES.items():
            (root / "in" / path).parent.mkdir(parents=True, exist_ok=True)
            (root / "in" / path).write_bytes(contents.encode() if isinstance(contents, str) else contents)
        before = json.loads(arguments.compare.read_text())["lines"] if arguments.compare else []
        by_hand = [line for line in (ROOT / "bench/wrong_lines.txt").read_text().splitlines() if line and not line.startswith("#")]
        lines = [record["line"] for record in before] or list(dict.fromkeys([*by_hand, *lines_by_rule(binary)]))
        with ThreadPoolExecutor(2) as pool:
            records = list(pool.map(lambda numbered: judged(binary, root, *numbered), enumerate(lines)))
    if before:
        pairs = [(old, new) for old, new in zip(before, records) if old != new]
        for old, new in pairs:
            print(f"paceline {old['line']}")
            for mark, record in (("-", old), ("+", new)):
                print("\n".join(f"  {mark} {text}" for text in [f"{record['code']} {record['wrote']}", *record["errors"], *record["output"]]))
        print(f"{len(pairs)} of {len(before)} lines differ")
        return int(bool(pairs))
    write(arguments.out, {**provenance(), "codes": dict(Counter(str(record["code"]) for record in records)), "lines": records})
    for record in records:
        if record["faults"]:
            print(f"paceline {record['line']}: {', '.join(record['faults'])}")
    print(f"{len(records)} lines, {sum(bool(record['faults']) for record in records)} with a fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
