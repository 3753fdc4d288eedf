"""The binding without torch: groups of processes that meet through files, and operations on the memory of arrays.

    cargo build -p paceline-python && python3 python/tests/test_binding.py target/debug/lib_native.so
"""
import array
import ctypes
import importlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest
from pathlib import Path
from unittest import mock

# No test waits longer for another rank.
LIMIT_S = 20.0


def exchange_in(folder, rank, world):
    """Exchanges texts through files."""

    def exchange(name, text):
        temporary = folder / f"{name}-{rank}.new"
        temporary.write_text(text)
        temporary.rename(folder / f"{name}-{rank}")
        deadline = time.monotonic() + LIMIT_S
        files = [folder / f"{name}-{peer}" for peer in range(world)]
        while not all(file.exists() for file in files):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a rank did not pass on its {name}")
            time.sleep(0.002)
        return [file.read_text() for file in files]

    return exchange


def span(data):
    address, length = data.buffer_info()
    return address, length * data.itemsize


def run(group, kind, dtype, data, *, blocks=False, root=0, op="sum", limit_s=LIMIT_S, finish=None):
    memory = span(data)
    return group.run((kind, dtype, op, root), (memory, memory, None), (data, finish), blocks, limit_s)


def in_processes(world, body, names=()):
    """Runs `body(rank, group)` on each rank, a child of this process. Returns how each has ended."""
    folder = Path(tempfile.mkdtemp())
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(int(3 * LIMIT_S))
                exchange = exchange_in(folder, rank, world)
                body(rank, _native.Group((rank, world, list(names)), LIMIT_S, 1, None, exchange))
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    shutil.rmtree(folder)
    return codes


