"""Writes the hand-made inputs of the fuzzer in formats of our own to the crates' folders tests/corpus. Run it after a format has changed.

Inputs in the formats of others, and configurations, stay as they are. Files named `valid-...` must be accepted, files named `refused-...` must be refused with a message.
"""
import hashlib
import hmac
import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write(crate: str, target: str, inputs: dict[str, bytes]) -> None:
    folder = ROOT / "crates" / crate / "tests" / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (inputs | {"refused-empty": b""}).items():
        (folder / name).write_bytes(data)


def stores() -> dict[str, bytes]:
    SET, GET, ADD, ARRIVE = range(4)

    def request(op: int, key: bytes = b"", value: bytes = b"", number: int = 0) -> bytes:
        return struct.pack("<BIIq", op, len(key), len(value), number) + key + value

    def done(payload: bytes, status: int = 0) -> bytes:
        return struct.pack("<BI", status, len(payload)) + payload

    def text(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    def address(local: bytes, host: bytes, port: int, secret: bytes) -> bytes:
        # As postcard writes it: lengths and numbers in 7 bits per byte, the least significant ones first.
        return text(local) + text(host) + bytes([port & 127 | 128, port >> 7 & 127 | 128, port >> 14]) + text(secret)

    addresses = [address(b"paceline-1", b"::1", 29500, b"s1"), address(b"", b"node-2", 4242, b"s2")]
    values = [b"value", *addresses]
    # No request and no answer of ours begins like this.
    counter = b"\x7f" * 8
    agent = counter + b"".join(b"\0" + struct.pack("<Q", len(v)) + v for v in values)
    run = (
        request(SET, b"address/0", b"here"), request(GET, b"address/0", number=1000), request(ADD, b"counter", number=-5),
        request(ADD, b"counter", number=7), request(ADD, b"address/0", number=1), request(GET, b"missing", number=60_000),
        request(ARRIVE, number=60_000),
    )  # fmt: skip
    file = "paceline rendezvous 2\nsecret s3\nboot b-1\nlocal paceline-abc\ntcp 7 ::1\ntcp 29500 node-1\nend\n"
    return {
        "valid-requests": b"".join(run),
        "valid-request-largest-sum": run[0] + request(ADD, b"n", number=2**63 - 1) + request(ADD, b"n", number=1),
        "valid-request-longest-wait": request(GET, b"k", number=2**63 - 1),
        "valid-request-longest-key": request(SET, b"k" * 1024, b"v"),
        "valid-request-negative-wait": request(ARRIVE, number=-(2**63)),
        "valid-request-then-rubbish": run[0] + b"\xff" * 20,
        "valid-answers": b"".join(map(done, [b"", b"5", b"value", b"", *addresses])),
        "valid-answers-of-agent": agent,
        "valid-arrival-at-agent": b"\0\0" + struct.pack("<Q", 2) + b"s4",
        "valid-rendezvous-file": file.encode(),
        "refused-request-cut-header": run[0][:9],
        "refused-request-cut-value": run[0][:-1],
        "refused-request-unknown": request(4, b"k"),
        "refused-request-key-no-text": request(GET, b"\xff\xfe"),
        "refused-request-long-key": struct.pack("<BIIq", SET, 1025, 0, 0) + b"k" * 1025,
        "refused-request-longest-lengths": struct.pack("<BIIq", SET, 2**32 - 1, 2**32 - 1, 0) + b"k",
        "refused-request-value-that-does-not-come": struct.pack("<BIIq", SET, 1, 16 << 20, 0) + b"kv",
        "refused-answer-value-that-does-not-come": struct.pack("<BI", 0, 16 << 20) + b"v",
        "refused-answer-longest-length": struct.pack("<BI", 0, 2**32 - 1) + b"v",
        "refused-answer-unknown": done(b"value", 3),
        "refused-answer-missing-ranks": done(struct.pack("<II", 1, 2**32 - 1) + b"\1", 1),
        "refused-answer-no-text": done(b"\xff\xfe", 2),
        "refused-agent-value-that-does-not-come": counter + struct.pack("<BQ", 0, 8 << 20) + b"v",
        "refused-agent-longest-value": counter + struct.pack("<BQ", 0, 2**64 - 1) + b"v",
        "refused-rendezvous-file-without-end": file[:-4].encode(),
        "refused-rendezvous-file-port": file.replace("29500", "65536").encode(),
        "refused-rendezvous-file-version": file.replace("2\n", "1\n", 1).encode(),
    }


def hellos() -> dict[str, bytes]:
    # The random numbers that the fuzzer uses (checks/rendezvous.rs), and any other one.
    listener, connector, other = bytes([7] * 32), bytes([9] * 32), bytes(range(32))

    def mac(key: bytes, *words: bytes) -> bytes:
        return hmac.digest(key, b"".join(words), "sha256")

    def key(secret: bytes = b"a secret", ahead: int = 0) -> bytes:
        for _ in range(ahead):
            secret = hashlib.sha256(secret + b"/restart").hexdigest().encode()
        return mac(secret, b"paceline: the key of an attempt")

    def hello(rank: int, world: int = 4, of: bytes = key(), ahead: int = 0, magic: bytes = b"pacelin3", to: bytes = listener) -> bytes:
        said = struct.pack("<BIII", ahead, rank, world, 2) + bytes(range(16))
        return magic + other + said + mac(of, b"paceline: the rank that connects", other, to, said)

    def answer(status: int, keys: Sequence[bytes] = (key(),), magic: bytes = b"3nilecap", to: bytes = connector) -> bytes:
        proofs = [mac(of, b"paceline: the rank that listens", to, other, bytes([ahead])) for ahead, of in enumerate(keys)]
        return magic + bytes([len(keys)]) + other + b"".join(proofs) + bytes([status])

    stranger = key(b"a secreT")
    return {
        "valid-first-rank": hello(0),
        "valid-last-rank": hello(3),
        "valid-more-follows": hello(1) + b"more",
        "valid-answer-welcome": answer(0),
        "valid-answer-of-most-attempts": answer(0, [stranger] * 64 + [key()]),
        "refused-cut": hello(0)[:-1],
        "refused-hello-alone": hello(0)[:40],
        "refused-rank-beyond": hello(4),
        "refused-largest-rank": hello(2**32 - 1),
        "refused-other-world": hello(0, world=5),
        "refused-largest-world": hello(0, world=2**32 - 1),
        "refused-other-secret": hello(0, of=stranger),
        "refused-other-connection": hello(0, to=connector),
        "refused-proof-of-listener": hello(0)[:69] + mac(key(), b"paceline: the rank that listens", other, listener, b"\0"),
        "refused-later-attempt": hello(0, of=key(ahead=3), ahead=3),
        "refused-attempt-beyond": hello(0, ahead=65),
        "refused-echo-of-answer": hello(7, magic=b"3nilecap"),
        "refused-http": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: something-that-is-longer\r\n\r\n",
        "refused-answer-wrong-world": answer(1),
        "refused-answer-rank-taken": answer(2),
        "refused-answer-overtaken": answer(3),
        "refused-answer-unknown": answer(4),
        "refused-answer-other-secret": answer(0, [stranger]),
        "refused-answer-other-connection": answer(0, to=listener),
        "refused-answer-without-proofs": answer(0, []),
        "refused-answer-too-many-proofs": answer(0, [stranger] * 65 + [key()]),
        "refused-answer-proofs-that-do-not-come": answer(0, [stranger] * 65)[:200],
        "refused-answer-echo": answer(0, magic=b"pacelin3"),
    }


def members() -> dict[str, bytes]:
    def message(kind: int, *parts: bytes) -> bytes:
        # As postcard writes it: the kind and lengths in 7 bits per byte.
        contents = bytes([kind]) + b"".join(parts)
        return struct.pack("<I", len(contents)) + contents

    def text(value: bytes) -> bytes:
        return bytes([len(value)]) + value

    join = [message(0, b"\1", bytes([number]), text(b"")) for number in range(2)]
    ready, leave = message(1, text(b"\1")), message(3)
    place = message(2, b"\1\0", text(b"\0\1"), b"\2")
    return {
        "valid-member": join[0] + ready + message(2, b"\1", text(b"group"), text(b"here")) + leave,
        "valid-members-meet": b"".join(join) + ready * 2 + join[0] + ready,
        "valid-newcomer": message(0, b"\0", text(b"")) + ready + leave,
        "valid-other-settings": message(0, b"\0", text(b"--lr=1")) + leave,
        "valid-member-gives-up": join[0] + ready + message(4, text(b"lost")),
        "valid-then-rubbish": join[0] + b"\xff" * 20,
        "valid-notices": message(1, text(b"no room")) + place + message(3, b"\1", text(b"group"), b"\2", text(b"a"), text(b"b")) + message(5),
        "valid-notice-of-the-end": message(4, b"\1", text(b"lost")) + message(6, b"\0", text(b"late")) + message(6, b"\2") + message(7),
        "refused-cut-length": join[0][:3],
        "refused-cut": ready[:-1],
        "refused-empty-message": struct.pack("<I", 0),
        "refused-kind": message(9),
        "refused-longest-message": struct.pack("<I", 2**32 - 1) + b"\1",
        "refused-message-that-does-not-come": struct.pack("<I", 16 << 20) + b"\1",
        "refused-longest-list": message(1, b"\xff" * 9 + b"\1"),
        "refused-longest-text": message(2, b"\1", b"\xff" * 9 + b"\1", b"name"),
        "refused-no-text": message(4, text(b"\xff\xfe")),
    }


def headers() -> dict[str, bytes]:
    kinds = "all_reduce reduce_scatter all_gather broadcast reduce gather scatter all_to_all send recv send_recv barrier".split()

    def call(kind: str, send: int, recv: int, dtype: int = 0, op: int = 0, root: int = 0, overlap: int = 0) -> list[int]:
        return [kinds.index(kind) | dtype << 8 | op << 16 | root << 32, send, recv, overlap]

    def header(tag: int, words: list[int]) -> bytes:
        words = [int.from_bytes(b"pace", "little") | tag << 32, *words]
        return struct.pack("<11Q", *words, *[0] * (11 - len(words)))

    def ranks(*calls: list[int], rows: Sequence[list[int]] = (), operation: int = 5) -> bytes:
        headers = b"".join(header(1, [0, operation, *call]) for call in calls)
        counts = b"".join(struct.pack(f"<{len(row)}Q", *row) for row in rows)
        return bytes([len(calls) - 1]) + headers + counts

    reduce = call("all_reduce", 100, 100)
    conflict = header(3, [1 << 32, 5 | 6 << 32, *reduce, *call("barrier", 0, 0)])
    gathered, blocks = call("all_gather", 3, 10), (call("all_to_all", 3, 5), call("all_to_all", 6, 4))
    half = 1 << 63
    return {
        "valid-all-reduce": ranks(reduce, reduce, reduce),
        "valid-all-reduce-in-place": ranks(*[call("all_reduce", 100, 100, overlap=1)] * 4),
        "valid-one-rank": ranks(call("all_reduce", 7, 7, dtype=6)),
        "valid-all-gather": ranks(gathered, call("all_gather", 0, 10), call("all_gather", 7, 10)),
        "valid-reduce-scatter": ranks(call("reduce_scatter", 10, 4, op=1), call("reduce_scatter", 10, 6, op=1)),
        "valid-reduce-scatter-in-place": ranks(call("reduce_scatter", 10, 4, overlap=1), call("reduce_scatter", 10, 6, overlap=5)),
        "valid-broadcast": ranks(call("broadcast", 8, 8, root=0), call("broadcast", 0, 8, root=0)),
        "valid-reduce": ranks(call("reduce", 8, 0, root=1), call("reduce", 8, 8, root=1)),
        "valid-gather": ranks(call("gather", 2, 5), call("gather", 3, 0)),
        "valid-scatter": ranks(call("scatter", 5, 2), call("scatter", 0, 3)),
        "valid-all-to-all": ranks(*blocks, rows=[[1, 2, 1, 4], [4, 2, 2, 2]]),
        "valid-barrier": ranks(*[call("barrier", 0, 0)] * 8),
        "refused-peer-lost": ranks(reduce, reduce)[:-1],
        "refused-other-program": b"\1" + header(1, [0, 5, *reduce]) + b"GET / HTTP/1.1\r\n".ljust(88, b"x"),
        "refused-unknown-tag": b"\1" + header(1, [0, 5, *reduce]) + header(4, []),
        "refused-peer-leaves": b"\1" + header(1, [0, 5, *reduce]) + header(2, []),
        "refused-conflict": b"\1" + header(1, [0, 5, *reduce]) + conflict,
        "refused-conflict-of-no-ranks": b"\1" + header(1, [0, 5, *reduce]) + header(3, [2**64 - 1] * 10),
        "refused-other-operation": ranks(reduce, call("barrier", 0, 0)),
        "refused-other-type": ranks(reduce, call("all_reduce", 100, 100, dtype=1)),
        "refused-other-length": ranks(reduce, call("all_reduce", 99, 99)),
        "refused-unknown-operation": ranks(reduce, [255, 1, 1, 0]),
        "refused-counts": ranks(gathered, call("all_gather", 8, 10)),
        "refused-other-place": ranks(call("all_gather", 5, 10, overlap=1), call("all_gather", 5, 10, overlap=1)),
        # The peers' counts add up to the right sum only without their highest bit.
        "refused-counts-that-wrap": ranks(gathered, *[call("all_gather", half, 10)] * 2, call("all_gather", 7, 10)),
        "refused-counts-that-wrap-in-place": ranks(reduce, *[call("all_reduce", 100, half, overlap=1)] * 2),
        "refused-blocks": ranks(*blocks, rows=[[1, 2, 1, 4], [4, 2, 3, 1]]),
        "refused-rows-cut": ranks(*blocks, rows=[[1, 2, 1, 4]]),
    }


def signed_file(metadata: dict[str, str], tensors: dict[str, tuple[str, list[int], bytes]], sign: bool = True) -> bytes:
    """A safetensors file. Its digest covers metadata and tensors, each field after its length."""
    digest = hashlib.sha256()
    fields = [part.encode() for item in sorted(metadata.items()) for part in item]
    fields += [part for name in sorted(tensors) for part in (name.encode(), tensors[name][2])]
    for field in fields:
        digest.update(struct.pack("<Q", len(field)) + field)
    entries: dict[str, object] = {"__metadata__": metadata | ({"sha256": digest.hexdigest()} if sign else {})}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + b"".join(data for _, _, data in tensors.values())


def tensors_of(states: list[str]) -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of the model in checks/model.rs."""

    def values(shape: list[int], first: float) -> tuple[str, list[int], bytes]:
        count = math.prod(shape)
        return "F32", shape, struct.pack(f"<{count}f", *(first + at for at in range(count)))

    tensors = {"model.fc0.bias": values([2], 0.5), "model.fc0.mean": values([2], -1), "model.fc0.weight": values([2, 3], 7)}
    for state in states:
        tensors[f"optimizer.{state}.fc0.bias"] = values([2], 0)
        tensors[f"optimizer.{state}.fc0.weight"] = values([2, 3], math.inf)
    return tensors


def weight_files() -> dict[str, bytes]:
    sgd, adamw = tensors_of(["velocity"]), tensors_of(["first_moment", "second_moment"])
    good = signed_file({"steps": "3"}, sgd)

    def raw(header: str, data: bytes = b"") -> bytes:
        return struct.pack("<Q", len(header)) + header.encode() + data

    def tensor(name: str, shape: list[int], begin: int, end: int, dtype: str = "U8") -> str:
        return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'

    # The largest tensor whose bits can be counted has fewer than 2^61 bytes.
    part, header_len = 1 << 60, 2000
    wrap = ",".join(tensor(str(at), [part], at * part, (at + 1) * part) for at in range(15))
    last = 2**64 - 8 - header_len - 15 * part
    wrap = f"{{{wrap},{tensor('15', [last], 15 * part, 15 * part + last)}}}".ljust(header_len)
    return {
        "valid-sgd": good,
        "valid-adamw": signed_file({}, adamw),
        "valid-not-a-number": signed_file({}, sgd | {"model.fc0.bias": ("F32", [2], b"\xff" * 8)}),
        "valid-other-order": signed_file({"a": "\u00e4", "b": ""}, dict(reversed(sgd.items()))),
        "refused-without-digest": signed_file({}, sgd, sign=False),
        "refused-changed-value": good[:-1] + b"\1",
        "refused-cut": good[:-1],
        "refused-one-byte-more": good + b"\0",
        "refused-longest-header": struct.pack("<Q", 2**64 - 1) + b"{}",
        "refused-header-that-does-not-come": struct.pack("<Q", 99_999_999) + b"{}",
        "refused-no-optimizer-state": signed_file({}, tensors_of([])),
        "refused-other-shape": signed_file({}, sgd | {"model.fc0.bias": ("F32", [1, 2], bytes(8))}),
        "refused-other-type": signed_file({}, sgd | {"model.fc0.bias": ("F64", [2], bytes(16))}),
        "refused-other-name": signed_file({}, sgd | {"model.fc1.bias": ("F32", [2], bytes(8))}),
        "refused-unknown-type": raw("{" + tensor("a", [1], 0, 1, "X9") + "}", b"a"),
        "refused-offsets-beyond-the-end": raw("{" + tensor("a", [1 << 40], 0, 1 << 40) + "}", b"a"),
        "refused-largest-shape": raw("{" + tensor("a", [2**64 - 1, 2**64 - 1], 0, 1) + "}", b"a"),
        "refused-offsets-backwards": raw("{" + tensor("a", [1], 1, 0) + "}", b"a"),
        "refused-deep-json": raw("[" * 3000),
        "refused-two-metadata": raw('{"__metadata__":{},"__metadata__":{}}'),
        # The offsets, the header and its length together have 2^64 bytes.
        "refused-offsets-that-wrap": raw(wrap),
    }


def checkpoints() -> dict[str, bytes]:
    """The index in one line, then the files: two ranks have halves of each tensor."""
    all_tensors = tensors_of(["first_moment", "second_moment"])
    progress = {
        "epochs": "1", "batches": "7", "steps": "27", "samples-trained": "1728", "epoch-loss": "12.5", "epoch-correct": "64.0",
        "epoch-samples": "448.0", "optimizer-steps": "27", "seed": "42",
    }  # fmt: skip

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    def compact(value: object) -> bytes:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()

    def index_of(tensors: dict, run: dict[str, str], files: list[bytearray], version: int) -> dict:
        entries = {}
        for name in sorted(tensors):
            dtype, shape, data = tensors[name]
            count = math.prod(shape)
            half = count // 2 * (len(data) // count)
            pieces = []
            for rank, (start, part) in enumerate([(0, data[:half]), (count // 2, data[half:])]):
                offset = len(files[rank])
                files[rank] += part
                pieces.append({"start": start, "len": len(part) * count // len(data), "file": rank, "offset": offset})
            entries[name] = {"dtype": dtype.lower(), "shape": shape, "pieces": pieces}
        named = [{"name": f"rank-00{rank}-of-002.shard", "num_bytes": len(data), "chunks": [digest(bytes(data))]} for rank, data in enumerate(files)]
        run = dict(sorted(run.items()))
        # In the order of the fields of the reader, because the digest covers the index as it is written there.
        return {"version": version, "world_size": 2, "strategy": "exact", "run": run, "files": named, "tensors": entries}

    def signed(index: dict, files: list[bytearray]) -> bytes:
        return compact({"sha256": digest(compact(index)), "index": index}) + b"\n" + b"".join(files)

    def made(tensors: dict = all_tensors, version: int = 5, **changed: str) -> tuple[dict, list[bytearray]]:
        run = progress | {key.replace("_", "-"): value for key, value in changed.items()}
        files = [bytearray(), bytearray()]
        return index_of(tensors, run, files, version), files

    def changed(change) -> bytes:
        index, files = made()
        change(index)
        return signed(index, files)

    def file(**rest) -> bytes:
        return signed(*made(**rest))

    def tensor(index: dict) -> dict:
        return index["tensors"]["model.fc0.weight"]

    index, files = made()
    largest = str(2**64 - 1)
    return {
        "valid-checkpoint": file(),
        "valid-loss-is-no-number": file(epoch_loss="NaN", epoch_correct="-inf"),
        "valid-largest-numbers": file(epochs=largest, batches=largest, steps=largest, optimizer_steps=largest),
        "valid-more-settings": file(later_setting="\u00e4 \\ \" \n"),
        "valid-state-of-a-strategy": file(tensors=all_tensors | {"strategy.1.residual 0": ("F32", [2], bytes(8))}),
        "refused-not-signed": compact({"index": index}) + b"\n" + b"".join(files),
        "refused-changed": file()[:-1] + b"\1",
        "refused-cut": file()[:-1],
        "refused-one-byte-more": file() + b"\0",
        "refused-version-3": file(version=3),
        "refused-other-seed": file(seed="43"),
        "refused-steps-too-large": file(steps=str(2**64)),
        "refused-negative-steps": file(steps="-1"),
        "refused-loss-is-text": file(epoch_loss="much"),
        "refused-other-optimizer": file(tensors=tensors_of(["velocity"])),
        "refused-other-shape": file(tensors=all_tensors | {"model.fc0.bias": ("F32", [1, 2], bytes(8))}),
        "refused-other-type": file(tensors=all_tensors | {"model.fc0.bias": ("F64", [2], bytes(16))}),
        "refused-no-files": changed(lambda index: index["files"].clear()),
        "refused-file-elsewhere": changed(lambda index: index["files"][0].update(name="../secret")),
        "refused-longest-file": changed(lambda index: index["files"][1].update(num_bytes=2**64 - 1)),
        "refused-largest-world": changed(lambda index: index.update(world_size=2**64 - 1)),
        "refused-largest-shape": changed(lambda index: tensor(index).update(shape=[2**63, 4])),
        "refused-piece-beyond-the-file": changed(lambda index: tensor(index)["pieces"][1].update(offset=2**64 - 1)),
        "refused-piece-of-no-file": changed(lambda index: tensor(index)["pieces"][1].update(file=2)),
        "refused-pieces-that-overlap": changed(lambda index: tensor(index)["pieces"][1].update(start=2)),
        "refused-longest-piece": changed(lambda index: tensor(index)["pieces"][0].update(len=2**64 - 1)),
        "refused-piece-missing": changed(lambda index: tensor(index)["pieces"].pop()),
    }


if __name__ == "__main__":
    write("paceline", "checkpoint", checkpoints())
    write("model", "safetensors", weight_files())
    write("collectives", "tcp_header", headers())
    write("rendezvous", "store_wire", stores())
    write("rendezvous", "hello", hellos())
    write("rendezvous", "membership", members())
