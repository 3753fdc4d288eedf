"""Writes the hand-made inputs of the fuzzer to the crates' folders tests/corpus. Run it after a format has changed.

Files named `valid-...` must be accepted, files named `refused-...` must be refused with a message.
"""
import gzip
import hashlib
import hmac
import json
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write(crate: str, target: str, inputs: dict[str, bytes]) -> None:
    folder = ROOT / "crates" / crate / "tests" / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in inputs.items():
        (folder / name).write_bytes(data)


def array_files() -> dict[str, bytes]:
    def npy(descr: str, shape: str, data: bytes, columns_first: bool = False, version: int = 1) -> bytes:
        header = f"{{'descr': '{descr}', 'fortran_order': {columns_first}, 'shape': ({shape}), }}\n".encode()
        length = struct.pack("<H" if version < 2 else "<I", len(header))
        return b"\x93NUMPY" + bytes([version, 0]) + length + header + data

    def png(width: int, height: int, color: int, rows: bytes, depth: int = 8) -> bytes:
        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")

    floats = npy("<f4", "2, 1", struct.pack("<2f", 1, 2))
    gray = png(2, 2, 0, b"\0\1\2\0\3\4")
    # The marker of a frame of 65,535 times 65,535 pixels.
    frame = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffc0000b08ffffffff01011100")
    return {
        "valid-floats.npy": floats,
        "valid-version-2.npy": npy("<f8", "1, 2", struct.pack("<2d", 1e300, -2), version=2),
        "valid-bytes.npy": npy("|u1", "2, 2, 2", bytes(range(8))),
        "valid-longs.npy": npy("<i8", "2,", struct.pack("<2q", -1, 5)),
        "valid-words.csv": b'a,label,b\n1,cat,5\n3,dog,5\n"2",cat,5\n',
        "valid-numbers.csv": b"\xef\xbb\xbflabel,x\n0,1e38\n1,-1e38\n",
        "valid-gray.png": gray,
        "valid-16-bits.png": png(1, 1, 2, b"\0" + b"\xff\1" * 3, depth=16),
        "refused-empty": b"",
        "refused-columns-first.npy": npy("<f4", "2, 1", struct.pack("<2f", 1, 2), columns_first=True),
        "refused-objects.npy": npy("|O", "1,", b"\x80\4N."),
        "refused-endless.npy": npy("<f4", f"{2**63 - 1}, {2**63 - 1}", b"abcd"),
        "refused-cut.npy": floats[:-1],
        "refused-open-quote.csv": b'a,label\n"1,0\n2,1\n',
        "refused-short-row.csv": b"a,label\n1,0\n2\n",
        "refused-huge.png": png(2**31 - 1, 2**31 - 1, 0, b"\0\0"),
        "refused-cut.png": gray[:50],
        "refused-frame.jpg": frame,
    }


