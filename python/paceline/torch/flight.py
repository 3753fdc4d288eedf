"""The last operations of a process, in the format of PyTorch's flight recorder, when one of them fails.

TORCH_FR_DUMP_TEMP_FILE names the beginning of the file; the rank follows. Without this variable, nothing is recorded.
"""
import os
import pickle
import sys
import time
from collections import deque

from .share import each

BEGINNING = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
# As many as torch records by default.
RECENT = deque(maxlen=2000)
BROKEN = "the group is broken by an earlier error"


def note(membership, name, inputs, outputs, number):
    """An entry for an operation, which gets its work or its error. `number` counts those of the group from 1; a message has 0."""
    if BEGINNING is None:
        return {}
    frame = sys._getframe(2)
    while frame and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename.startswith("<")):
        frame = frame.f_back
    entry = {
        "membership": membership,
        "process_group": (membership.name, "default_pg" if membership.name == "0" else "undefined"),
        "profiling_name": f"paceline:{name}",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": number == 0,
        "time_created_ns": time.time_ns(),
        "frames": [{"name": frame.f_code.co_name, "filename": frame.f_code.co_filename, "line": frame.f_lineno}] if frame else [],
    }
    # Inputs and results are kept together.
    for side, tensors in (("input", inputs[0] if isinstance(inputs, tuple) else inputs), ("output", outputs)):
        entry[f"{side}_sizes"] = [list(tensor.shape) for tensor in each(tensors)]
        entry[f"{side}_dtypes"] = [str(tensor.dtype).removeprefix("torch.") for tensor in each(tensors)]
    RECENT.append(entry)
    return entry


def outcome(entry):
    """How an operation has ended: True, or the text of its error. None while it runs."""
    if entry.get("work") is None:
        return entry.get("error", "work" in entry or None)
    try:
        entry["work"].wait(1e-9)
        return True
    except (RuntimeError, TimeoutError) as error:
        return None if "within the given time" in str(error) else str(error)


def failed(error):
    """Writes the file."""
    if not RECENT or (failed.is_written and BROKEN in str(error)):
        return
    entries, groups, running = [], {}, set()
    for entry in list(RECENT):
        group, ended = entry["membership"], outcome(entry)
        groups.setdefault(group.name, {"name": group.name, "desc": entry["process_group"][1], "ranks": str(group.names)})
        # This operation never began, because the peers had given up before this rank came.
        if BROKEN in str(ended) and ("another rank stopped" not in ended or "its own error says" in ended):
            continue
        state = "completed" if ended is True else "scheduled" if group.name in running else "started"
        if state == "started" and not entry["is_p2p"]:
            # The operations of a group run one after the other.
            running.add(group.name)
        about = {"record_id": len(entries), "pg_id": list(groups).index(group.name), "state": state}
        entries.append(about | {key: value for key, value in entry.items() if key not in ("membership", "work", "error")})
    own = RECENT[-1]["membership"]
    path = f"{BEGINNING}{own.names[own.group_rank]}"
    partial = f"{path}.{os.getpid()}"
    try:
        # A new file, whatever lies at the path.
        with open(partial, "xb") as file:
            pickle.dump({"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries}, file, protocol=2)
        os.replace(partial, path)
        failed.is_written = True
    except OSError as problem:
        print(f"paceline: the file of the flight recorder: {problem}", file=sys.stderr)
        if os.path.isfile(partial):
            os.unlink(partial)


failed.is_written = False
