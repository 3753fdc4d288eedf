"""PyTorch's own distributed_test.py, which torch brings along, with a backend in Gloo's place. Prints a JSON line for each test.

    python torch_suite.py BACKEND RANKS [TEST ...]

The suite asks for backends by name. Its text is read with the name of this backend instead of Gloo's. The ranks are forks of
a process that has imported torch, because spawned ones would import it thousands of times.
"""
import contextlib
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
import types
import unittest
from pathlib import Path

import torch
from torch.testing._internal import common_distributed

LIMIT_S = 90


def suite(backend):
    """The module of the suite, as if written for this backend."""
    for backends in common_distributed.DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add(backend)
    origin = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test").origin
    text = Path(origin).read_text().replace('"gloo"', f'"{backend}"').replace("dist.Backend.GLOO", f'"{backend}"')
    module = sys.modules["distributed_test"] = types.ModuleType("distributed_test")
    exec(compile(text, origin, "exec"), vars(module))
    return module


class Outcomes(unittest.TestResult):
    def show(self, test, outcome, reason=""):
        print(json.dumps({"test": test._testMethodName, "outcome": outcome, "reason": reason}), file=sys.__stdout__, flush=True)

    def addSuccess(self, test):
        self.show(test, "passed")

    def addSkip(self, test, reason):
        self.show(test, "skipped", reason)

    def addFailure(self, test, error):
        # The error of a rank is the last line before those of C++.
        lines = re.findall(r"^(?:[\w.]+(?:Error|Exception)|AssertionError).*", str(error[1]), re.MULTILINE)
        own = [line for line in lines if not line.startswith("RuntimeError: Process ")]
        self.show(test, "failed", (own or lines or [repr(error[1])])[-1][:300])

    addError = addFailure


def main(backend, ranks, *chosen):
    torch.set_num_threads(1)
    common_distributed.TIMEOUT_DEFAULT = LIMIT_S
    common_distributed.TIMEOUT_OVERRIDE.clear()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"BACKEND": backend, "WORLD_SIZE": ranks, "TEMP_DIR": folder, "INIT_METHOD": f"file://{folder}/init"}
        module = suite(backend)

        class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):
            def setUp(self):
                super().setUp()
                self._start_processes(torch.multiprocessing.get_context("fork").Process)

        names = chosen or unittest.TestLoader().getTestCaseNames(Suite)
        for name in names:
            with contextlib.redirect_stdout(io.StringIO()):
                Suite(name).run(Outcomes())


if __name__ == "__main__":
    main(*sys.argv[1:])