def idx_files() -> dict[str, bytes]:
    def file(extents: list[int], data: bytes) -> bytes:
        return struct.pack(f">I{len(extents)}I", 0x0800 + len(extents), *extents) + data

    labels = file([4], bytes([0, 9, 3, 7]))
    small = file([2, 2, 3], bytes(range(12)))
    images = file([1, 28, 28], bytes(i * 7 % 256 for i in range(784)))
    record = bytes([7]) + bytes(i % 256 for i in range(3 * 1024))
    packed = gzip.compress(labels, mtime=0)
    return {
        "valid-labels": labels,
        "valid-images": images,
        "valid-small-images": small,
        "valid-labels.gz": packed,
        "valid-images.gz": gzip.compress(images, mtime=0),
        "valid-two-gzip-members": gzip.compress(labels[:6], mtime=0) + gzip.compress(labels[6:], mtime=0),
        "valid-cifar-record": record,
        "refused-empty": b"",
        "refused-cut-header": labels[:7],
        "refused-cut-items": labels[:-1],
        "refused-one-byte-more": labels + b"\0",
        "refused-no-items": file([0], b""),
        "refused-swapped-magic": struct.pack("<I", 0x0801) + labels[4:],
        "refused-most-items": file([0xFFFFFFFF], b"\1"),
        "refused-most-images": file([0xFFFFFFFF, 28, 28], b"\1" * 784),
        "refused-largest-extents": file([0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF], b""),
        "refused-gzip-cut": packed[:-5],
        "refused-gzip-wrong-sum": packed[:-8] + bytes(4) + packed[-4:],
        "refused-gzip-bomb": gzip.compress(file([0xFFFFFFFF], bytes(2_000_000)), mtime=0),
        "refused-cifar-label-10": bytes([10]) + record[1:],
        "refused-cifar-cut": record[:-1],
    }


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
        request(SET, b"address/0", b"here"),
        request(GET, b"address/0", number=1000),
        request(ADD, b"counter", number=-5),
        request(ADD, b"counter", number=7),
        request(ADD, b"address/0", number=1),
        request(GET, b"missing", number=60_000),
        request(ARRIVE, number=60_000),
    )
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
        "refused-empty": b"",
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
    # The random numbers that the fuzzer uses (crates/rendezvous/src/store/fuzzing.rs), and any other one.
    listener, connector, other = bytes([7] * 32), bytes([9] * 32), bytes(range(32))

    def mac(key: bytes, *words: bytes) -> bytes:
        return hmac.digest(key, b"".join(words), "sha256")

    def key(secret: bytes = b"a secret", ahead: int = 0) -> bytes:
        for _ in range(ahead):
            secret = hashlib.sha256(secret + b"/restart").hexdigest().encode()
        return mac(secret, b"paceline: the key of an attempt")

    def hello(
        rank: int, world: int = 4, of: bytes = key(), ahead: int = 0, magic: bytes = b"pacelin3", to: bytes = listener
    ) -> bytes:
        said = struct.pack("<BIII", ahead, rank, world, 2) + bytes(range(16))
        return magic + other + said + mac(of, b"paceline: the rank that connects", other, to, said)

    own = (key(),)

    def answer(status: int, keys: Sequence[bytes] = own, magic: bytes = b"3nilecap", to: bytes = connector) -> bytes:
        proofs = [
            mac(of, b"paceline: the rank that listens", to, other, bytes([ahead])) for ahead, of in enumerate(keys)
        ]
        return magic + bytes([len(keys)]) + other + b"".join(proofs) + bytes([status])

    stranger = key(b"a secreT")
    return {
        "valid-first-rank": hello(0),
        "valid-last-rank": hello(3),
        "valid-more-follows": hello(1) + b"more",
        "valid-answer-welcome": answer(0),
        "valid-answer-of-most-attempts": answer(0, [stranger] * 64 + [key()]),
        "refused-empty": b"",
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


def headers() -> dict[str, bytes]:
    kinds = (
        "all_reduce reduce_scatter all_gather broadcast reduce gather scatter all_to_all send recv send_recv barrier"
    ).split()

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
    gathered = call("all_gather", 3, 10)
    half = 1 << 63
    return {
        "valid-all-reduce": ranks(reduce, reduce, reduce),
        "valid-all-reduce-in-place": ranks(*[call("all_reduce", 100, 100, overlap=1)] * 4),
        "valid-one-rank": ranks(call("all_reduce", 7, 7, dtype=6)),
        "valid-all-gather": ranks(gathered, call("all_gather", 0, 10), call("all_gather", 7, 10)),
        "valid-reduce-scatter": ranks(call("reduce_scatter", 10, 4, op=1), call("reduce_scatter", 10, 6, op=1)),
        "valid-reduce-scatter-in-place": ranks(
            call("reduce_scatter", 10, 4, overlap=1), call("reduce_scatter", 10, 6, overlap=5)
        ),
        "valid-broadcast": ranks(call("broadcast", 8, 8, root=0), call("broadcast", 0, 8, root=0)),
        "valid-reduce": ranks(call("reduce", 8, 0, root=1), call("reduce", 8, 8, root=1)),
        "valid-gather": ranks(call("gather", 2, 5), call("gather", 3, 0)),
        "valid-scatter": ranks(call("scatter", 5, 2), call("scatter", 0, 3)),
        "valid-all-to-all": ranks(
            call("all_to_all", 3, 5), call("all_to_all", 6, 4), rows=[[1, 2, 1, 4], [4, 2, 2, 2]]
        ),
        "valid-barrier": ranks(*[call("barrier", 0, 0)] * 8),
        "refused-empty": b"",
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
        "refused-counts-that-wrap": ranks(
            gathered, call("all_gather", half, 10), call("all_gather", half, 10), call("all_gather", 7, 10)
        ),
        "refused-counts-that-wrap-in-place": ranks(
            call("all_reduce", 100, 100),
            *[call("all_reduce", 100, half, overlap=1)] * 2,
        ),
        "refused-blocks": ranks(
            call("all_to_all", 3, 5), call("all_to_all", 6, 4), rows=[[1, 2, 1, 4], [4, 2, 3, 1]]
        ),
        "refused-rows-cut": ranks(call("all_to_all", 3, 5), call("all_to_all", 6, 4), rows=[[1, 2, 1, 4]]),
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
    """The tensors of the model in crates/model/src/fuzzing.rs."""

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
        "refused-empty": b"",
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
        "epochs": "1",
        "batches": "7",
        "steps": "27",
        "samples-trained": "1728",
        "epoch-loss": "12.5",
        "epoch-correct": "64.0",
        "epoch-samples": "448.0",
        "optimizer-steps": "27",
        "seed": "42",
    }

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
        named = [
            {"name": f"rank-00{rank}-of-002.shard", "num_bytes": len(data), "chunks": [digest(bytes(data))]}
            for rank, data in enumerate(files)
        ]
        run = dict(sorted(run.items()))
        # In the order of the fields of the reader, because the digest covers the index as it is written there.
        return {"version": version, "world_size": 2, "strategy": "exact", "run": run, "files": named, "tensors": entries}

    def signed(index: dict, files: list[bytearray]) -> bytes:
        return compact({"sha256": digest(compact(index)), "index": index}) + b"\n" + b"".join(files)

    def made(tensors: dict = all_tensors, version: int = 4, **changed: str) -> tuple[dict, list[bytearray]]:
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
        "refused-empty": b"",
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


def configurations() -> dict[str, bytes]:
    run = {"model": "mlp", "hidden-dim": 64, "num-layers": 2, "strategy": "ddp", "lr": 0.01, "quiet": True}
    resolved = {"version": 1, "stated": run, "resolved": {"model": {"name": "mlp"}, "lr": 0.5}}
    lines = """# A run
model = "cnn"
channels = [4, 8]
batch_norm = true
batch-size = 0x10
lr = 5e-2
lr-schedule = "cosine"
min-lr = 0.000_1
epochs = 1
nproc = 2
freeze = ["conv0"]
evaluate = true
"""
    return {
        "valid-empty": b"",
        "valid-toml": lines.replace("0x10", "16").encode(),
        "valid-other-bases": lines.encode() + b"warmup-steps = 0b1_0\nseed = 0o17\n",
        "valid-json": json.dumps(run).encode(),
        "valid-config-of-a-run": json.dumps(resolved, indent=2).encode(),
        "valid-every-rank-its-samples": b"nproc = 2\nrank-samples = [6, 2]\nbatch-size = 1\n",
        "valid-switch-off": b"batch-norm = false\ndata = \"synthetic\"\nsamples = 64\nimage = [12, 12, 3]\n",
        "valid-numbers-as-text": b"lr = \"0.50\"\nseed = \"7\"\n",
        "valid-link": b"transport = \"tcp\"\n",
        "refused-unknown-key": b"modell = \"cnn\"\n",
        "refused-two-keys": b"seed = 1\nseed = 2\n",
        "refused-two-names-of-a-key": b"batch_size = 1\nbatch-size = 2\n",
        "refused-no-value": b"seed = \n",
        "refused-table": b"[seed]\nvalue = 1\n",
        "refused-date": b"seed = 2026-01-01\n",
        "refused-empty-list": b"channels = []\n",
        "refused-null": b"{\"seed\": null}",
        "refused-list-of-lists": b"{\"channels\": [[1]]}",
        "refused-no-table": b"[1, 2]",
        "refused-version-2": b"{\"version\": 2, \"stated\": {}}",
        "refused-seed-too-large": b"seed = 18446744073709551616\n",
        "refused-negative": b"epochs = -1\n",
        "refused-largest-layers": b"model = \"mlp\"\nnum-layers = 18446744073709551615\n",
        "refused-largest-width": b"model = \"mlp\"\nhidden-dim = 18446744073709551615\n",
        "refused-largest-batch": b"model = \"mlp\"\nbatch-size = 18446744073709551615\n",
        "refused-rate-is-no-number": b"lr = nan\n",
        "refused-rate-is-infinite": b"lr = inf\n",
        "refused-deep": b"seed = " + b"[" * 2000,
        "refused-deep-json": b"[" * 2000,
        "refused-no-text": b"seed = \"\xff\"\n",
        # Were they passed on as words, each would be a flag of its own.
        "refused-flag-in-a-list": b"freeze = [\"conv0\", \"--quiet\"]\n",
        "refused-flag-in-a-list-of-numbers": b"channels = [4, \"--seed=7\"]\n",
        "refused-end-of-flags-in-a-list": b"freeze = [\"conv0\", \"--\"]\n",
    }


def config_files() -> dict[str, bytes]:
    small = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    classifier = small | {"architectures": ["LlamaForSequenceClassification"]}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

    def file(base: dict = small, **changed: object) -> bytes:
        return json.dumps(base | changed).encode()

    return {
        "valid-small": file(),
        "valid-tied": file(tie_word_embeddings=True, num_key_value_heads=1, head_dim=8, bos_token_id=1, eos_token_id=[2, 3]),
        "valid-classifier": file(classifier, id2label={"0": "bad", "1": "good"}, pad_token_id=0),
        "valid-rope-scaling": file(rope_theta=5e5, rope_scaling=scaling | {"type": "llama3"}),
        "valid-rope-parameters": file(rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 5e5}),
        "valid-no-layers": file(num_hidden_layers=0),
        "refused-empty": b"",
        "refused-cut": file()[:-9],
        "refused-no-object": b"[1, 2]",
        "refused-deep": b"[" * 3000,
        "refused-no-text": b"{\"\xff\": 1}",
        "refused-largest-head": file(head_dim=2**32),
        "refused-largest-vocabulary": file(vocab_size=2**64 - 1),
        "refused-sizes-that-wrap": file(hidden_size=2**33, intermediate_size=2**33),
        "refused-heads-that-wrap": file(num_attention_heads=2**63, num_key_value_heads=2**63),
        "refused-most-parameters": file(hidden_size=2**24, intermediate_size=2**24, num_hidden_layers=10_000),
        "refused-most-labels": file(classifier, num_labels=2**40),
        "refused-most-positions": file(max_position_embeddings=2**62),
        "refused-no-heads": file(num_attention_heads=0),
        "refused-number-beyond-f64": file().replace(b"64}", b"64, \"rope_theta\": 1e999}"),
        "refused-negative-range": file(initializer_range=-1.0),
        "refused-longrope-behind-default": file(rope_parameters={"rope_type": "default"}, rope_scaling={"type": "longrope"}),
        "refused-scaling-by-zero": file(rope_scaling={"type": "linear", "factor": 0.0}),
    }


