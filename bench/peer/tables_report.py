"""The tables of TensorBoard's plugin for PyTorch and of TraceLens for a trace, as JSON. `tables_report.py TRACE`, where both are installed.

TensorBoard: of each operator and module the calls, and self and total time on host and device in us. TraceLens: of each operator that it knows the
calls, floating-point operations and bytes.
"""
import contextlib
import gzip
import json
import sys
from collections import defaultdict

with contextlib.redirect_stdout(sys.stderr):
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.event_parser import EventParser
    from torch_tb_profiler.profiler.module_op import aggegate_module_view
    from torch_tb_profiler.profiler.op_agg import ModuleAggregator

    try:
        from TraceLens.PerfModel.torch_op_mapping import op_to_perf_model_class_map
        from TraceLens.TreePerf import TreePerfAnalyzer
    except ImportError as error:
        print(f"TraceLens: {error}", file=sys.stderr)
        TreePerfAnalyzer = None


def tensorboard(trace):
    with (gzip.open if trace.endswith(".gz") else open)(trace, "rb") as file:
        read = json.load(file, strict=False)
    read = {"traceEvents": read} if isinstance(read, list) else read
    for event in read["traceEvents"]:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            event["cat"] = "Runtime"  # The plugin (0.4.3) knows the old name only, and would show no time on the device.
    data = RunProfileData("worker0", "1", read)
    tree, _ = EventParser().parse(data.events, data.forward_backward_events)
    sums = ModuleAggregator()
    sums.aggregate(tree)

    def times(of):
        return [of.self_device_duration, of.device_duration, of.self_host_duration, of.host_duration]

    modules = defaultdict(lambda: [0] * 5)

    def add(all_modules, seen):
        for of in all_modules or []:
            if (of.name, of.id) not in seen:
                seen.add((of.name, of.id))
                row = modules[of.name if of.name.endswith(f"_{of.id}") else f"{of.name}_{of.id}"]
                row[0] += of.occurences
                for at, time in enumerate(times(of), 1):
                    row[at] += time
            add(of.children, seen)

    add(aggegate_module_view(tree, data.events), set())
    operators = {of.name: [of.calls, *times(of)] for of in sums.op_list_groupby_name}
    return {"operators": operators, "modules": modules}


def tracelens(trace):
    try:
        analyzer = TreePerfAnalyzer.from_file(trace)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "sums": {}}
    sums = defaultdict(lambda: [0, 0, 0])
    failed = defaultdict(int)
    for event in analyzer.tree.events:
        if event.get("cat") == "cpu_op" and event["name"] in op_to_perf_model_class_map:
            try:
                of = analyzer.compute_perf_metrics(event)
            except Exception:
                failed[event["name"]] += 1
                continue
            if not of["Kernel Time (µs)"] > 0:
                continue
            row = sums[event["name"]]
            row[0] += 1
            row[1] += of["GFLOPS"] * 1e9
            row[2] += of["Data Moved (MB)"] * 2**20
    return {"sums": sums, "failed": failed}


with contextlib.redirect_stdout(sys.stderr):
    found = {"tensorboard": tensorboard(sys.argv[1]), "tracelens": tracelens(sys.argv[1]) if TreePerfAnalyzer else None}
json.dump(found, sys.stdout)
