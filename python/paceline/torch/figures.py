"""What a group has done: calls, bytes and times of its operations, and the report at its end."""
import os
import sys


def figures_of(membership):
    """By the name of each operation. waited_for_s has the seconds of waiting for each rank that came last."""
    every = {}
    for name, (calls, count, (queued, waiting, moving), waited_for) in sorted(membership.group.figures().items()):
        waited_for = {membership.names[rank]: seconds for rank, seconds in waited_for.items()}
        every[name] = {"calls": calls, "bytes": count, "queued_s": queued, "waiting_s": waiting, "moving_s": moving, "waited_for_s": waited_for}
    return every


def report(membership):
    """Prints the figures of rank 0 of a group, if PACELINE_REPORT=1 asks for them."""
    if os.environ.get("PACELINE_REPORT") != "1" or membership.group_rank != 0:
        return
    lines = [f"paceline: group {membership.name:.12}, {membership.group_size} ranks, {membership.group.transport()}; seconds of its rank 0"]
    lines.append(f"  {'operation':14} {'calls':>8} {'bytes':>9} {'queued':>8} {'waiting':>8} {'moving':>8}  slowest")
    for name, row in figures_of(membership).items():
        slowest = max(row["waited_for_s"], key=row["waited_for_s"].get, default="-")
        times = " ".join(f"{row[key]:8.3f}" for key in ("queued_s", "waiting_s", "moving_s"))
        lines.append(f"  {name:14} {row['calls']:8} {size(row['bytes'])} {times}  {slowest:>7}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def size(count):
    power = min((len(str(int(count))) - 1) // 3, 5)
    return f"{count / 1000**power:6.4g} {('B', 'KB', 'MB', 'GB', 'TB', 'PB')[power]:2}"