def tokenizers() -> dict[str, bytes]:
    words = {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "good": 1, "bad": 2, "food": 3, "ab": 4}}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}},
    }
    added = {"id": 5, "content": "<s>", "special": True}
    added |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    base = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": words,
    }
    bpe = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "vocab": {"a": 0, "b": 1, "ab": 2, "\u0120": 3}, "merges": ["a b"],
    }  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 4294967295, "pad_type_id": 0, "pad_token": "?"}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["\u2581good", -1.0], ["ab", -2.5]]}
    piece = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    piece |= {"max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "good": 1, "##s": 2}}

    def file(**changed: object) -> bytes:
        return json.dumps(base | changed).encode()

    def split(pattern: dict[str, str]) -> dict:
        return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}

    return {
        "valid-words": file(post_processor=template, padding=padding),
        "valid-bytes": file(model=bpe, pre_tokenizer=byte_level, decoder=byte_level, normalizer={"type": "NFC"}),
        "valid-unigram": file(model=unigram, pre_tokenizer=metaspace, decoder=metaspace),
        "valid-word-piece": file(model=piece, pre_tokenizer={"type": "BertPreTokenizer"}),
        "valid-split": file(model=bpe, pre_tokenizer=split({"Regex": "\\s+|\\w+"})),
        "refused-empty": b"",
        "refused-no-model": b"{}",
        "refused-cut": file()[:-20],
        "refused-deep": b"[" * 3000,
        "refused-no-tokens": file(added_tokens=[], model={"type": "WordLevel", "unk_token": "?", "vocab": {}}),
        "refused-pattern": file(pre_tokenizer=split({"Regex": "(("})),
        # The library panics on some of these.
        "refused-normalizer-of-no-map": file(normalizer={"type": "Precompiled", "precompiled_charsmap": "x"}),
        "refused-normalizer-without-map": file(normalizer={"type": "Precompiled"}),
        "refused-decoder-of-no-type": file(decoder={"type": "None"}),
        "refused-decoder-is-a-number": file(decoder=7),
        "refused-decoder-strips-more-than-there-is": file(
            model=bpe,
            pre_tokenizer=byte_level,
            decoder={"type": "Strip", "content": "a", "start": 9, "stop": 18446744073709551615},
        ),
    }


