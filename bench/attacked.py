"""What `attack.py` attacks: a program in a fresh folder, what it was asked to do, and what went wrong."""
import hashlib
import os
import random
import re
import secrets
import shlex
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Record, kill_with, processes_with

LIMIT_S, LIMIT_BYTES = 60.0, 8 << 30
# How long ranks may take to end after their launcher, and a launcher after a rank has died, on a busy machine.
GRACE_S = 8.0
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ERROR = re.compile(r"^(?:\[rank \d+\] )?error: .*", re.MULTILINE)
Flags = dict[str, object]
# The exit code of a command, or "hangs"; and all that it printed.
Ran = tuple[int | str, str]


def words(flags: Flags) -> list[str]:
    lists = ((key, value if isinstance(value, list) else [value]) for key, value in flags.items())
    return [word for key, values in lists for word in (
        [f"--{key}" if values[0] else f"--{key}=false"] if isinstance(values[0], bool) else [f"--{key}", *map(str, values)])]


def error(text: str) -> str:
    return next(iter(ERROR.findall(text)), " | ".join(text.strip().splitlines()[-2:]))[:300]


def digest(ran: Ran) -> str:
    return next(iter(re.findall(r"^Weights: sha256 (\w+)", ran[1], re.MULTILINE)), "none")


def tree(folder: Path) -> dict[str, object]:
    """All that lies there, without the cache of tokens: kind and mode, and the contents or the target."""
    def what(path: Path, mode: int) -> str:
        is_file = stat.S_ISREG(mode)
        return os.readlink(path) if stat.S_ISLNK(mode) else hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""

    paths = [path for path in folder.rglob("*") if "tokens" not in path.parts]
    return {str(path.relative_to(folder)): (mode := path.lstat().st_mode, what(path, mode)) for path in sorted(paths)}


def differ(before: dict[str, object], after: dict[str, object]) -> str:
    return ", ".join(sorted({key for key, _ in before.items() ^ after.items()})[:5])


class Attack:
    """A program in a fresh folder, what it was asked to do, and what went wrong."""

    def __init__(self, binary: Path, kind: str, seed: int) -> None:
        self.binary, self.kind, self.seed = binary, kind, seed
        self.chance = random.Random(f"{kind} {seed}")
        self.root = Path(tempfile.mkdtemp(prefix=f"attack_{kind}_{seed}_"))
        self.folder, self.outside = self.root / "work", self.root / "outside"
        for folder in (self.folder, self.outside / "folder", self.root / "home", self.root / "tmp"):
            folder.mkdir(parents=True)
        (self.outside / "precious").write_text("precious\n")
        (self.outside / "folder" / "kept").write_text("kept\n")
        self.before = tree(self.outside)
        self.token = f"attack-{secrets.token_hex(8)}"
        self.environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.root / "home"), "TMPDIR": str(self.root / "tmp"),
            "HF_HUB_OFFLINE": "1", "ATTACK": self.token, "PYTHONUTF8": "1", "LANG": "C.UTF-8"}
        self.commands: list[str] = []
        self.findings: list[Record] = []
        # The last output.
        self.output = ""

    def start(self, line: list[object], **streams: object) -> subprocess.Popen:
        line = [str(word) for word in line]
        self.commands.append(shlex.join(["paceline", *line])[:2000])
        limits = f"import os, resource as r, sys; r.setrlimit(r.RLIMIT_AS, ({LIMIT_BYTES},) * 2); r.setrlimit(r.RLIMIT_CORE, (0, 0)); os.execv(sys.argv[1], sys.argv[1:])"
        return subprocess.Popen([sys.executable, "-ISc", limits, self.binary, *line], cwd=self.folder, env=self.environment,
                                start_new_session=True, **{"stdin": subprocess.DEVNULL, **streams})

    def run(self, *line: object) -> Ran:
        process = self.start(list(line), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        code: int | str = "hangs"
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
            code = process.returncode
        except subprocess.TimeoutExpired:
            kill_with(self.token)
            output, _ = process.communicate()
        return self.judged(code, output.decode(errors="replace"))

    def judged(self, code: int | str, text: str) -> Ran:
        """Judges an output by what holds for every command."""
        self.output = text[-4000:]
        command = re.split(" --| # ", self.commands[-1])[0][:50]
        if code == "hangs":
            self.found(f"{command} hangs")
        if "panicked at" in text or code == 101:
            self.found(f"{command} panics: {''.join(re.findall('panicked at .*', text))[:200]}")
        if isinstance(code, int) and code < 0:
            self.found(f"{command} is killed by signal {-code}")
        # What a model generates may be anything.
        if (control := CONTROL.search(text)) and " generate " not in self.commands[-1]:
            self.found(f"{command} prints the control character {control[0]!r}")
        return code, text

    def found(self, what: str) -> None:
        shape = re.sub(r"[0-9a-f]{16,}|[\d.]+", "N", f"{self.kind}: {what}")[:160]
        if all(finding["shape"] != shape for finding in self.findings):
            self.findings.append({"kind": self.kind, "seed": self.seed, "shape": shape, "what": what, "commands": self.commands[-8:],
                                  "output": self.output})

    def expect(self, ran: Ran, codes: set[int], what: str) -> bool:
        if ran[0] not in {*codes, "hangs"}:
            self.found(f"{what} ends with {ran[0]}: {error(ran[1])}")
        return ran[0] in codes

    def refused(self, ran: Ran, before: dict[str, object], name: str = "--") -> None:
        """A refusal is one message, which names a flag, and changes nothing."""
        if (count := len(ERROR.findall(ran[1]))) != 1:
            self.found(f"{count} messages of a refusal: {error(ran[1])}")
        elif name not in ran[1]:
            self.found(f"a refusal that does not name {name}: {error(ran[1])}")
        if changed := differ(before, tree(self.root)):
            self.found(f"refused ({error(ran[1])[:60]}), but changed {changed}")

    def end_of_all(self) -> bool:
        deadline = time.monotonic() + GRACE_S
        while (left := processes_with(self.token)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not left

    def end(self) -> None:
        if not self.end_of_all():
            lines = [Path(f"/proc/{process}/cmdline") for process in processes_with(self.token)]
            names = {line.read_bytes().replace(b"\0", b" ").decode(errors="replace")[:60] for line in lines if line.exists()}
            self.found(f"processes are left: {', '.join(sorted(names))}")
            kill_with(self.token)
        if changed := differ(self.before, tree(self.outside)):
            self.found(f"changed outside of its folder: {changed}")
