"""Snapshots of a card's memory, as `torch.cuda.memory._dump_snapshot` writes them: does `paceline analyze` find the peak, and agree with `_memory_viz`?

    python3 bench/snapshots.py --paceline target/debug/paceline --peer-python .peer/bin/python

No card is needed: the allocator is simulated. Blocks of 512 bytes and more are cut from segments, best fit first, as in CUDACachingAllocator.cpp.
"""
import json
import pickle
import random
import sys
import tempfile
from pathlib import Path

from common import ROOT, RUN_SECONDS, arguments_for, parsed, provenance, run, write

TOTALS = "import pickle, sys; from torch.cuda import _memory_viz as v; print(v.segsum(pickle.load(open(sys.argv[1], 'rb'))))"
LINES = {"forward": ("model.py", 31, "nn/functional.py"), "backward": ("train.py", 70, "autograd/graph.py"), "optimizer": ("train.py", 72, "optim/adamw.py")}
FRAMES = {part: [{"filename": f"/torch/{inner}", "line": 1, "name": "f"}, {"filename": file, "line": line, "name": part}] for part, (file, line, inner) in LINES.items()}
MIB = 1 << 20


def simulated(seed: int) -> tuple[dict, int, dict]:
    """A snapshot, its peak, and the bytes of each part of a step at that moment."""
    draw, segments, events, live = random.Random(seed), [], [], {}

    def give(size: int, part: str | None) -> int:
        rounded, is_small = -(-size // 512) * 512, size <= MIB
        fits = [(block["size"], at, of) for of in segments if (of["segment_type"] == "small") == is_small for at, block in enumerate(of["blocks"]) if block["state"] == "inactive" and block["size"] >= rounded]  # fmt: skip
        if not fits:
            total = 2 * MIB if is_small else 20 * MIB if size < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
            start = (len(segments) + 1) << 36
            block = {"address": start, "size": total, "requested_size": 0, "state": "inactive", "frames": []}
            segments.append({"device": 0, "address": start, "total_size": total, "stream": 0, "segment_type": "small" if is_small else "large", "blocks": [block]})
            fits = [(total, 0, segments[-1])]
        _, at, of = min(fits, key=lambda fit: fit[0])
        block = of["blocks"][at]
        if block["size"] - rounded >= (512 if is_small else MIB + 1):
            of["blocks"].insert(at + 1, block | {"address": block["address"] + rounded, "size": block["size"] - rounded})
            block["size"] = rounded
        block |= {"state": "active_allocated", "requested_size": size, "frames": FRAMES.get(part, [])}
        live[block["address"]] = (block, part)
        if part:
            events.append({"action": "alloc", "addr": block["address"], "size": size, "stream": 0, "frames": FRAMES[part]})
        return block["address"]

    def take(addr: int) -> None:
        block, _ = live.pop(addr)
        events.extend({"action": action, "addr": addr, "size": block["requested_size"], "stream": 0, "frames": []} for action in ("free_requested", "free_completed"))
        block |= {"state": "inactive", "requested_size": 0, "frames": []}

    peak, parts = 0, {}
    for _ in range(8):
        give(draw.randrange(4096, 30 * MIB), None)
    gone = give(5 * MIB, None)
    for step in range(6):
        kept = [give(draw.randrange(1000, 24 * MIB), "forward") for _ in range(20)]
        kept += [give(draw.randrange(1000, 30 * MIB), "optimizer") for _ in range(8 if step == 1 else 0)]
        kept += [give(draw.randrange(1000, 6 * MIB), "backward") for _ in range(draw.randrange(20))]
        now = sum(block["requested_size"] for block, _ in live.values())
        if now > peak:
            peak, parts = now, {}
            for block, part in live.values():
                parts[part or "before the recording"] = parts.get(part or "before the recording", 0) + block["requested_size"]
        for addr in kept[: draw.randrange(10, 20) if step == 5 else None] + [gone] * (step == 2):
            take(addr)
    return {"segments": segments, "device_traces": [events]}, peak, parts


def shown(count: float) -> str:
    """Bytes as `_memory_viz` prints them."""
    units = iter(["B", "KiB", "MiB", "GiB"])
    unit = next(units)
    while count >= 1024:
        count, unit = count / 1024, next(units)
    return f"{count:3.1f}{unit}"


def main() -> int:
    args = parsed(arguments_for(__doc__, "snapshots.json", rounds=10, has_peer=True))
    rows = []
    for seed in range(args.rounds):
        made, peak, parts = simulated(seed)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "snapshot.pickle")
            file.write_bytes(pickle.dumps(made, protocol=2 + seed % 4))
            run([args.paceline, "analyze", file, "--output", f"{folder}/report"], ROOT, RUN_SECONDS)
            tables = json.loads(Path(folder, "report/summary.json").read_text())["tables"]
            theirs = dict(line.split(": ", 1) for line in run([args.peer_python, "-c", TOTALS, file], ROOT, RUN_SECONDS).splitlines() if line.startswith("total_"))
        states = {row["state"]: row["mib"] * MIB for row in tables["memory-by-state"]["rows"]}
        totals = {"total_reserved": sum(states.values()), "total_allocated": states["allocated"], "total_free": sum(states.values()) - states["allocated"]}
        found: dict[str, float] = {}
        for row in tables["memory-at-peak"]["rows"]:
            found[row["part"]] = found.get(row["part"], 0) + row["mib"] * MIB
        is_right = all(theirs[name].startswith(shown(of)) for name, of in totals.items()) and {part: round(of) for part, of in found.items()} == parts
        rows.append({"seed": seed, "peak_bytes": peak, "parts": parts, "totals": theirs, "is_right": is_right})
        print(f"{seed:2} {shown(peak):>10}  {'equal' if is_right else (found, parts, totals, theirs)}", flush=True)
    write(args.out, provenance() | {"files": rows})
    return 0 if all(row["is_right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