def thrift(value: object) -> bytes:
    """A structure in Thrift's compact protocol. A dictionary is a structure, a list holds values of one type."""

    def varint(number: int) -> bytes:
        digits = []
        while number > 127:
            digits.append(number & 127 | 128)
            number >>= 7
        return bytes([*digits, number])

    def kind(value: object) -> int:
        if isinstance(value, bool):
            return 1 if value else 2
        return {int: 6, int32: 5, bytes: 8, list: 9, dict: 12}[type(value)]

    def body(value: object) -> bytes:
        if isinstance(value, bool):
            return b""
        if isinstance(value, int):
            return varint(value << 1 if value >= 0 else (-value << 1) - 1)
        if isinstance(value, bytes):
            return varint(len(value)) + value
        if isinstance(value, list):
            items = b"".join(body(item) for item in value)
            head = min(len(value), 15) << 4 | kind(value[0])
            return bytes([head]) + (varint(len(value)) if len(value) >= 15 else b"") + items
        out, last = b"", 0
        for number, field in sorted(value.items()):
            out += bytes([(number - last) << 4 | kind(field)]) + body(field)
            last = number
        return out + b"\0"

    return body(value)


class int32(int):
    """A number that is written with 32 bits."""


def parquet_files() -> dict[str, bytes]:
    texts, labels = [b"good food", b"bad", b"\xc3\xa4 good"], [1, 0, 1]
    plain_texts = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    plain_labels = struct.pack("<3q", *labels)
    PLAIN, RLE, LENGTHS, DELTA_BYTE_ARRAY, RLE_DICTIONARY = 0, 3, 6, 7, 8
    UNCOMPRESSED, GZIP = 0, 2

    def page(data: bytes, count: int = 3, encoding: int = PLAIN, unpacked: int | None = None, kind: int = 0) -> bytes:
        header = {1: int32(kind), 2: int32(len(data) if unpacked is None else unpacked), 3: int32(len(data))}
        if kind == 2:
            header[7] = {1: int32(count), 2: int32(encoding)}
        else:
            header[5] = {1: int32(count), 2: int32(encoding), 3: int32(RLE), 4: int32(RLE)}
        return thrift(header) + data

    def file(text: bytes, label: bytes = page(plain_labels), codec: int = UNCOMPRESSED, dictionary: int | None = None) -> bytes:
        out, chunks = b"PAR1", []
        for name, kind, pages, packing in [(b"text", 6, text, codec), (b"label", 2, label, UNCOMPRESSED)]:
            meta = {1: int32(kind), 2: [int32(PLAIN)], 3: [name], 4: int32(packing), 5: 3, 6: len(pages), 7: len(pages)}
            meta[9] = len(out)
            if name == b"text" and dictionary is not None:
                meta |= {9: len(out) + dictionary, 11: len(out)}
            chunks.append({2: len(out), 3: meta})
            out += pages
        leaf = {1: int32(6), 3: int32(0), 4: b"text", 6: int32(0)}
        schema = [{4: b"rows", 5: int32(2)}, leaf, {1: int32(2), 3: int32(0), 4: b"label"}]
        group = {1: chunks, 2: len(out), 3: 3}
        footer = thrift({1: int32(1), 2: schema, 3: 3, 4: [group]})
        return out + footer + struct.pack("<I", len(footer)) + b"PAR1"

    good = file(page(plain_texts))
    packed = gzip.compress(plain_texts, mtime=0)
    words = page(plain_texts, kind=2)
    indices = bytes([2, 3, 0b100100, 0])
    bomb = gzip.compress(bytes(2_000_000), mtime=0)
    # Blocks of 128 numbers in 4 miniblocks: 3 numbers, first 9, then 6 fewer and 3 more; and 3 zeros.
    lengths = bytes([128, 1, 4, 3, 18, 11, 4, 0, 0, 0, 0x90]) + bytes(15) + b"".join(texts)
    shared = bytes([128, 1, 4, 3, 0, 0, 0, 0, 0, 0])
    most = bytes([128, 1, 4, 255, 255, 255, 255, 15, 0])
    return {
        "valid-plain": good,
        "valid-lengths": file(page(lengths, encoding=LENGTHS)),
        "valid-lengths-gzip": file(
            page(gzip.compress(lengths, mtime=0), encoding=LENGTHS, unpacked=len(lengths)), codec=GZIP
        ),
        "valid-differences": file(page(shared + lengths, encoding=DELTA_BYTE_ARRAY)),
        "refused-most-lengths": file(page(most, encoding=LENGTHS)),
        "refused-most-lengths-behind-differences": file(page(shared + most, encoding=DELTA_BYTE_ARRAY)),
        "refused-negative-length": file(page(lengths[:4] + bytes([17]) + lengths[5:], encoding=LENGTHS)),
        "valid-gzip": file(page(packed, unpacked=len(plain_texts)), codec=GZIP),
        "valid-dictionary": file(words + page(indices, encoding=RLE_DICTIONARY), dictionary=len(words)),
        "refused-empty": b"",
        "refused-no-footer": good[:-9],
        "refused-longest-footer": good[:-8] + struct.pack("<I", 2**32 - 1) + b"PAR1",
        "refused-page-of-2-gib": file(page(plain_texts, unpacked=2**31 - 1)),
        "refused-page-of-negative-size": file(page(plain_texts, unpacked=-1)),
        "refused-page-unpacks-to-more": file(page(bomb, unpacked=100), codec=GZIP),
        "refused-page-cut": file(page(plain_texts)[:-9]),
        "refused-most-values": file(page(plain_texts, count=2**31 - 1)),
        "refused-most-values-of-a-dictionary": file(page(plain_texts, count=2**31 - 1, kind=2), dictionary=0),
        "refused-differences": file(page(most, encoding=DELTA_BYTE_ARRAY)),
        "refused-deep-header": file(bytes([0x1C]) * 200),
    }


