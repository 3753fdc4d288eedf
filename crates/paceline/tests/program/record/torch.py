"""As much of PyTorch as a recording needs: optimizers with hooks, spans, and one profiler at a time, whose trace has the spans.

As in PyTorch, a profiler crashes the process if it is ended in another thread than it was started in, is left to a thread that
ends, or is started in a backward pass.
"""

import atexit
import json
import os
import pickle
import sys
import threading
import time
import types
from collections import OrderedDict

__version__ = "2.9.0"


def module(name):
    made = sys.modules["torch." + name] = types.ModuleType("torch." + name)
    return made


optim, autograd, profiler, cuda, distributed, _C = map(module, "optim autograd profiler cuda distributed _C".split())
optim.optimizer, autograd.profiler = module("optim.optimizer"), module("autograd.profiler")
_C._profiler = types.SimpleNamespace(_ExperimentalConfig=lambda profile_all_threads: "all threads")
_C._current_graph_task_id = lambda: backward
cuda.is_initialized = lambda: False
in_group, get_num_threads = False, lambda: 1
distributed.is_available, distributed.is_initialized = lambda: True, lambda: in_group
distributed.get_rank, distributed.get_world_size = lambda: int(os.environ["RANK"]), lambda: int(os.environ["WORLD_SIZE"])
autograd.backward = lambda: time.sleep(0.001)
distributed.get_backend = lambda: "gloo"
hooks = OrderedDict()
prepared = running = None
backward = -1


class Handle:
    def __init__(self):
        self.number = len(hooks)

    def remove(self):
        del hooks[self.number]


def register_optimizer_step_post_hook(hook):
    handle = Handle()
    hooks[handle.number] = hook
    return handle


class record_function:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.begin, self.entered = time.time_ns(), self.name
        return self

    def __exit__(self, *_):
        if running is not None and self.begin >= running.begin:
            cat = "cpu_op" if self.entered.startswith("aten::") else "user_annotation"
            us = (self.begin % 10**15 / 1000, (time.time_ns() - self.begin) / 1000)
            running.events.append(dict(ph="X", cat=cat, name=self.entered, pid=1, tid=1, ts=us[0], dur=us[1], args={}))


class SGD:
    def step(self):
        with autograd.profiler.record_function("Optimizer.step#SGD.step"):
            with record_function("aten::add_"):
                time.sleep(0.001)
            for hook in hooks.values():
                hook(self, (), {})


class profile:
    """That of torch.autograd.profiler."""

    is_shared = False

    def _prepare_trace(self):
        global prepared
        prepared, self.events = self, []

    def _start_trace(self):
        global running
        if running is not None or prepared is not self:
            raise RuntimeError("Profiler is already enabled, or was not prepared")
        self.begin, self.thread, running = time.time_ns(), threading.current_thread(), self
        if backward != -1:
            os.abort()

    def __enter__(self):
        self._prepare_trace()
        self._start_trace()
        return self

    def __exit__(self, *_):
        global running
        if running is not None and not running.is_shared and running.thread.ident != threading.get_ident():
            os.abort()
        running = None
        self.kineto_results = types.SimpleNamespace(events=lambda: self.events)


class Profile:
    """That of torch.profiler. A schedule is the steps of its warm-up, which are below zero if it waits for ever, and its others."""

    def __init__(self, schedule=None, on_trace_ready=None, experimental_config=None, **_):
        self.schedule, self.on_trace_ready, self.step_num = schedule, on_trace_ready, 0
        self.span, self.profiler, self.is_running = None, profile(), False
        self.profiler.is_shared = experimental_config is not None
        self.metadata = {}

    def preset_metadata_json(self, key, value):
        self.metadata[key] = json.loads(value)

    def start(self):
        if self.schedule is None or self.schedule[0] >= 0:
            self.profiler._prepare_trace()
        self.go()

    def go(self):
        warmup, active = self.schedule or (0, 10**9)
        if self.step_num == warmup:
            self.profiler._start_trace()
            self.is_running = True
        elif self.step_num == warmup + active:
            self.end()
        if self.schedule:
            self.span = autograd.profiler.record_function("ProfilerStep#%d" % self.step_num)
            self.span.__enter__()

    def leave_span(self):
        span, self.span = self.span, None
        if span is not None:
            span.__exit__(None, None, None)

    def step(self):
        self.leave_span()
        self.step_num += 1
        self.go()

    def end(self):
        if self.is_running:
            self.is_running = False
            self.profiler.__exit__(None, None, None)
            self.on_trace_ready(self)

    def __exit__(self, *_):
        self.leave_span()
        self.end()

    def export_chrome_trace(self, path):
        with open(path + ".tmp", "w") as file:
            json.dump({"traceEvents": self.profiler.events} | self.metadata, file)
        if os.environ.get("DISK") != "full":
            os.rename(path + ".tmp", path)


@atexit.register
def end():
    owner = threading.main_thread() if running is None or running.is_shared else running.thread
    if owner is not threading.main_thread() and not owner.is_alive():
        os.abort()


optim.SGD = SGD
optim.optimizer.register_optimizer_step_post_hook = register_optimizer_step_post_hook
autograd.profiler.profile, autograd.profiler.record_function = profile, record_function
profiler.profile, profiler.schedule = Profile, lambda wait, warmup, active, repeat: (warmup, active)
profiler.supported_activities, profiler.ProfilerActivity = lambda: {1}, types.SimpleNamespace(CUDA=2)


class Calls:
    """The flight recorder: calls of this rank, of which the first ones have ended."""

    made = ended = 0

    def dump(self, entries=True, stacks=True, active=False, backend="gloo"):
        states = dict(last_enqueued_collective=self.made, last_started_collective=-1, last_completed_collective=self.ended)
        entry = dict(pg_id=0, process_group=("0", "default_pg"), profiling_name="gloo:all_reduce", state="scheduled", time_created_ns=1)
        entry.update(input_sizes=[[4]], input_dtypes=["Float"])
        made = [dict(entry, collective_seq_id=at + 1, retired=at < self.ended) for at in range(self.made)]
        return pickle.dumps(dict(version="2.10", pg_config={}, pg_status={"0": states}, entries=made if entries else []), protocol=2)


calls = Calls()
_C._distributed_c10d = types.SimpleNamespace(_dump_fr_trace=calls.dump)


def init_process_group():
    global in_group
    in_group = True


distributed.init_process_group = init_process_group


def train(steps, own=None):
    """A program's loop, in the last steps of which something of its own may happen."""
    optimizer = SGD()
    for at in range(steps):
        with record_function("aten::linear"):
            autograd.backward()
        optimizer.step()
        if own:
            own(at)
    print("trained %d steps" % steps)