def refusal(call, *args, **named):
    try:
        call(*args, **named)
    except (RuntimeError, TimeoutError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


class Package(unittest.TestCase):
    def test_an_old_torch_is_refused_by_name(self):
        old = types.ModuleType("torch")
        for version in ("2.13.1+cpu", "1.9", "unknown"):
            old.__version__ = version
            with mock.patch.dict(sys.modules, {"torch": old}), self.assertRaises(ImportError) as raised:
                importlib.import_module("paceline.torch")
            self.assertIn(f"needs torch 2.14 or newer, and this is torch {version}", str(raised.exception))

    def test_without_the_program_there_is_one_message(self):
        command = [sys.executable, "-c", "import runpy, sysconfig; sysconfig.get_path = lambda *_: '/nowhere'; runpy.run_module('paceline', run_name='__main__')"]
        ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": sys.path[0]}, capture_output=True, text=True, timeout=60)
        self.assertEqual((ended.returncode, ended.stderr.count("\n")), (1, 1), ended.stderr)
        self.assertIn("install the wheel again", ended.stderr)


class Binding(unittest.TestCase):
    def test_operations_end_at_once_and_in_the_background(self):
        def body(rank, group):
            assert group.transport() == "shm", group.transport()
            data = array.array("f", [rank, 1.0])
            assert run(group, "all_reduce", "f32", data, blocks=True) is None
            order = []
            work = run(group, "all_reduce", "f32", data, finish=lambda: order.append("finish"))
            work.then(lambda error: order.append(error))
            work.wait()
            assert list(data) == [2.0, 4.0], data
            # The callback comes after the end, on another thread.
            deadline = time.monotonic() + LIMIT_S
            while len(order) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            assert order == ["finish", None], order
            group.close(False)
            assert "has left the group" in refusal(run, group, "barrier", "u8", array.array("B"))

        self.assertEqual(in_processes(2, body), [0, 0])

    def test_a_callback_may_wait_for_another_operation(self):
        def body(rank, group):
            data, more = array.array("f", [1.0]), array.array("f", [5.0])
            work = run(group, "all_reduce", "f32", data, finish=lambda: run(group, "all_reduce", "f32", more).wait())
            work.wait(LIMIT_S)
            assert (data[0], more[0]) == (2.0, 10.0), (data, more)
            group.close(False)

        self.assertEqual(in_processes(2, body), [0, 0])

    def test_an_error_of_a_callback_is_the_error_of_the_work(self):
        def body(rank, group):
            work = run(group, "barrier", "u8", array.array("B"), finish=lambda: 1 // 0)
            assert "division" in refusal(work.wait)
            group.close(False)

        self.assertEqual(in_processes(2, body), [0, 0])

    def test_messages_have_tags_and_sources(self):
        def body(rank, group):
            data = array.array("i", [rank + 7])

            finished = []

            def post(is_send, peer, tag, data):
                return group.post((is_send, peer, tag), ("i32", span(data)), (data, lambda: finished.append(tag)), LIMIT_S)

            if rank == 0:
                late = array.array("i", [99])
                works = [post(True, 1, 5, data), post(True, 1, 6, late)]
                [work.wait() for work in works]
            else:
                late = post(False, None, 6, data)
                late.wait()
                assert late.source() == 0 and data[0] == 99, data
                post(False, 0, 5, data).wait()
                assert data[0] == 7, data
            assert sorted(finished) == [5, 6], finished
            group.close(False)

        self.assertEqual(in_processes(2, body), [0, 0])

    def test_memory_moves_to_the_heap_and_is_counted(self):
        def body(rank, group):
            theirs = mmap.mmap(-1, 3 << 20)
            theirs[-1] = rank + 1
            address = ctypes.addressof(ctypes.c_char.from_buffer(theirs))
            place = group.adopt((address, len(theirs)))
            assert place and theirs[-1] == rank + 1
            group.run(("all_reduce", "u8", "sum", 0), ((place, len(theirs)),) * 2 + (None,), (theirs, None), True, LIMIT_S)
            assert theirs[-1] == 3, theirs[-1]
            calls, count, _, waited_for = group.figures()["all_reduce"]
            assert (calls, count) == (1, len(theirs)) and set(waited_for) <= {0, 1}, group.figures()
            group.give_back(place)
            group.give_back(1)
            group.close(False)
            assert "has left the group" in refusal(group.adopt, (address, 4096))

        self.assertEqual(in_processes(2, body), [0, 0])

    def test_a_killed_rank_is_named_within_a_second(self):
        def body(rank, group):
            data = array.array("f", [1.0])
            run(group, "all_reduce", "f32", data, blocks=True)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            message = group.post((False, 1, 0), ("f32", span(data)), (data, None), LIMIT_S)
            begin = time.monotonic()
            error = refusal(run, group, "all_reduce", "f32", data, blocks=True)
            assert "rank 8: rank 9 died during all_reduce #" in error, error
            error = refusal(message.wait)
            assert "rank 8: rank 9 died during recv #0" in error, error
            assert time.monotonic() - begin < LIMIT_S / 2
            group.close(False)

        self.assertEqual(in_processes(2, body, names=[8, 9]), [0, -signal.SIGKILL])

    def test_a_rank_that_dies_before_its_child_is_noticed(self):
        def body(rank, group):
            data = array.array("f", [1.0])
            os.register_at_fork(after_in_child=group.close_in_child)
            if rank == 1:
                if os.fork() == 0:
                    time.sleep(LIMIT_S / 2)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            error = refusal(run, group, "all_reduce", "f32", data, blocks=True)
            assert "rank 1 died" in error, error
            error = refusal(group.post((False, 1, 0), ("f32", span(data)), (data, None), LIMIT_S).wait)
            assert "rank 1 died" in error and time.monotonic() - begin < LIMIT_S / 4, error
            group.close(False)

        self.assertEqual(in_processes(2, body), [0, -signal.SIGKILL])

    def test_ranks_that_disagree_are_named(self):
        def body(rank, group):
            kind = ["all_reduce", "broadcast"][rank]
            error = refusal(run, group, kind, "f32", array.array("f", [1.0]), blocks=True)
            assert "all_reduce(f32, 1, sum)" in error and "broadcast(f32, 1, root 0)" in error, error
            group.close(False)

        self.assertEqual(in_processes(2, body), [0, 0])

    def test_sockets_carry_what_memory_does(self):
        def body(rank, group):
            assert group.transport() == "tcp", group.transport()
            data = array.array("d", [rank + 1.0] * 100_000)
            run(group, "all_reduce", "f64", data).wait()
            assert data[-1] == 6.0, data[-1]
            works = [group.post((True, (rank + 1) % 3, 4), ("f64", span(data)), (data, None), LIMIT_S)]
            got = array.array("d", [0.0] * 100_000)
            works.append(group.post((False, (rank + 2) % 3, 4), ("f64", span(got)), (got, None), LIMIT_S))
            for work in works:
                work.wait()
            assert got[-1] == 6.0, got[-1]
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            assert "rank 2" in refusal(run, group, "all_reduce", "f64", data, blocks=True)
            group.close(False)

        with mock.patch.dict(os.environ, {"PACELINE_TRANSPORT": "tcp"}):
            self.assertEqual(in_processes(3, body), [0, 0, -signal.SIGKILL])

    def test_a_transport_that_is_not_there_is_refused(self):
        for value, advice in (("pigeon", "there is no such transport"), ("mpi", "use shm, hybrid or tcp")):
            with mock.patch.dict(os.environ, {"PACELINE_TRANSPORT": value}):
                text = refusal(_native.Group, (0, 2, []), LIMIT_S, 1, None, None)
            self.assertIn(f'PACELINE_TRANSPORT="{value}" in the environment: ', text)
            self.assertIn(advice, text)

    def test_a_fork_cannot_use_the_group_and_does_not_break_it(self):
        def body(rank, group):
            data = array.array("f", [1.0])
            child = os.fork()
            if child == 0:
                error = refusal(run, group, "all_reduce", "f32", data, blocks=True)
                group.close(False)
                del group
                os._exit(0 if "cannot use it: call init_process_group after the fork" in error else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            run(group, "all_reduce", "f32", data, blocks=True)
            assert data[0] == 2.0, data
            group.close(False)

        self.assertEqual(in_processes(2, body), [0, 0])

    def test_a_limit_is_a_timeout_error(self):
        def body(rank, group):
            if rank == 0:
                error = refusal(run, group, "barrier", "u8", array.array("B"), blocks=True, limit_s=0.05)
                assert error.startswith("TimeoutError: ") and "waiting for ranks [1]" in error, error
            else:
                time.sleep(0.5)
            group.close(True)

        self.assertEqual(in_processes(2, body), [0, 0])

    def test_wrong_arguments_are_refused_before_anything_starts(self):
        def body(rank, group):
            data = array.array("f", [1.0])
            assert '"all_reduces" is not known' in refusal(run, group, "all_reduces", "f32", data)
            assert '"f8" is not known' in refusal(run, group, "all_reduce", "f8", data)
            assert "seconds" in refusal(run, group, "all_reduce", "f32", data, limit_s=-1.0)
            assert "seconds" in refusal(run, group, "all_reduce", "f32", data, limit_s=float("nan"))
            assert "no rank 2" in refusal(run, group, "broadcast", "f32", data, root=2)
            assert "bytes for elements of 8" in refusal(run, group, "all_reduce", "f64", data)
            run(group, "barrier", "u8", data[:0], blocks=True)
            group.close(False)

        self.assertEqual(in_processes(2, body), [0, 0])

    def test_groups_leave_nothing(self):
        def count():
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        def body(rank, group):
            before = None
            for at in range(20):
                folder = Path(tempfile.gettempdir()) / f"paceline-{os.getppid()}-{at}"
                folder.mkdir(exist_ok=True)
                other = _native.Group((rank, 2, []), LIMIT_S, 1, None, exchange_in(folder, rank, 2))
                data = array.array("f", [1.0])
                run(other, "all_reduce", "f32", data).wait()
                peer = 1 - rank
                sent = other.post((True, peer, 0), ("f32", span(data)), (data, None), LIMIT_S)
                other.post((False, peer, 0), ("f32", span(data)), (data, None), LIMIT_S).wait()
                sent.wait()
                other.close(False)
                run(group, "barrier", "u8", data[:0], blocks=True)
                if rank == 0:
                    shutil.rmtree(folder)
                before = before or count()
            # Threads that have ended are gone a little later.
            deadline = time.monotonic() + LIMIT_S
            while sum(count()) > sum(before) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert sum(count()) <= sum(before), (before, count())
            group.close(False)

        self.assertEqual(in_processes(2, body), [0, 0])


if __name__ == "__main__":
    home = Path(tempfile.mkdtemp())
    shutil.copytree(Path(__file__).resolve().parent.parent / "paceline", home / "paceline")
    shutil.copy(sys.argv.pop(1), home / "paceline" / "_native.abi3.so")
    sys.path.insert(0, str(home))
    from paceline import _native

    outcome = unittest.main(exit=False, verbosity=1)
    shutil.rmtree(home)
    sys.exit(not outcome.result.wasSuccessful())
