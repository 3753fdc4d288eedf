"""Records some steps of a PyTorch program with torch.profiler, on each rank, without a change to the program.

`paceline record` starts this in every Python process. A program can also start it by itself:

    import paceline_record
    paceline_record.start(after=20, steps=5, output="traces")

Optimizer steps are counted for each optimizer. The first optimizer to make `after` steps is the one whose steps divide the
recording. A process that steps no optimizer, such as a worker of a loader, records nothing. With `seconds`, all threads are
recorded for that time instead, `after` seconds after the import of torch. One step more than `steps` is in the trace, because
the end of the recording falls into the last one.

Each process appends what happened to a file of notes, which `paceline record` reads. Nothing here prints, and no fault here
reaches the program. This file does not know how traces are read.
"""

import os
import sys

# How long a rank that has recorded waits for the others before it ends, and the end of a process for its recording.
LIMIT_S = 60
# How often the program's own profiler may interrupt the recording before it is given up.
MAX_INTERRUPTIONS = 3

_recorder = None


def start(after=20, steps=5, seconds=None, stacks=False, memory=False, stop=False, output="traces", notes=None):
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
    _when_torch_is_there(lambda torch: _attach_from(folder, torch))


def _attach_from(folder, torch):
    global _recorder
    try:
        import json

        with open(os.path.join(folder, "settings.json"), encoding="utf-8") as file:
            _recorder = Recorder(notes=folder, **json.load(file))
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


