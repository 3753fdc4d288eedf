"""Does the backend of torch.distributed withstand PyTorch's own tests, and faults? Needs the wheel and expecttest in the Python with torch.

    python3 bench/torch_suite.py suite     # results/torch_suite.json
    python3 bench/torch_suite.py faults    # results/torch_faults.json

suite: distributed_test.py, which torch brings along, and the features of PyTorch with two, three and four ranks and with both backends. Exits
with 1 if a test fails here and passes with Gloo, unless REASONS says why, or if a feature fails or gives other numbers.

faults: each case is drawn by its seed: two to four ranks, DDP or a loop of operations, and a rank that is killed, is stopped or calls something
else. Every other rank has to name the fault within a second, or by the limit of the operation if the rank is stopped, and has to end by itself.
Then two ranks make and destroy groups.
"""
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from common import Record, aligned, arguments_for, parsed, provenance, write
from torch_backend import lines

RANKS, BACKENDS = (2, 3, 4), ("gloo", "paceline")
# Tests that fail here and pass with Gloo, and why.
REASONS = {"test_ddp_logging_data_cpu": "the records of DDP call every backend of another package custom, and the test wants its name"}


def suite(peer: Callable[..., list[Record]], _: int) -> Record:
    record: Record = {"ranks": {}, "left": [], "features": {}}
    rows = [["ranks", "backend", "passed", "skipped", "failed"]]
    for ranks in RANKS:
        gloo, ours = ({test["test"]: test for test in peer("torch_suite.py", backend, str(ranks))} for backend in BACKENDS)
        record["ranks"][ranks] = {backend: Counter(test["outcome"] for test in tests.values()) for backend, tests in zip(BACKENDS, (gloo, ours))}
        rows += [[str(ranks), backend, *(str(record["ranks"][ranks][backend][outcome]) for outcome in rows[0][2:])] for backend in BACKENDS]
        left = [test for name, test in ours.items() if (test["outcome"], gloo[name]["outcome"]) == ("failed", "passed")]
        record["left"] += [{"ranks": ranks, "test": test["test"], "error": test["reason"], "why": REASONS.get(test["test"])} for test in left]
        record["features"][ranks] = peer("torch_features.py", "gloo,paceline", str(ranks))
    features = [feature | {"ranks": ranks} for ranks, all_features in record["features"].items() for feature in all_features]
    others = [feature for feature in features if not feature["same"]]
    print(aligned(rows, {1}), *record["left"], f"{len(features) - len(others)} of {len(features)} features give the numbers of Gloo", *others, sep="\n")
    return record | {"wrong": [test for test in record["left"] if test["why"] is None] + others}


def faults(peer: Callable[..., list[Record]], number: int) -> Record:
    cases, kinds, rows = peer("torch_faults.py", "faults", "0", str(number)), defaultdict(list), [["fault", "program", "ranks", "cases", "wrong", "named after s", "longest"]]
    for case in cases:
        kinds[case["fault"], case["program"], str(case["ranks"])].append(case)
    for kind, of in sorted(kinds.items()):
        times = [case["named_within_s"] for case in of]
        rows.append([*kind, *map(str, (len(of), sum(bool(case["wrong"]) for case in of), statistics.median(times), max(times)))])
    groups = [side for backend in BACKENDS for side in peer("torch_faults.py", "groups", backend, str(2 * number))]
    wrong = [case for case in cases if case["wrong"]]
    print(aligned(rows, {0, 1}), *wrong, *groups, sep="\n")
    return {"cases": len(cases), "kinds": [dict(zip(rows[0], row)) for row in rows[1:]], "groups": groups, "wrong": wrong}


def main() -> int:
    parser = arguments_for(__doc__ or "", "torch_PART.json", rounds=0, has_peer=True, has_program=False)
    parser.add_argument("part", choices=("suite", "faults"))
    parser.add_argument("--cases", type=int, default=500, metavar="N", help="of faults; and half of the groups (default: 500)")
    arguments = parsed(parser)

    def peer(*words: str) -> list[Record]:
        return lines(arguments.peer_python, *words, limit_s=7200)

    origin = provenance()
    record = origin | (suite if arguments.part == "suite" else faults)(peer, arguments.cases)
    write(Path(str(arguments.out).replace("PART", arguments.part)), record)
    return 1 if record["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
