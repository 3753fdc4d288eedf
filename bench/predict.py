"""Compares the steps that `paceline predict` predicts with those that it measures.

    python3 bench/predict.py                                            # half an hour, most of it the MLP's
    python3 bench/predict.py --busy --out results/predict_busy.json     # the same on a busy machine

The links are such that communication takes much less time than the backward pass, about as much, and much more. Two ranks are pinned to a core each; four
ranks take turns on two cores. A value is the predicted step over the measured one, of one round. With `--busy`, a program takes turns with a rank on core 0.
"""
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from common import RUN_SECONDS, RunFailed, aligned, arguments_for, parsed, provenance, ranged, run, spinning, write

# By name: the study, and its links.
STUDIES = {
    "cnn, 2 ranks": ("--model cnn --nproc 2 --pin-cores --steps-per-epoch 100", "25gbit,50us 1.5gbit,50us 0.5gbit,50us"),
    "mlp, 2 ranks": ("--model mlp --nproc 2 --pin-cores --steps-per-epoch 20", "25gbit,50us 4gbit,50us 2gbit,50us"),
    "cnn, 4 ranks": ("--model cnn --nproc 4 --steps-per-epoch 100", "25gbit,50us 1.5gbit,50us 0.5gbit,50us"),
}


def main() -> int:
    parser = arguments_for(__doc__, "predict.json")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES, help="(default: all)")
    parser.add_argument("--busy", action="store_true", help="run everything beside a program on core 0")
    arguments = parsed(parser)
    values: dict[str, list[float]] = {}
    try:
        with spinning(0, 0) if arguments.busy else nullcontext():
            for study in list(arguments.studies) * arguments.rounds:
                flags, links = STUDIES[study]
                with tempfile.TemporaryDirectory(prefix="predict_") as folder:
                    command = f"predict --measure {flags} --links {links} --rounds 1 --json out.json"
                    run([arguments.paceline, *command.split()], Path(folder), RUN_SECONDS)
                    rows = json.loads(Path(folder, "out.json").read_text())["rows"]
                for link, row in zip(links.split(), rows):
                    values.setdefault(f"{study}, {link}", []).append(row["ratio"])
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(aligned([["case", "predicted over measured step"], *([case, ranged(ratios, 3)] for case, ratios in values.items())], left={0}))
    write(arguments.out, provenance() | {"busy": arguments.busy, "results": [{"case": case, "values": ratios} for case, ratios in values.items()]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
