"""The backend with torch: storage that moves to shared memory, figures, and the flight recorder's files. Needs torch.

    cargo build -p paceline-python && python3 python/tests/test_share.py target/debug/lib_native.so [PACELINE]

With the path of the program paceline, `paceline hang` reads the files too.
"""
import contextlib
import datetime
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path
from unittest import mock

LIMIT_S = 30.0


def on_ranks(world, body, limit_s=LIMIT_S, **environment):
    """Runs `body(rank)` on each rank, a child of this process. Returns how each has ended."""
    folder, children = tempfile.mkdtemp(), []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(int(4 * LIMIT_S))
                os.environ.update(environment)
                import paceline.torch
                import torch.distributed as dist

                paceline.torch.register()
                torch.set_num_threads(1)
                limit = datetime.timedelta(seconds=limit_s)
                dist.init_process_group("paceline", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)
                body(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    shutil.rmtree(folder)
    return codes


def membership():
    from paceline.torch.backend import membership_of

    return membership_of(None)


def moved():
    return membership().storages.moved


def refusal(call, *args):
    try:
        call(*args)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    raise AssertionError("nothing was raised")


def layers(width=256):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def losses(model, rank, steps=6):
    optimizer, every = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randn(8, 256, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        every.append(loss.item())
    return every


class Share(unittest.TestCase):
    def test_a_storage_moves_with_all_tensors_on_it(self):
        def body(rank):
            from paceline.torch import share

            base = torch.arange(200_000.0)
            view = base[100_000:]
            assert share(view) == base.nbytes and share([base, view]) == base.nbytes
            assert share(nn.Linear(10, 10)) == 440
            assert base[7] == 7 and view[0] == 100_000
            view += rank
            torch.distributed.all_reduce(view)
            assert base[100_001] == 2 * 100_001 + 1 and base[99_999] == 99_999, base[100_001]
            # An operation that ends later, and one from memory that is shared to memory that is not.
            whole = torch.empty(400_000)
            torch.distributed.all_gather_single(whole, base, async_op=True).wait()
            assert torch.equal(whole[:200_000], whole[200_000:]) and torch.equal(base, whole[:200_000])
            assert "not resizable" in refusal(base.untyped_storage().resize_, 0)

        self.assertEqual(on_ranks(2, body), [0, 0])

    def test_an_address_that_torch_gives_again_is_not_taken_for_shared(self):
        def body(rank):
            from paceline.torch import share

            for size in (1 << 20, 3 << 20, 1 << 20):
                first = torch.full((size,), -1.0)
                share(first)
                address = first.data_ptr()
                held = len(moved())
                del first
                # The group still holds the storage, so nothing else has its address.
                others = [torch.full((size,), float(rank + 1)) for _ in range(8)]
                assert all(other.data_ptr() != address for other in others)
                for other in others:
                    torch.distributed.all_reduce(other)
                    assert (other == 3).all()
                share(torch.ones(5))
                assert len(moved()) <= held, "a storage that nobody uses goes with the next that is shared"
                # Its address may be given again now.
                others += [torch.full((size,), float(rank + 1)) for _ in range(8)]
                torch.distributed.all_reduce(others[-1])
                assert (others[-1] == 3).all()

        self.assertEqual(on_ranks(2, body), [0, 0])

    def test_memory_of_others_is_refused_before_anything_moves(self):
        def body(rank):
            from paceline.torch import share

            import numpy

            good, lent = torch.ones(10), torch.ones(10)
            seen = lent.numpy()
            for bad, text in (
                (torch.from_numpy(numpy.ones(10)), "numpy or another library"),
                (lent, "numpy or another library"),
                (torch.ones(10).share_memory_(), "shared memory already"),
                ("words", "a tensor, a module or a list, got str"),
            ):
                assert text in refusal(share, [good, bad]), bad
            assert not moved() and seen[0] == 1
            assert share(torch.ones(0)) == 0
            with mock.patch.dict(os.environ, {"PACELINE_TRANSPORT": "tcp"}):
                group = torch.distributed.new_group()
            assert share(good, group) == 0 and good[0] == 1
            other = torch.distributed.new_group(backend="gloo")
            assert "no group of the backend" in refusal(share, good, other)
            share(good)
            assert "of another group" in refusal(share, good, torch.distributed.new_group())

        self.assertEqual(on_ranks(2, body), [0, 0])

    def test_buckets_of_ddp_and_buffers_of_fsdp2_move_by_themselves(self):
        def body(rank):
            import torch.distributed as dist
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            every = {}
            groups = {"gloo": dist.new_group(backend="gloo"), "paceline": dist.group.WORLD}
            for name, group in groups.items():
                ddp = nn.parallel.DistributedDataParallel(layers(), process_group=group, bucket_cap_mb=0.5, gradient_as_bucket_view=True)
                every["ddp", name] = losses(ddp, rank)
                buckets = len(moved())
                assert name == "gloo" or buckets > 0, "no bucket has moved"
                on, model = DeviceMesh.from_group(group, "cpu"), layers()
                for layer in model:
                    if isinstance(layer, nn.Linear):
                        fully_shard(layer, mesh=on)
                every["fsdp2", name] = losses(fully_shard(model, mesh=on), rank)
                assert name == "gloo" or len(moved()) > buckets, "no buffer is in the heap"
                # A tensor that the program holds stays where it is.
                tensor = torch.ones(1 << 18)
                for _ in range(6):
                    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
                    group.allreduce([tensor]).wait()
                assert tensor.untyped_storage().resizable()
            for kind in ("ddp", "fsdp2"):
                assert every[kind, "gloo"] == every[kind, "paceline"], (kind, every)
            dist.destroy_process_group()

        self.assertEqual(on_ranks(2, body), [0, 0])


class Split(unittest.TestCase):
    def test_split_group_gives_its_members_a_group_in_their_order(self):
        if torch.__version__.startswith("2.14"):
            self.skipTest("torch 2.14 splits no groups of processors")

        def body(rank):
            import torch.distributed as dist

            first = dist.split_group(split_ranks=[[1, 0], [2]])
            assert dist.get_process_group_ranks(first) == ([2] if rank == 2 else [1, 0])
            limit = datetime.timedelta(seconds=0.5)
            part = dist.split_group(split_ranks=[[2, 1]], timeout=limit)
            assert (part == dist.GroupMember.NON_GROUP_MEMBER) == (rank == 0)
            if rank == 1:
                assert "waiting for ranks [2]" in refusal(dist.all_reduce, torch.ones(1), dist.ReduceOp.SUM, part)
                within = dist.split_group(first, split_ranks=[[0]])
                assert dist.get_process_group_ranks(within) == [1]
            total = torch.ones(5) * rank
            dist.all_reduce(total, group=first)
            assert (total == (2 if rank == 2 else 1)).all(), total
            dist.barrier()
            dist.destroy_process_group()

        self.assertEqual(on_ranks(3, body), [0, 0, 0])


class Figures(unittest.TestCase):
    def test_operations_are_counted_and_the_last_rank_is_named(self):
        def body(rank):
            import torch.distributed as dist
            from paceline.torch import figures

            for _ in range(3):
                time.sleep(0.1 * (rank == 1))
                dist.all_reduce(torch.ones(1000))
            dist.all_reduce(torch.ones(1000), async_op=True).wait()
            if rank < 2:
                dist.send(torch.ones(10), 1) if rank == 0 else dist.recv(torch.ones(10), 0)
            row = figures()["all_reduce"]
            assert (row["calls"], row["bytes"]) == (4, 16_000), row
            if rank != 1:
                assert max(row["waited_for_s"], key=row["waited_for_s"].get) == 1 and row["waiting_s"] > 0.01, row
            assert row["moving_s"] > 0 and row["queued_s"] > 0, row
            message = figures().get(("send", "recv", "")[rank])
            assert rank == 2 or (message["calls"], message["bytes"]) == (1, 40), message
            with contextlib.redirect_stderr(io.StringIO()) as text:
                dist.destroy_process_group()
            lines = text.getvalue().splitlines()
            assert (len(lines) == 4) == (rank == 0), lines
            assert all(len(line) <= 80 for line in lines), lines
            assert rank != 0 or lines[2].endswith(" 1") and lines[2].split()[:2] == ["all_reduce", "4"], lines

        self.assertEqual(on_ranks(3, body, PACELINE_REPORT="1"), [0, 0, 0])


class FlightRecorder(unittest.TestCase):
    def hang(self, body, codes):
        """The files of ranks that run `body`, and the outcome of `paceline hang`."""
        folder = Path(tempfile.mkdtemp())
        # Whatever has these names is replaced, not followed.
        (folder / "trace_0").symlink_to("/dev/full")
        os.mkfifo(folder / "trace_2")
        self.assertEqual(on_ranks(3, body, limit_s=2.0, TORCH_FR_DUMP_TEMP_FILE=str(folder / "trace_")), codes)
        files = {file.name: pickle.loads(file.read_bytes()) for file in folder.iterdir()}
        outcome = None
        if program:
            ran = subprocess.run([program, "hang", folder, "--json", folder / "hang.json"], capture_output=True, text=True, timeout=60)
            self.assertEqual(ran.returncode, 0, ran.stderr)
            outcome = json.loads((folder / "hang.json").read_text())
        shutil.rmtree(folder)
        return files, outcome

    def test_a_rank_that_is_killed_is_the_culprit(self):
        def body(rank):
            import torch.distributed as dist

            dist.all_reduce(torch.ones(10))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            assert "rank 1 died" in refusal(dist.all_reduce, torch.ones(20, 3))

        files, outcome = self.hang(body, [0, -signal.SIGKILL, 0])
        self.assertEqual(sorted(files), ["trace_0", "trace_2"])
        last = files["trace_2"]["entries"][-1]
        self.assertEqual((last["state"], last["input_sizes"], last["collective_seq_id"]), ("started", [[20, 3]], 2))
        self.assertIn("test_share.py", last["frames"][0]["filename"])
        self.assertEqual(files["trace_0"]["pg_config"]["0"]["ranks"], "[0, 1, 2]")
        if outcome:
            self.assertEqual([(of["rank"], of["cause"], of["call"]) for of in outcome["culprits"]], [(1, "no file", "all_reduce #2")])

    def test_a_rank_that_is_stuck_is_the_culprit_also_if_it_comes_later(self):
        def body(rank):
            import torch.distributed as dist

            dist.all_reduce(torch.ones(10))
            if rank == 1:
                time.sleep(4)
            refusal(dist.all_reduce, torch.ones(20))
            refusal(dist.all_reduce, torch.ones(20))

        files, outcome = self.hang(body, [0, 0, 0])
        self.assertEqual([len(files[f"trace_{rank}"]["entries"]) for rank in range(3)], [2, 1, 2])
        if outcome:
            self.assertEqual([(of["rank"], of["cause"], of["call"]) for of in outcome["culprits"]], [(1, "host", "all_reduce #2")])


if __name__ == "__main__":
    home = Path(tempfile.mkdtemp())
    shutil.copytree(Path(__file__).resolve().parent.parent / "paceline", home / "paceline")
    shutil.copy(sys.argv.pop(1), home / "paceline" / "_native.abi3.so")
    program = Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 and not sys.argv[1].startswith("-") and "." not in sys.argv[1] else None
    sys.path.insert(0, str(home))
    import torch
    from torch import nn

    outcome = unittest.main(exit=False, verbosity=1)
    shutil.rmtree(home)
    sys.exit(not outcome.result.wasSuccessful())
