"""Prints what Perfetto's trace processor finds in a trace file, as JSON: slices, flows, and all errors that it counts.

    PYTHON bench/peer/perfetto_import.py TRACE

PYTHON is a Python that has `perfetto` (see traces.py), which fetches its trace processor when it is first used. If
this fails, the answer is {"unavailable": why}.
"""
import contextlib
import json
import sys
from pathlib import Path

from perfetto.trace_processor import TraceProcessor

ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def main() -> None:
    try:
        # Messages that are printed while the program is fetched are not part of the answer.
        with contextlib.redirect_stdout(sys.stderr):
            processor = TraceProcessor(trace=sys.argv[1])
    except Exception as error:  # no network, no program for this machine, ...
        reason = f"{type(error).__name__}: {error}".replace(str(Path.home()), "~")
        print(json.dumps({"unavailable": reason}))
        return

    def number(query: str) -> int:
        return next(iter(processor.query(query))).value

    print(json.dumps({
        "slices": number("select count(*) as value from slice"),
        "flows": number("select count(*) as value from flow"),
        "errors": {row.name: row.value for row in processor.query(ERRORS)},
    }))


if __name__ == "__main__":
    main()