class Recorder:
    """The recording of one process."""

    def __init__(self, after, steps, seconds, stacks, memory, stop, output, notes):
        self.after, self.steps, self.seconds = after, steps, seconds
        self.stacks, self.memory, self.stop, self.output, self.notes = stacks, memory, stop, output, notes
        self.warmup = 1 if seconds is None and after > 1 else 0
        self.interruptions = 0
        self.is_over = False
        self.unfollow = lambda: None

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
            return self.note(problem="old")
        self.forget()
        self.watch_profilers(self.torch.autograd.profiler.profile)
        os.register_at_fork(after_in_child=self.forget)
        atexit.register(self.leave)
        if self.seconds is None:

            def stepped(optimizer, args, kwargs):
                self.stepped(optimizer)

            stepped._torchdynamo_disable = True  # A compiled step calls it as it is.
            self.hook = register(stepped)
        else:
            self.leaving, self.calls = threading.Event(), []
            self.thread = threading.Thread(target=self.wait_and_record, name="paceline_record", daemon=True)
            self.thread.start()

    def forget(self):
        """A new process, or a new attempt, has made no steps and records nothing."""
        import weakref

        self.made = weakref.WeakKeyDictionary()  # the steps of each optimizer
        self.most, self.profiler, self.pending, self.is_ours, self.other = 0, None, None, False, lambda: None

    def stepped(self, optimizer):
        """The hook after each optimizer step. It is called within the step's span, in which no step of a trace may end."""
        self.do_pending()
        if self.is_over:
            return self.unfollow()
        try:
            made = self.made[optimizer] = self.made.get(optimizer, 0) + 1
            if self.profiler is None:
                self.before_recording(optimizer, made)
            else:
                self.while_recording(optimizer, made)
        except Exception as error:
            self.give_up(error)

    def before_recording(self, optimizer, made):
        if made > self.most:
            self.most = made
            if made & (made - 1) == 0:
                self.note(steps=made)  # for a process that is killed
        if made < max(self.after - 1, 1):
            return
        if self.other() is not None:
            self.note(problem="other")
        else:
            import weakref

            self.counted, self.made = weakref.ref(optimizer), weakref.WeakKeyDictionary()
            self.follow_spans(self.torch.autograd.profiler.record_function)
            self.pending = self.begin_steps

    def while_recording(self, optimizer, made):
        num_steps = self.warmup + self.steps + 1
        if optimizer is self.counted():
            self.most += 1
            self.pending = self.profiler.step if made < num_steps else self.finish_steps
        elif made > num_steps + 2:
            self.pending = self.finish  # The counted optimizer has made its last step.

    def follow_spans(self, span_kind):
        """Does what is pending when the span of the optimizer step ends. If that is compiled away, the next step does.

        The program's own profiler may mark steps though it does not run. They get another name in our trace.
        """
        self.unfollow()
        enter, leave = span_kind.__enter__, span_kind.__exit__

        def enter_span(span):
            if self.is_ours or not span.name.startswith("ProfilerStep#"):
                return enter(span)
            name, span.name = span.name, "Program's " + span.name
            try:
                return enter(span)
            finally:
                span.name = name

        def exit_span(span, *error):
            leave(span, *error)
            if self.pending is not None and span.name.startswith("Optimizer.step#"):
                self.do_pending()
                if self.is_over:
                    self.hook.remove()
                    self.unfollow()

        def unfollow():
            span_kind.__enter__, span_kind.__exit__, self.unfollow = enter, leave, lambda: None

        span_kind.__enter__, span_kind.__exit__, self.unfollow = enter_span, exit_span, unfollow

    def do_pending(self):
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            self.call(pending)
        except Exception as error:
            self.give_up(error)
        if self.is_over and self.stop:
            self.end_program()

    def begin_steps(self):
        plan = self.torch.profiler.schedule(wait=0, warmup=self.warmup, active=self.steps + 1, repeat=1)
        self.begin(schedule=plan)

    def finish_steps(self):
        self.profiler.step()
        self.finish()

    def wait_and_record(self):
        """The thread of a recording by time. Only the main thread can start a profiler of all threads."""
        self.has_all_threads = False
        if self.leaving.wait(self.after):
            return
        while self.other() is not None:
            if self.leaving.wait(0.1):
                return self.note(problem="other")
        self.call_in_main_thread(self.begin_seconds)
        self.leaving.wait(self.seconds)
        if self.has_all_threads:
            self.finish()  # The main thread may wait for others for as long as the program runs.
        else:
            self.call_in_main_thread(self.finish)

    def call_in_main_thread(self, function):
        import ctypes

        def run(_):
            try:
                function()
            except Exception as error:
                self.give_up(error)
            done.set()
            return 0

        done = type(self.leaving)()
        call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)
        self.calls.append(call)  # Python calls it when the main thread next runs a line, however late.
        ctypes.pythonapi.Py_AddPendingCall(call, None)
        while not done.wait(0.1) and not self.leaving.is_set():
            pass

    def begin_seconds(self):
        if self.leaving.is_set():
            return
        try:
            config = self.torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        except TypeError:
            config = None  # An older PyTorch records the main thread alone.
        self.has_all_threads = config is not None
        self.begin(experimental_config=config)

    def begin(self, **how):
        import time

        profiler = self.torch.profiler
        activities = set(profiler.supported_activities())
        if not self.torch.cuda.is_initialized():
            activities.discard(profiler.ProfilerActivity.CUDA)
        self.note(recording=True)
        self.is_kept = True
        self.profiler = profiler.profile(
            activities=activities, on_trace_ready=self.write, record_shapes=True, profile_memory=self.memory,
            with_stack=self.stacks, **how,
        )  # fmt: skip
        # Kineto prints a line whenever a profiler starts. It reads its level once, when the first one does.
        is_level_ours = "KINETO_LOG_LEVEL" not in os.environ
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        try:
            self.call(self.profiler.start)
        finally:
            if is_level_ours:
                del os.environ["KINETO_LOG_LEVEL"]
        self.begun = time.monotonic()

    def call(self, method, *args):
        """Calls a method of our profiler. Its warnings are for those who call it by themselves."""
        import warnings

        before = warnings.showwarning, self.is_ours
        warnings.showwarning, self.is_ours = lambda *_, **__: None, True
        try:
            return method(*args)
        finally:
            warnings.showwarning, self.is_ours = before

    def finish(self):
        """Ends the recording. What has been recorded is written, unless it was written before or is not kept."""
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            self.is_over = self.is_kept
            self.call(profiler.__exit__, None, None, None)

    def write(self, profiler):
        """Writes the trace under another name first, so that nobody reads a half of it."""
        import socket
        import time

        recorded = time.monotonic() - self.begun
        if self.seconds is None:
            recorded = min(profiler.step_num - self.warmup, self.steps)
        if not self.is_kept or recorded == 0:
            return
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
        self.note(trace=path, rank=rank, recorded=recorded)

    def rank(self):
        distributed = self.torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank()
        names = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"]
        return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), 0)

    def watch_profilers(self, profile):
        """One profiler can run in a process, and the program's own goes first: ours ends when another one is about to start."""
        import weakref

        prepare, start, leave = profile._prepare_trace, profile._start_trace, profile.__exit__

        def prepare_trace(profiler):
            self.give_way()
            if not self.is_ours:
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

    def give_way(self):
        """Ends our recording, if this is a call of another profiler. Whether there was one to end."""
        if self.is_ours or self.profiler is None:
            return False
        self.note(problem="interrupted")
        self.interruptions += 1
        self.is_kept, self.pending = False, None
        try:
            self.finish()
        except Exception as error:
            self.give_up(error)
        self.is_over = self.is_over or self.interruptions == MAX_INTERRUPTIONS
        return True

    def give_up(self, error):
        self.note(problem="error", text="%s: %s" % (type(error).__name__, error))
        self.is_kept = False
        try:
            self.finish()
        except Exception:
            pass  # It has ended, or had not begun.
        self.is_over = True

    def leave(self):
        """The end of the process: a recording that has begun is written."""
        try:
            if self.seconds is not None:
                self.leaving.set()
                self.thread.join(LIMIT_S)
            self.finish()
        except Exception as error:
            self.give_up(error)
        self.note(steps=self.most, ended=True)

    def end_program(self):
        """Ends this rank as `sys.exit` does, once all that record have written: a rank may wait for the work of another one."""
        import threading
        import time

        limit = time.monotonic() + LIMIT_S
        while self.notes is not None and not self.have_all_written() and time.monotonic() < limit:
            time.sleep(0.02)
        if threading.current_thread() is not threading.main_thread():
            return self.note(problem="thread")
        sys.exit(0)

    def have_all_written(self):
        for name in os.listdir(self.notes):
            if name.endswith(".note"):
                with open(os.path.join(self.notes, name), "rb") as file:
                    text = file.read()
                if text.rfind(b'"recording"') > max(text.rfind(b'"trace"'), text.rfind(b'"problem"')):
                    return False
        return True

    def note(self, **facts):
        """Appends a line to the notes of this process."""
        if self.notes is not None:
            import json
            import socket

            name = "%s-%d.note" % (socket.gethostname(), os.getpid())
            try:
                with open(os.path.join(self.notes, name), "a", encoding="utf-8") as file:
                    file.write(json.dumps(facts) + "\n")
            except OSError:
                pass
