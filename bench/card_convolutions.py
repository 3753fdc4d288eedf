"""Counts the instructions of a convolution's kernels on the emulated card, before and after a change.

    cargo build -p paceline-emulated-card && pip install nvidia-cuda-nvrtc==13.0.88
    python3 bench/card_convolutions.py --before HEAD~1

The layers are those of the CNN 64-128-256 of docs/devices.md, with few images. Instructions are those of the compiler's text (PTX), of all threads; `code` is the
length of the machine code for compute capability 9.0, in instructions. Exits with 1 if a kernel's results are not the same bits as before.
"""
import ctypes
import hashlib
import io
import random
import struct
import subprocess
import sys
import tarfile
import tempfile
from ctypes import byref, c_char_p, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

from common import ROOT, Record, aligned, arguments_for, parsed, program, provenance, write

PARTS = ["crates/cuda/src/numbers.cuh", *(f"crates/kernels/src/card/{name}" for name in ("mma.cuh", "conv.cuh", "conv_wide.cuh", "conv_relu_pool_wide.cu"))]
OPTIONS = ["--fmad=false", "--std=c++17", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"]
# Side, channels in and out, images, and whether the input has a gradient.
LAYERS = [(32, 3, 64, 1, False), (16, 64, 128, 2, True), (8, 128, 256, 4, True)]
# Positions of a part of the weight's gradient.
OF_PART = 704


class Card:
    """The emulated card, and the vendor's compiler."""

    def __init__(self, emulated: Path, compiler: Path) -> None:
        ctypes.CDLL(str(compiler / "libnvrtc-builtins.so.13.0"), ctypes.RTLD_GLOBAL)
        self.compiler, self.driver = ctypes.CDLL(str(compiler / "libnvrtc.so.13")), ctypes.CDLL(str(emulated))
        context, self.stream = c_void_p(), c_void_p()
        self.check(self.driver.cuInit(0), "cuInit")
        self.check(self.driver.cuDevicePrimaryCtxRetain(byref(context), 0), "cuDevicePrimaryCtxRetain")
        self.check(self.driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        self.check(self.driver.cuStreamCreate(byref(self.stream), 1), "cuStreamCreate")

    def check(self, status: int, what: str) -> None:
        if status != 0:
            words = ctypes.create_string_buffer(4000)
            self.driver.paceline_emulated_fault(words, c_size_t(4000))
            raise SystemExit(f"error: {what}: {status} {words.value.decode()}")

    def compiled(self, text: str, kernel: str, architecture: str, form: str) -> tuple[bytes, bytes]:
        """The symbol of a kernel, and its PTX or CUBIN."""
        of, made, symbol, size = self.compiler, c_void_p(), c_char_p(), c_size_t()
        of.nvrtcCreateProgram(byref(made), text.encode(), b"conv.cu", 0, None, None)
        of.nvrtcAddNameExpression(made, kernel.encode())
        options = [*OPTIONS, f"--gpu-architecture={architecture}"]
        self.check(of.nvrtcCompileProgram(made, len(options), (c_char_p * len(options))(*(option.encode() for option in options))), kernel)
        of.nvrtcGetLoweredName(made, kernel.encode(), byref(symbol))
        getattr(of, f"nvrtcGet{form}Size")(made, byref(size))
        code = ctypes.create_string_buffer(size.value)
        getattr(of, f"nvrtcGet{form}")(made, code)
        return symbol.value or b"", code.raw

    def memory(self, size: int, contents: bytes | None = None) -> c_uint64:
        at = c_uint64()
        self.check(self.driver.cuMemAlloc_v2(byref(at), c_size_t(size)), "memory")
        if contents:
            self.check(self.driver.cuMemcpyHtoDAsync_v2(at, c_char_p(contents), c_size_t(size), self.stream), "a copy")
            self.driver.cuStreamSynchronize(self.stream)
        return at

    def instructions(self) -> int:
        counts = (c_uint64 * 13)()
        self.driver.paceline_emulated_counts(counts, c_size_t(13))
        return counts[0]

    def run(self, text: str, kernel: str, grid: list[int], threads: int, arguments: list[ctypes.Array[c_uint32] | c_uint64], results: list[tuple[c_uint64, int]]) -> Record:
        symbol, ptx = self.compiled(text, kernel, "compute_90", "PTX")
        module, function = c_void_p(), c_void_p()
        self.check(self.driver.cuModuleLoadData(byref(module), c_char_p(ptx)), kernel)
        self.check(self.driver.cuModuleGetFunction(byref(function), module, symbol), kernel)
        addresses = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        before = self.instructions()
        self.check(self.driver.cuLaunchKernel(function, *grid, threads, 1, 1, 0, self.stream, addresses, None), kernel)
        self.check(self.driver.cuStreamSynchronize(self.stream), kernel)
        count, digest = self.instructions() - before, hashlib.sha256()
        for at, size in results:
            found = ctypes.create_string_buffer(size)
            self.check(self.driver.cuMemcpyDtoHAsync_v2(found, at, c_size_t(size), self.stream), "a copy")
            self.driver.cuStreamSynchronize(self.stream)
            digest.update(found.raw)
        return {"kernel": kernel, "instructions": count, "code": code_len(self.compiled(text, kernel, "sm_90", "CUBIN")[1], symbol), "digest": digest.hexdigest()}


def code_len(cubin: bytes, symbol: bytes) -> int:
    """The machine instructions of a kernel, of 16 bytes each, by the table of sections of an ELF file."""
    at, (size, count, names) = struct.unpack_from("<Q", cubin, 0x28)[0], struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + number * size) for number in range(count)]
    texts = sections[names][4]
    return next(of[5] // 16 for of in sections if cubin[texts + of[0] :].startswith(b".text." + symbol + b"\0"))


def layer(card: Card, text: str, kind: str, side: int, c_in: int, c_out: int, images: int, has_input: bool) -> list[Record]:
    draw = random.Random(1)
    positions, steps, wide = images * side * side, 9 * c_in, [64, 128]
    columns, columns_of_input = wide[c_out > 64], wide[c_in > 64]

    def numbers(count: int) -> c_uint64:
        return card.memory(4 * count, struct.pack(f"{count}f", *(draw.uniform(-1, 1) for _ in range(count))))

    def sizes(of_part: int) -> ctypes.Array[c_uint32]:
        return (c_uint32 * 12)(side, side, c_in, c_out, 3, 3, 1, 1, 0, 0, positions, of_part)

    def tiles(rows: int, height: int, count: int, width: int, parts: int = 1) -> list[int]:
        return [-(-rows // height), -(-count // width), parts]

    pooled, parts = positions // 4 * c_out, -(-positions // OF_PART)
    x, w, bias, y, winners = numbers(positions * c_in), numbers(steps * c_out), numbers(c_out), card.memory(4 * pooled), card.memory(pooled)
    forward = card.run(text, f"conv_relu_pool_forward<{kind}, 128, {columns}>", tiles(positions, 128, c_out, columns), 2 * columns,
                       [sizes(0), x, w, bias, y, winners], [(y, 4 * pooled), (winners, pooled)])
    dy, dw, dx = numbers(pooled), card.memory(4 * parts * steps * c_out), card.memory(4 * positions * c_in)
    weight = card.run(text, f"wide_weight_gradient<{kind}, true, {columns}>", tiles(steps, columns, c_out, columns, parts), columns * columns // 64,
                      [sizes(OF_PART), x, dy, winners, dw], [(dw, 4 * parts * steps * c_out)])
    if not has_input:
        return [forward, weight]
    return [forward, weight, card.run(text, f"wide_input_gradient<{kind}, true, 128, {columns_of_input}>", tiles(positions, 128, c_in, columns_of_input),
                                      2 * columns_of_input, [sizes(0), w, dy, winners, dx], [(dx, 4 * positions * c_in)])]


def main() -> int:
    parser = arguments_for(__doc__, "card_convolutions.json", rounds=0, has_program=False)
    parser.add_argument("--before", default="HEAD", metavar="COMMIT", help="(default: HEAD)")
    parser.add_argument("--types", nargs="+", default=["tf32", "bf16", "f32"], help="(default: tf32 bf16 f32)")
    parser.add_argument("--emulated-card", type=Path, default=ROOT / "target/debug/libpaceline_emulated_card.so", metavar="PATH")
    parser.add_argument("--nvrtc", type=Path, required=True, metavar="DIR", help="the folder of libnvrtc.so.13")
    args = parsed(parser)
    card = Card(program(parser, "--emulated-card", args.emulated_card), args.nvrtc)
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", ROOT, "archive", args.before, *PARTS], capture_output=True, check=True).stdout
        tarfile.open(fileobj=io.BytesIO(archive)).extractall(folder, filter="data")
        texts = ["".join((root / part).read_text() for part in PARTS) for root in (Path(folder), ROOT)]
    found = []
    for kind in args.types:
        for of in LAYERS:
            before, after = (layer(card, text, kind, *of) for text in texts)
            for old, new in zip(before, after):
                same = old.pop("digest") == new.pop("digest")
                found.append({"side": of[0], "images": of[3], "before": old, "after": new, "same_bits": same})
    write(args.out, provenance() | {"before": args.before, "kernels": found})
    rows = [[of["after"]["kernel"], f"{of['side']}", *(f"{of[when][key]:,}" for key in ("instructions", "code") for when in ("before", "after")),
             "yes" if of["same_bits"] else "NO"] for of in found]
    print(aligned([["kernel", "side", "instructions", "after", "code", "after", "same bits"], *rows], left={0}))
    return 0 if all(of["same_bits"] for of in found) else 1


if __name__ == "__main__":
    sys.exit(main())
