"""Records some steps of a PyTorch program with torch.profiler, on each rank, without a change to the program.

`paceline record` starts this in every Python process. A program can also start it by itself:

    import paceline_record
    paceline_record.start(after=20, steps=5, output="paceline-traces")

Optimizer steps are counted for each optimizer. The first optimizer to make `after` steps is the one whose steps divide the
recording. A process that steps no optimizer, such as a worker of a loader, records nothing. With `seconds`, all threads are
recorded for that time instead, `after` seconds after the import of torch. One step more than `steps` is in the trace, because
the end of the recording falls into the last one.

A profiler of PyTorch belongs to the thread that started it, and one that is started within a backward pass is lost at its end.
To end it elsewhere, or after the thread, crashes the process; daemon threads end unseen. So only steps of that thread, outside
of backward passes, divide a recording.

Each process appends what happened to a file of notes, which `paceline record` reads. Nothing here prints, and no fault here
reaches the program. This file does not know how traces are read.
"""

import os
import sys

# How long a rank that has recorded waits for the others before it ends, and the end of a process for its recording.
LIMIT_S = 60
# How often the program's own profiler may interrupt the recording before it is given up.
MAX_INTERRUPTIONS = 3
OTHER = "the program's own profiler was running, and PyTorch has one at a time; switch it off"
INTERRUPTED = "the program's own profiler began during the recording, and went first; switch it off, or pass another --after"
PLACE = "optimizer steps run within the backward pass, in a daemon thread or each in a new one, where PyTorch's profiler cannot be \
started or ended; --seconds 2 records by time"
# A recording of steps ends after this many times the length of as many steps before it, but not within these seconds.
MOST_TIMES, LEAST_S = 5, 10
# Of how many steps before a recording the lengths are kept.
MOST_LENGTHS = 16
# How often a recording by time tries to begin outside of an import.
MAX_TRIES = 100

_recorder = None


def start(after=20, steps=5, seconds=None, stacks=False, memory=False, stop=False, output="paceline-traces", notes=None):
    """Counts steps from now on, or once torch is imported. A second call has no effect."""
    global _recorder
    if _recorder is None:
        _recorder = Recorder(after, steps, seconds, stacks, memory, stop, os.path.abspath(output), notes)
        _when_torch_is_there(_recorder.attach)


def start_from(folder):
    """Starts with the settings that `paceline record` has left in `folder`, which gets the notes."""
    global _recorder
    _recorder = folder
    open(os.path.join(folder, "python"), "a").close()
    try:
        from paceline_instead import Hook as kind
    except ImportError:
        kind = Recorder
    _when_torch_is_there(lambda torch: _attach_from(folder, kind, torch))


def _attach_from(folder, kind, torch):
    global _recorder
    try:
        import json

        with open(os.path.join(folder, "settings.json"), encoding="utf-8") as file:
            _recorder = kind(notes=folder, **json.load(file))
        _recorder.attach(torch)
    except Exception:
        pass  # `paceline record` has ended, and its folder is gone.


def _when_torch_is_there(attach):
    if "torch" in sys.modules:
        attach(sys.modules["torch"])
    else:
        sys.meta_path.insert(0, _ImportOfTorch(attach))


