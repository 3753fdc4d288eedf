"""paceline as a backend of torch.distributed on processors: dist.init_process_group("paceline").

The package has an entry point of the group torch.distributed.backends, so a program imports nothing.
"""
import re

import torch

OLDEST = (2, 14)
found = re.match(r"(\d+)\.(\d+)", torch.__version__)
if found is None or (int(found[1]), int(found[2])) < OLDEST:
    raise ImportError(f"paceline.torch needs torch {OLDEST[0]}.{OLDEST[1]} or newer, and this is torch {torch.__version__}; update torch, or use the backend gloo")

from .backend import Paceline, figures, register, share  # noqa: E402

__all__ = ["Paceline", "figures", "register", "share"]
