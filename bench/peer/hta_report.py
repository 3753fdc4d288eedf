"""Prints what Holistic Trace Analysis computes from the traces of a run, as one JSON document.

    HTA_PYTHON bench/peer/hta_report.py FOLDER > hta.json

FOLDER has one file per rank. HTA_PYTHON is a Python that has Holistic Trace Analysis (see traces.py). Times are microseconds, as HTA gives them,
bandwidths GB/s, and quantiles those of pandas. HTA does not round times to whole microseconds unless `--rounded` is given.
"""
import argparse
import contextlib
import gzip
import io
import json
import logging
import math
import os
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any


def rank_of(path: Path) -> int:
    """The rank that the file states."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        text = file.read(1 << 20)
    at = text.index('"rank":')
    return int(text[at + 7 :].split(",")[0].split("}")[0])


def plain(value: Any) -> Any:
    """Converts numbers to types that JSON has."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def described(frame: Any, keys: list[str], column: str) -> list[dict[str, Any]]:
    """The rows of `describe()` with the index as columns."""
    if frame is None:
        return []
    names = frame.columns.get_level_values(1)
    return [dict(zip(keys, index)) | {name: row[(column, name)] for name in names} for index, row in frame.iterrows()]


def launch_rows(frame: Any) -> dict[str, Any]:
    """Numbers of all launches. For a comparison, they are as good as the list."""
    columns = {"cpu_duration": "cpu", "gpu_duration": "gpu", "launch_delay": "delay"}
    rows = {name: frame[column].describe().to_dict() for column, name in columns.items()}
    is_short = (frame["gpu_duration"] < frame["cpu_duration"]) & (frame["cpu_duration"] <= 50)  # as HTA draws them
    is_slow, is_late = frame["cpu_duration"] > 50, frame["launch_delay"] > 100
    return rows | {"short_kernels": int(is_short.sum()), "slow_calls": int(is_slow.sum()), "long_delays": int(is_late.sum())}


def kernel_breakdown(analysis: Any) -> tuple[Any, Any]:
    return analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=10_000, duration_ratio=1.0, include_memory_kernels=True)


def kinds_in_ns(analysis: Any) -> list[dict[str, Any]]:
    """The kinds of kernels again, more precisely. HTA truncates every interval in which the same kinds run to a whole
    number, so this passes nanoseconds as if they were microseconds."""
    traces = analysis.t.traces
    analysis.t.traces = {rank: frame.assign(**{of: frame[of] * 1000 for of in ("ts", "dur", "end")}) for rank, frame in traces.items()}
    kinds, _ = kernel_breakdown(analysis)
    analysis.t.traces = traces
    kinds["sum"] /= 1000
    return kinds.to_dict("records")


def critical_path(analysis: Any, rank: int) -> dict[str, Any]:
    graph, succeeded = analysis.critical_path_analysis(rank, "ProfilerStep", 0)
    if not succeeded:
        return {"failed": "critical_path_analysis returned False"}
    table = graph.get_critical_path_breakdown()
    by_bound = table.groupby("bound_by")["duration"].sum().to_dict()
    return {"total": table["duration"].sum(), "by_bound": by_bound, "edges": len(table)}


def report(arguments: argparse.Namespace, files: list[Path]) -> dict[str, Any]:
    from hta.trace_analysis import TraceAnalysis

    by_rank = {rank_of(path): str(path.absolute()) for path in files}
    analysis = TraceAnalysis(trace_files=by_rank, trace_dir="/")
    ranks = sorted(by_rank)
    kinds, kernels = kernel_breakdown(analysis)
    launches = analysis.get_cuda_kernel_launch_stats(ranks=ranks, visualize=False)
    paths = {}
    for rank in ranks:
        try:
            paths[rank] = critical_path(analysis, rank)
        except Exception as error:  # any exception is HTA's answer for this rank
            paths[rank] = {"failed": f"{type(error).__name__}: {error}"}
    found = {
        "temporal": analysis.get_temporal_breakdown(visualize=False).to_dict("records"),
        "overlap": analysis.get_comm_comp_overlap(visualize=False).to_dict("records"),
        "kinds": kinds.to_dict("records") if arguments.rounded else kinds_in_ns(analysis),
        "kernels": kernels.to_dict("records"),
        "idle": analysis.get_idle_time_breakdown(ranks=ranks, visualize=False)[0].to_dict("records"),
        "launches": {rank: launch_rows(frame) for rank, frame in launches.items()},
        "queues": described(analysis.get_queue_length_summary(ranks=ranks), ["rank", "stream"], "queue_length"),
        "copies": described(analysis.get_memory_bw_summary(ranks=ranks), ["rank", "name"], "memory_bw_gbps"),
        "critical_path": paths,
    }
    return {"hta": version("traceinsight"), "rounded": arguments.rounded, "ranks": ranks} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounded", action="store_true", help="let HTA round to microseconds, as it does by default")
    arguments = parser.parse_args()
    if not arguments.rounded:
        os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    files = sorted(path for path in arguments.folder.rglob("*") if path.name.endswith((".pt.trace.json", ".pt.trace.json.gz")))
    if not files:
        parser.error("no traces")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        result = report(arguments, files)
    print(json.dumps(plain(result), indent=1))


if __name__ == "__main__":
    main()