def text_rows() -> dict[str, bytes]:
    lines = b'{"text": "good", "label": 1}\n\n{"label": 0, "text": "b\\u00e4d", "more": [1, {}]}\n'
    return {
        "valid-csv": b'text,label\ngood,1\n"bad, ""bad""\n",0\n',
        "valid-csv-byte-order-mark": b"\xef\xbb\xbflabel,text\r\n1,good\r\n",
        "valid-csv-empty-text": b"text,label\n,1\n",
        "valid-lines": lines,
        "valid-lines-byte-order-mark": b'{"text": "", "label": -1}\n',
        "refused-empty": b"",
        "refused-no-label": b"text,stars\ngood,1\n",
        "refused-word-as-label": b"text,label\ngood,yes\n",
        "refused-quote-without-end": b'text,label\n"good,1\n',
        "refused-fewer-fields": b"text,label\ngood\n",
        "refused-no-text": b"text,label\n\xff\xfe,1\n",
        "refused-lines-cut": lines[:20],
        "refused-lines-label-too-large": b'{"text": "a", "label": 18446744073709551615}\n',
        "refused-lines-text-is-a-number": b'{"text": 1e9, "label": 1}\n',
        "refused-lines-deep": b'{"text": ' + b"[" * 3000,
    }


if __name__ == "__main__":
    write("paceline", "checkpoint", checkpoints())
    write("paceline", "configuration", configurations())
    write("model", "safetensors", weight_files())
    write("collectives", "tcp_header", headers())
    write("rendezvous", "store_wire", stores())
    write("rendezvous", "hello", hellos())
    write("data", "arrays", array_files())
    write("data", "idx", idx_files())
    write("data", "csv", text_rows())
    write("data", "parquet", parquet_files())
    write("data", "tokenizer_json", tokenizers())
    write("model", "config_json", config_files())
