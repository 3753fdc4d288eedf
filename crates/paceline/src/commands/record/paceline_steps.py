"""Times the optimizer steps of a PyTorch program, for `paceline bench scaling`. With `steps`, the program ends after as many."""

import collections
import statistics
import time

import paceline_record

# With fewer steps there is no time. The first quarter is left out; the time is the median over stretches of the others, because a
# program may wait for its device only once in some steps.
LEAST_STEPS, STRETCHES = 8, 10


class Hook(paceline_record.Recorder):
    def __init__(self, steps, notes):
        super().__init__(1, steps, None, False, False, True, None, notes)

    def forget(self):
        super().forget()
        self.ends = collections.deque(maxlen=100000)  # of steps: the time, and the seconds in backward passes before
        self.backward_s, self.world = 0.0, 1

    def listen(self):
        super().listen()
        backward = self.torch.autograd.backward

        def timed(*args, **kwargs):
            begin, is_outer = time.perf_counter(), not self.is_in_backward()
            try:
                return backward(*args, **kwargs)
            finally:
                self.backward_s += (time.perf_counter() - begin) * is_outer

        timed._torchdynamo_disable = True
        self.torch.autograd.backward = timed

    def before_recording(self, optimizer, made):
        if made > self.most:
            self.most = made
            self.ends.append((time.perf_counter(), self.backward_s))
            if made == self.steps or made & (made - 1) == 0:
                self.note(recording=self.steps > made, **self.figures())
        if self.steps and made >= self.steps and not self.is_in_backward():
            self.end_program()

    def figures(self):
        distributed = self.torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            self.world = max(self.world, distributed.get_world_size())
        figures = dict(world=self.world)
        is_on_cores = not self.torch.cuda.is_initialized()
        if is_on_cores:
            figures.update(threads=self.torch.get_num_threads())
        if self.most >= LEAST_STEPS:
            kept = list(self.ends)[len(self.ends) // 4 :]
            size = max((len(kept) - 1) // STRETCHES, 1)
            pairs = list(zip(kept[::size], kept[size::size]))
            step, in_backward = (statistics.median((b[at] - a[at]) / size * 1e3 for a, b in pairs) for at in (0, 1))
            figures.update(step_ms=step)
            if in_backward > 0 and is_on_cores:  # Python does not wait for a device.
                figures.update(in_backward_ms=in_backward)
        return dict(steps=self.most, rank=self.rank(), timed=figures)

    def leave(self):
        self.note(recording=False, **self.figures())
        super().leave()
