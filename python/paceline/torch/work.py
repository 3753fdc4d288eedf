"""Works of torch.distributed over the works of paceline."""
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from . import flight


def failure(error: object) -> Exception:
    """The error as torch.distributed raises it."""
    flight.failed(error)
    late = ", timeout of an operation" if isinstance(error, TimeoutError) else ""
    return dist.DistBackendError(f"paceline{late}: {error}")


class Received(list):
    """The tensors of a receive, and the rank of their sender once they are there."""

    source = -1


class Work(dist.Work):
    """Work in the background. It has a future once somebody asks for it, which then costs a turn of Python's lock."""

    def __init__(self, native, outputs):
        super().__init__()
        self.native, self.outputs, self.future = native, outputs, None

    def wait(self, timeout=None):
        seconds = timeout.total_seconds() if timeout else 0
        try:
            self.native.wait(seconds if seconds > 0 else None)
        except (RuntimeError, TimeoutError) as error:
            raise failure(error) from None
        return True

    def get_future(self):
        if self.future is None:
            self.future = promised(self.native, self.outputs)
        return self.future


def promised(native, outputs):
    """A future of the outputs.

    An error has to come out of a callback: Future.set_exception sets a result, which the C++ side of DDP takes for tensors.
    """

    def settle(future):
        error = future.value()
        if error is not None:
            raise failure(error)
        if isinstance(outputs, Received):
            outputs.source = native.source()
        return outputs

    future = torch.futures.Future()
    settled = future.then(settle)
    native.then(future.set_result)
    return settled


def done(outputs):
    """Work of torch's own that has ended."""
    future = torch.futures.Future()
    future.set_result(outputs)
    return c10d._create_work_from_future(future)


def look_into_futures():
    """Makes Work.is_completed and Work._source_rank right for works in Python.

    torch holds them by an object of its own that knows neither; their futures do.
    """
    is_completed, source_rank = c10d.Work.is_completed, c10d.Work._source_rank

    def is_completed_by_future(work):
        if is_completed(work):
            return True
        try:
            return work.get_future().done()
        except RuntimeError:
            return False

    def source_rank_by_future(work):
        try:
            return source_rank(work)
        except RuntimeError:
            received = work.get_future().value()
            if isinstance(received, Received):
                return received.source
            raise

    c10d.Work.is_completed, c10d.Work._source_rank = is_completed_by_future, source_rank_by_future
