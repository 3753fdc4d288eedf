"""Compares the steps that `paceline predict` predicts with those that it measures.

    python3 bench/predict.py                 # half an hour, most of it the MLP's

The links are such that communication takes much less time than the backward pass, about as much, and much more. Two ranks are pinned to a core each; four
ranks take turns on two cores. A value is the predicted step over the measured one, of one round.
"""
import json
import tempfile
from pathlib import Path

from common import RUN_SECONDS, aligned, arguments_for, parsed, provenance, ranged, run, write

# By name: the study, and its links.
STUDIES = {
    "cnn, 2 ranks": ("--model cnn --nproc 2 --pin-cores --steps-per-epoch 100", "25gbit,50us 1.5gbit,50us 0.5gbit,50us"),
    "mlp, 2 ranks": ("--model mlp --nproc 2 --pin-cores --steps-per-epoch 20", "25gbit,50us 4gbit,50us 2gbit,50us"),
    "cnn, 4 ranks": ("--model cnn --nproc 4 --steps-per-epoch 100", "25gbit,50us 1.5gbit,50us 0.5gbit,50us"),
}


def main() -> None:
    parser = arguments_for(__doc__, "predict.json", has_busy=True)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=STUDIES, help="(default: all)")
    arguments = parsed(parser)
    values: dict[str, list[float]] = {}
    for study in list(arguments.studies) * arguments.rounds:
        flags, links = STUDIES[study]
        with tempfile.TemporaryDirectory(prefix="predict_") as folder:
            command = f"predict --measure {flags} --links {links} --rounds 1 --json out.json"
            run([arguments.paceline, *command.split()], Path(folder), RUN_SECONDS)
            rows = json.loads(Path(folder, "out.json").read_text())["rows"]
        for link, row in zip(links.split(), rows):
            values.setdefault(f"{study}, {link}", []).append(row["ratio"])
    print(aligned([["case", "predicted over measured step"], *([case, ranged(ratios, 3)] for case, ratios in values.items())], left={0}))
    write(arguments.out, provenance() | {"busy": arguments.busy, "results": [{"case": case, "values": ratios} for case, ratios in values.items()]})


if __name__ == "__main__":
    main()
