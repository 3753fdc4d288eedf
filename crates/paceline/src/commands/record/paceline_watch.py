"""Looks whether the collectives of a PyTorch program go on, for `paceline record --watch-hang`.

A thread asks PyTorch's flight recorder a few times within the time limit how far the calls of this rank have come. If nothing has changed
throughout the limit, the recorder's file is written to the folder of the dumps, where `paceline hang` finds it; it is removed when the calls go on.
Beside it, `rank_N.watch` says in each look what such a file lacks: whether the program stands still, and at which line. `paceline record` decides whether
that is a hang. This file does not know what other ranks do.
"""

import collections
import os
import pickle
import sys
import threading

import paceline_record

# Looks within the limit.
LOOKS = 12
# A program that stands still uses at most this part of a core, with its children, and its main thread runs at most so often per second.
MOST_CPU, MOST_RUNS_PER_S = 0.02, 1
# Folders of files that are not the program's own.
OTHERS = (os.path.dirname(os.__file__), os.path.dirname(os.path.abspath(__file__)), "<")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Hook(paceline_record.Recorder):
    def __init__(self, limit_s, output, notes):
        super().__init__(1, 1, None, False, False, False, output, notes)
        self.limit_s, self.pid, self.num_looks = limit_s, os.getpid(), 0
        self.seen = collections.deque(maxlen=LOOKS + 1)  # of each look: states of the calls, place, runs, ticks

    def listen(self):
        import atexit

        if not hasattr(getattr(self.torch._C, "_distributed_c10d", None), "_dump_fr_trace"):
            os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")  # off by default before PyTorch 2.14
        self.leaving = threading.Event()
        atexit.register(self.leave)
        threading.Thread(target=self.look_often, name="paceline_watch", daemon=True).start()

    def look_often(self):
        distributed = self.torch.distributed
        while not self.leaving.wait(self.limit_s / LOOKS):
            try:
                if distributed.is_available() and distributed.is_initialized():
                    self.look("nccl" if "nccl" in distributed.get_backend() else "gloo")
            except Exception as error:
                self.say(problem="%s: %s" % (type(error).__name__, error))

    def dump(self, backend, *how):
        """The flight recorder's file of a backend; `None` if this PyTorch has none."""
        distributed = self.torch._C._distributed_c10d
        dump = getattr(distributed, "_dump_nccl_trace", None) if backend == "nccl" else None
        if dump is None:
            any_backend = getattr(distributed, "_dump_fr_trace", None)
            dump = any_backend and (lambda *how: any_backend(*how, backend=backend))
        return dump and dump(*how)

    def look(self, backend):
        calls = self.dump(backend, False, False, False)
        if calls is None:
            raise RuntimeError("PyTorch %s has no flight recorder for %s; 2.14 has" % (self.torch.__version__, backend))
        calls = pickle.loads(calls).get("pg_status", {})
        place, line = self.place()
        self.seen.append((calls, place, runs(), ticks(self.pid)))
        calls_before, places, runs_before, ticks_before = zip(*self.seen)
        is_quiet = len(self.seen) > LOOKS and all(of == calls for of in calls_before)
        waits = any(of["last_enqueued_collective"] > of["last_completed_collective"] for of in calls.values())
        is_idle = runs_before[-1] - runs_before[0] <= MOST_RUNS_PER_S * self.limit_s
        is_idle = is_idle and abs(ticks_before[-1] - ticks_before[0]) <= max(MOST_CPU * self.limit_s * TICKS_PER_S, 2)
        # A rank that waits in a call may turn round in it.
        is_still = is_quiet and all(of == place for of in places) and (waits or is_idle)
        file = "nccl_trace_rank_%d" % self.rank()
        if not is_quiet:
            self.remove(file)
        elif not os.path.exists(os.path.join(self.output, file)):
            self.write_file(file, self.whole(backend))
        self.say(is_quiet=is_quiet, waits=waits, is_still=is_still, line=line)

    def whole(self, backend):
        """The recorder's file, with the members of all groups, which Gloo's lacks."""
        found = pickle.loads(self.dump(backend, True, True, False))
        world = getattr(getattr(self.torch.distributed, "distributed_c10d", None), "_world", None)
        for group, ranks in getattr(world, "pg_group_ranks", {}).items():
            name = world.pg_names.get(group, "")
            found["pg_config"].setdefault(name, dict(name=name, desc="", ranks=str(sorted(ranks))))
        return pickle.dumps(found, protocol=2)

    def place(self):
        """Where the main thread is, and the innermost line of the program itself there."""
        frame, place, line = sys._current_frames().get(threading.main_thread().ident), [], None
        while frame is not None:
            name = frame.f_code.co_filename
            place.append((name, frame.f_lineno, frame.f_lasti))
            if line is None and not name.startswith(OTHERS) and "/site-packages/" not in name:
                line = "%s:%d in %s" % (name, frame.f_lineno, frame.f_code.co_name)
            frame = frame.f_back
        return place, line

    def say(self, **words):
        import json
        import socket

        self.num_looks += 1
        about = dict(rank=self.rank(), pid=self.pid, host=socket.gethostname(), looks=self.num_looks)
        self.write_file("rank_%d.watch" % self.rank(), json.dumps(dict(about, **words)).encode())

    def write_file(self, name, contents):
        """Writes it under another name first, so that nobody reads a half of it."""
        os.makedirs(self.output, exist_ok=True)
        path = os.path.join(self.output, name)
        self.remove(name + ".part")
        with open(os.open(path + ".part", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
            file.write(contents)
        os.rename(path + ".part", path)

    def remove(self, name):
        try:
            os.unlink(os.path.join(self.output, name))
        except OSError:
            pass

    def leave(self):
        self.leaving.set()
        if os.getpid() == self.pid and self.num_looks > 0:  # not a child that was forked
            for name in ("rank_%d.watch", "nccl_trace_rank_%d"):
                self.remove(name % self.rank())


def runs():
    """How often the main thread has been given a core. A sleep or a lock is one wait, however long."""
    with open("/proc/self/task/%d/status" % os.getpid()) as file:
        return sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)


def ticks(pid):
    """The processor time of a process and its children, such as the workers of a loader."""
    with open("/proc/%d/stat" % pid) as file:
        found = sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    for task in os.listdir("/proc/%d/task" % pid):
        try:
            with open("/proc/%d/task/%s/children" % (pid, task)) as file:
                found += sum(ticks(child) for child in map(int, file.read().split()))
        except OSError:
            pass  # It has ended, or the kernel has no such list.
    return found
