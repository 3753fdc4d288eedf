"""Python's start-up imports this file before a program's first line, because `paceline record` has put its folder first on PYTHONPATH.

Starts the recording, takes the folder off the path, and lets the user's own `sitecustomize` run, if there is one. A fault of
the recording must not reach the program.
"""

import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
try:
    if sys.version_info >= (3, 7):
        import paceline_record

        paceline_record.start_from(_folder)
except Exception:
    pass
sys.path[:] = [path for path in sys.path if path != _folder]
# If the user has none, this raises the error of a start without any, which Python passes over.
sys.modules.pop("sitecustomize", None)
import sitecustomize  # noqa: E402, F401