class _ImportOfTorch:
    """Finds torch as the finders after it do, and calls `attach` with the module once its code has run."""

    def __init__(self, attach):
        self.attach = attach

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self.follow(spec.loader)
        return spec

    def follow(self, loader):
        run = loader.exec_module

        def exec_module(module):
            del loader.exec_module
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.attach(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass


def is_in_import():
    """Whether this thread is importing a module."""
    frame = sys._getframe()
    while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


class Recorder:
    """The recording of one process."""

    def __init__(self, after, steps, seconds, stacks, memory, stop, output, notes, speeds=None):
        self.after, self.steps, self.seconds, self.speeds = after, steps, seconds, speeds
        self.stacks, self.memory, self.stop, self.output, self.notes = stacks, memory, stop, output, notes
        self.warmup = 1 if seconds is None and after > 1 else 0
        self.interruptions = 0
        self.is_over, self.has_all_threads, self.is_kept, self.known_rank = False, False, True, None
        self.unfollow = lambda: None
        self.forget()

    def attach(self, torch):
        try:
            self.torch = torch
            self.note(torch=str(torch.__version__))
            self.listen()
        except Exception as error:
            self.give_up(error)

    def listen(self):
        import atexit
        import threading
        from torch.optim import optimizer

        register = getattr(optimizer, "register_optimizer_step_post_hook", None)
        if register is None:
            return self.note(problem="PyTorch %s lacks what this needs; install 2.0 or newer" % self.torch.__version__)
        self.watch_profilers(self.torch.autograd.profiler.profile)
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.leave)
        self.leaving, self.calls = threading.Event(), []
        if self.seconds is None:

            def stepped(optimizer, args, kwargs):
                self.uncompiled(self.stepped, optimizer)

            stepped._torchdynamo_disable = True  # A compiled step calls it as it is.
            register(stepped)  # For good: another thread may be going through the hooks.
        else:
            self.thread = threading.Thread(target=self.wait_and_record, name="paceline_record", daemon=True)
            self.thread.start()

    def forget(self):
        """A new process has made no steps and records nothing."""
        import collections
        import threading
        import weakref

        class Here(threading.local):
            profiler, pending, is_ours = None, None, False

        self.ended, self.here = None, Here()
        self.made = weakref.WeakKeyDictionary()  # the steps of each optimizer
        self.most, self.profiler, self.noted, self.facts, self.other = 0, None, None, {}, lambda: None
        self.ends = collections.deque(maxlen=MOST_LENGTHS + 1)  # of the last steps, in seconds

    def is_in_backward(self):
        task = getattr(self.torch._C, "_current_graph_task_id", None)
        return task is not None and task() != -1

    def is_here(self):
        """Whether our profiler runs, and may be called at this place."""
        is_this_thread = self.here.profiler is self.profiler and not self.is_in_backward()
        return self.profiler is not None and (self.has_all_threads or is_this_thread)

    def uncompiled(self, function, *args):
        """Calls a function of ours. Around a compiled step, Dynamo would compile it."""
        eval_frame = getattr(getattr(self.torch._C, "_dynamo", None), "eval_frame", None)
        before = eval_frame.set_eval_frame(None) if eval_frame is not None else None
        try:
            function(*args)
        finally:
            if eval_frame is not None:
                eval_frame.set_eval_frame(before)

    def stepped(self, optimizer):
        """The hook after each optimizer step. It is called within the step's span, in which no step of a trace may end."""
        self.do_pending()
        if self.is_over and self.profiler is None:
            return self.unfollow()
        try:
            made = self.made[optimizer] = self.made.get(optimizer, 0) + 1
            if self.profiler is None:
                self.before_recording(optimizer, made)
            elif self.is_here():
                self.while_recording(optimizer, made)
        except Exception as error:
            self.give_up(error)

    def before_recording(self, optimizer, made):
        if made > self.most:
            import time

            self.most = made
            self.ends.append(time.perf_counter())
            if made & (made - 1) == 0:
                self.note(steps=made)  # for a process that is killed
        if made < max(self.after - 1, 1):
            return
        import threading
        import weakref

        if self.other() is not None:
            self.note(problem=OTHER)
        elif self.is_in_backward() or threading.current_thread().daemon:
            self.note(problem=PLACE)
            self.is_over = True
        else:
            self.counted, self.made = weakref.ref(optimizer), weakref.WeakKeyDictionary()
            self.follow_spans(self.torch.autograd.profiler.record_function)
            self.here.pending = self.begin_steps

    def while_recording(self, optimizer, made):
        num_steps = self.warmup + self.steps + 1
        if not self.is_kept or (optimizer is not self.counted() and made > num_steps + 2):
            self.here.pending = self.finish  # The counted optimizer has made its last step, or another thread gave up.
        elif optimizer is self.counted():
            self.most += 1
            self.here.pending = self.profiler.step if made < num_steps else self.finish_steps

    def follow_spans(self, span_kind):
        """Does what is pending when the span of the optimizer step ends. If that is compiled away, the next step does.

        The program's own profiler may mark steps though it does not run. They get another name in our trace.
        """
        self.unfollow()
        enter, leave = span_kind.__enter__, span_kind.__exit__

        def enter_span(span):
            if self.here.is_ours or not self.is_here() or not span.name.startswith("ProfilerStep#"):
                return enter(span)
            name, span.name = span.name, "Program's " + span.name
            try:
                return enter(span)
            finally:
                span.name = name

        def exit_span(span, *error):
            leave(span, *error)
            if self.here.pending is not None and span.name.startswith("Optimizer.step#"):
                self.uncompiled(self.do_pending)

        def unfollow():
            span_kind.__enter__, span_kind.__exit__, self.unfollow = enter, leave, lambda: None

        span_kind.__enter__, span_kind.__exit__, self.unfollow = enter_span, exit_span, unfollow

    def do_pending(self):
        if self.here.pending is None or self.is_in_backward():
            return
        pending, self.here.pending = self.here.pending, None
        try:
            self.call(pending)
        except Exception as error:
            self.give_up(error)
        if self.is_over and self.stop:
            self.end_program()

    def begin_steps(self):
        if self.profiler is not None or self.other() is not None:
            return  # Another thread, or the program's own profiler, was quicker.
        import threading

        plan = self.torch.profiler.schedule(wait=0, warmup=self.warmup, active=self.steps + 1, repeat=1)
        self.begin(schedule=plan)
        limit = max(MOST_TIMES * (self.steps + 2) * self.mean_s, LEAST_S)
        threading.Thread(target=self.end_late, args=(self.profiler, limit), name="paceline_record", daemon=True).start()

    def end_late(self, profiler, limit):
        """Ends a recording into which an evaluation or another long work without an optimizer step has come."""
        while limit > 0 and self.profiler is profiler and not self.leaving.wait(0.1):
            limit -= 0.1
        if self.profiler is profiler:
            self.call_in_main_thread(self.finish)

    def finish_steps(self):
        self.profiler.step()
        self.finish()

    def wait_and_record(self):
        """The thread of a recording by time. Only the main thread can start a profiler of all threads."""
        if self.leaving.wait(self.after):
            return
        while self.other() is not None:
            if self.leaving.wait(0.1):
                return self.note(problem=OTHER)
        self.call_in_main_thread(self.begin_seconds)
        self.leaving.wait(self.seconds)
        if self.has_all_threads:
            self.finish()  # The main thread may wait for others for as long as the program runs.
        else:
            self.call_in_main_thread(self.finish)

    def call_in_main_thread(self, function):
        """Python calls `function` when the main thread next runs a line, however late. Within an import, modules may lack parts."""
        import ctypes

        def run(_):
            try:
                is_done.append(not self.is_in_backward() and (tries == MAX_TRIES or not is_in_import()))
                if is_done[-1] and not self.leaving.is_set():
                    function()
            except Exception as error:
                self.give_up(error)
            called.set()
            return 0

        tries, is_done, called = 0, [False], type(self.leaving)()
        call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)
        self.calls.append(call)
        while not is_done[-1] and not self.leaving.wait(0.1):
            tries = min(tries + 1, MAX_TRIES)
            called.clear()
            ctypes.pythonapi.Py_AddPendingCall(call, None)
            while not called.wait(0.1) and not self.leaving.is_set():
                pass

    def begin_seconds(self):
        data = sys.modules.get("torch.utils.data")
        if data is not None and data.get_worker_info() is not None:
            return  # a worker of a loader
        try:
            config = self.torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        except TypeError:
            config = None  # An older PyTorch records the main thread alone.
        self.has_all_threads = config is not None
        self.begin(experimental_config=config)

    def begin(self, **how):
        import time
        import weakref

        self.is_kept = True
        profiler = self.torch.profiler
        activities = set(profiler.supported_activities())
        if not self.torch.cuda.is_initialized():
            activities.discard(profiler.ProfilerActivity.CUDA)
        self.note(recording=True, rank=self.rank())
        ends = list(self.ends)
        lengths = ["%.3f" % ((end - begin) * 1e3) for begin, end in zip(ends, ends[1:])]
        self.mean_s = (ends[-1] - ends[0]) / len(lengths) if lengths else LIMIT_S
        self.here.profiler = self.profiler = profiler.profile(
            activities=activities, on_trace_ready=self.write, record_shapes=True, profile_memory=self.memory,
            with_stack=self.stacks and sys.getprofile() is None, **how,  # It would end the program's own tracing of calls.
        )  # fmt: skip
        if hasattr(self.profiler, "preset_metadata_json"):  # since PyTorch 2.1
            self.profiler.preset_metadata_json("unrecorded_steps_ms", '"%s"' % " ".join(lengths))
            self.profiler.preset_metadata_json("free_cores", str(self.free_cores()))
            if self.speeds:
                threads = min(self.torch.get_num_threads(), self.speeds["cores"])
                speeds = [self.speeds[key] * threads / self.speeds["cores"] for key in ("flop_per_s", "bytes_per_s")]
                self.profiler.preset_metadata_json("speeds", '"%.0f %.0f"' % tuple(speeds))
        # Kineto prints a line whenever a profiler starts. It reads its level once, when the first one does.
        is_level_ours = "KINETO_LOG_LEVEL" not in os.environ
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        try:
            self.call(self.profiler.start)
        finally:
            if is_level_ours:
                del os.environ["KINETO_LOG_LEVEL"]
        self.begun = time.monotonic()
        self.here.token = lambda: None  # It goes with this thread.
        self.ended = weakref.ref(self.here.token, self.end_thread)

    def end_thread(self, _):
        self.here.profiler = self.profiler  # A value of this thread has just gone too.
        self.note(problem=PLACE)  # until there is a trace
        self.finish()

    def call(self, method, *args):
        """Calls a method of our profiler. Its warnings are for those who call it by themselves."""
        import warnings

        before = warnings.showwarning, self.here.is_ours
        warnings.showwarning, self.here.is_ours = lambda *_, **__: None, True
        try:
            return method(*args)
        finally:
            warnings.showwarning, self.here.is_ours = before

    def finish(self):
        """Ends the recording where it can be ended. It is written, unless it was written before or is not kept."""
        if self.is_here():
            self.unfollow()
            profiler, self.profiler, self.ended = self.profiler, None, None
            self.is_over = self.is_over or self.is_kept
            try:
                self.call(profiler.__exit__, None, None, None)
            except Exception as error:
                self.give_up(error)

    def write(self, profiler):
        """Writes the trace under another name first, so that nobody reads a half of it."""
        import socket
        import time

        recorded = time.monotonic() - self.begun
        if self.seconds is None:
            recorded = min(profiler.step_num - self.warmup, self.steps)
        results = profiler.profiler.kineto_results
        # A launcher runs no operator, nor does a main thread that runs no line of Python before its end.
        is_empty = results is None or (self.seconds is not None and not results.events())
        if not self.is_kept or recorded == 0 or is_empty:
            return self.note(recording=False)
        rank = self.rank()
        folder = os.path.join(self.output, "rank_%d" % rank)
        os.makedirs(folder, exist_ok=True)
        name = "%s_%d.%d.pt.trace.json" % (socket.gethostname(), os.getpid(), time.time_ns())
        path = os.path.join(folder, name)
        part = path + ".part"
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            profiler.export_chrome_trace(part)
            with open(part, "rb") as file:
                file.seek(max(os.path.getsize(part) - 16, 0))
                if not file.read().rstrip().endswith(b"}"):
                    raise OSError("the trace was cut off; is the disk full?")
            os.rename(part, path)
        finally:
            for left in (part, part + ".tmp"):  # the second by PyTorch, if the disk is full
                if os.path.exists(left):
                    os.unlink(left)
        self.note(trace=path, rank=rank, recorded=recorded, torch=str(self.torch.__version__), recording=False, problem="")

    def rank(self):
        distributed = self.torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            self.known_rank = distributed.get_rank()
        if self.known_rank is not None:
            return self.known_rank  # also once the program has left its group
        names = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]
        return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 0)

    def free_cores(self):
        """The cores of this host, shared equally by its ranks, that the threads of this rank's steps leave free."""
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
        share = len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdigit() else 1, 1)
        threads = 1 if self.torch.cuda.is_initialized() else self.torch.get_num_threads()
        return max(share - threads, 0)

    def watch_profilers(self, profile):
        """One profiler can run in a process, and the program's own goes first: ours ends when another one is about to start."""
        import weakref

        prepare, start, leave = profile._prepare_trace, profile._start_trace, profile.__exit__

        def prepare_trace(profiler):
            self.give_way()
            if not self.here.is_ours:
                self.other = weakref.ref(profiler)
            prepare(profiler)

        def start_trace(profiler):
            if self.give_way():
                prepare(profiler)  # Ours has undone it.
            start(profiler)

        def exit_profile(profiler, *error):
            try:
                return leave(profiler, *error)
            finally:
                if self.other() is profiler:
                    self.other = lambda: None

        profile._prepare_trace, profile._start_trace, profile.__exit__ = prepare_trace, start_trace, exit_profile
        for kind in ("emit_itt", "emit_nvtx"):
            self.watch_marks(getattr(self.torch.autograd.profiler, kind, None))

    def watch_marks(self, kind):
        """These are profilers for other programs' recordings."""
        import weakref

        if kind is None:
            return
        enter, leave = kind.__enter__, kind.__exit__

        def enter_marks(marks):
            self.give_way()
            self.other = weakref.ref(marks)
            return enter(marks)

        def leave_marks(marks, *error):
            self.other = lambda: None
            return leave(marks, *error)

        kind.__enter__, kind.__exit__ = enter_marks, leave_marks

    def give_way(self):
        """Ends our recording, if this is a call of another profiler. Whether it did."""
        if self.here.is_ours or self.profiler is None:
            return False
        self.note(problem=INTERRUPTED)
        self.interruptions += 1
        self.is_kept, self.here.pending = False, None
        self.finish()
        self.is_over = self.is_over or self.interruptions == MAX_INTERRUPTIONS
        return self.profiler is None

    def give_up(self, error):
        if self.is_kept:
            self.note(problem="%s: %s" % (type(error).__name__, error))
        self.is_kept, self.is_over = False, True
        self.finish()

    def leave(self):
        """The end of the process: a recording that has begun is written."""
        self.leaving.set()
        if self.seconds is not None:
            self.thread.join(LIMIT_S)
        self.finish()
        self.note(steps=self.most, ended=True)
        if self.notes is None and "trace" not in self.facts:
            why = self.facts.get("problem") or "the program made %d optimizer steps" % self.most
            sys.stderr.write("paceline_record: nothing was recorded: %s\n" % why)

    def end_program(self):
        """Ends this rank as `sys.exit` does, once all that record have written: a rank may wait for the work of another one."""
        import threading
        import time

        limit = time.monotonic() + LIMIT_S
        while self.notes is not None and not self.have_all_written() and time.monotonic() < limit:
            time.sleep(0.02)
        if threading.current_thread() is not threading.main_thread():
            return self.note(problem="--stop cannot end the program, because a thread of it trains")
        sys.exit(0)

    def have_all_written(self):
        try:
            for name in os.listdir(self.notes):
                if name.endswith(".note"):
                    with open(os.path.join(self.notes, name), "rb") as file:
                        text = file.read()
                    if text.rfind(b'"recording": true') > max(text.rfind(b'"recording": false'), text.rfind(b'"problem"')):
                        return False
        except OSError:
            pass  # `paceline record` has ended, and nobody else waits.
        return True

    def note(self, **facts):
        """Appends a line to the notes of this process, unless it is the last one."""
        self.facts.update(facts)
        if self.notes is not None and facts != self.noted:
            self.noted = facts
            import json
            import socket

            name = "%s-%d.note" % (socket.gethostname(), os.getpid())
            try:
                with open(os.path.join(self.notes, name), "a", encoding="utf-8") as file:
                    file.write(json.dumps(facts) + "\n")
            except OSError:
                pass
