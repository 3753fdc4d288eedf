"""The shape of the Rust code: how much a reader has to hold in mind. Tests, models of loom and examples are left out.

    python3 scripts/shape.py              # a row for each crate
    python3 scripts/shape.py functions    # the places of one kind

files      of more than 500 lines           functions  of more than 60 lines
structs    of ten fields or more            arguments  functions of eight arguments or more
circles    of more than three files of a crate that import each other, through re-exports too
bool       `match` with arms `true` and `false`
what       documentation that begins with "What"
names      types whose name stands in several crates

Input: files as rustfmt leaves them, so that an item ends at a bracket at its own depth.
"""
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

KINDS = ("files", "functions", "structs", "arguments", "circles", "bool", "what", "names")
VISIBLE = r"(?:pub(?:\([^)]*\))? )?"
FUNCTION = re.compile(rf'(\s*){VISIBLE}(?:const |async |unsafe |extern "C" )*fn (\w+)')
STRUCT = re.compile(rf"{VISIBLE}struct (\w+).*\{{$")
FIELD = re.compile(rf"    {VISIBLE}\w+: ")
TYPE = re.compile(rf"{VISIBLE}(?:struct|enum|trait|union) (\w+)")
ARM = re.compile(r"\s*(true|false) => ")
WHAT = re.compile(r"\s*//[/!] What\b")
DOC = re.compile(r"\s*//[/!]")
TEST_MODULE = re.compile(r"\s*#\[cfg\(.*\btest\b.*\n\s*mod \w+ \{")
USE = re.compile(r"^\s*use ((?:crate|super|self)\b[^;]+);", re.MULTILINE)
RE_EXPORT = re.compile(r"pub(?:\([^)]*\))? use ([^;]+);")
FULL_PATH = re.compile(r"\b((?:crate|super)(?:::\w+)+)")

# A module's path within its crate, such as ("shared", "round").
Module = tuple[str, ...]


def shipped(path: Path) -> str:
    """A file's text up to its module of tests."""
    text = path.read_text(encoding="utf-8", errors="replace")
    tests = TEST_MODULE.search(text)
    return text[: tests.start()] if tests else text


def sources(crate: Path) -> Iterator[Path]:
    for path in sorted((crate / "src").rglob("*.rs")):
        if not path.name.endswith("_tests.rs") and path.name not in ("tests.rs", "models.rs"):
            yield path


def split_outside_of_brackets(text: str) -> list[str]:
    """The parts between the commas that no bracket encloses, up to a bracket that was not opened."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "({[<") - (letter in ")}]>")
        if depth < 0:
            break
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def arguments(head: str) -> int:
    """How many arguments a function has, `self` left out. `head` begins with its name."""
    parts = split_outside_of_brackets(head.replace("->", "")[head.find("(") + 1 :])
    return sum(not re.match(r"&?(?:'\w+ )?(?:mut )?self\b", part) for part in parts)


def depth(line: str) -> int:
    """How far a line is indented; a blank one is deeper than any."""
    return len(line) - len(line.lstrip()) if line.strip() else sys.maxsize


def functions(lines: list[str]) -> Iterator[tuple[int, str, int, int]]:
    """Line, name, length and number of arguments of each function."""
    for at, line in enumerate(lines):
        found = FUNCTION.match(line)
        if not found:
            continue
        indent, end = len(found[1]), at
        while end + 1 < len(lines) and not (depth(lines[end]) == indent and lines[end].endswith(("}", ";"))):
            end += 1
            if depth(lines[end]) < indent:
                break
        head = " ".join(part.strip() for part in lines[at : at + 25])
        yield at + 1, found[2], end - at + 1, arguments(head[head.find("fn ") :])


def structs(lines: list[str]) -> Iterator[tuple[int, str, int]]:
    """Line, name and number of fields of each struct."""
    for at, line in enumerate(lines):
        found = STRUCT.match(line)
        if found:
            end = lines.index("}", at)
            yield at + 1, found[1], sum(bool(FIELD.match(field)) for field in lines[at + 1 : end])


class Imports:
    """Which files of a crate import which. A name that a file re-exports leads on to the file that defines it."""

    def __init__(self, crate: Path) -> None:
        self.files: dict[Module, str] = {}
        self.texts: dict[Module, str] = {}
        self.re_exports: dict[Module, dict[str, Module]] = defaultdict(dict)
        for path in sources(crate):
            name = path.relative_to(crate / "src")
            module = tuple(part for part in name.with_suffix("").parts if part not in ("mod", "lib"))
            self.files[module] = str(name)
            self.texts[module] = re.sub(r"//[^\n]*", "", shipped(path))
            for tree in RE_EXPORT.findall(self.texts[module]):
                for item in self.leaves(tree):
                    self.re_exports[module][item[-1]] = self.absolute(module, item)

    def leaves(self, tree: str, before: str = "") -> Iterator[Module]:
        """The paths that a `use` names: `a::{b, c::d}` has two."""
        for part in split_outside_of_brackets(re.sub(r"\s+", " ", tree)):
            head, bracket, rest = part.partition("{")
            if bracket:
                yield from self.leaves(rest.rpartition("}")[0], before + head)
            else:
                yield tuple((before + head).partition(" as ")[0].strip().split("::"))

    def absolute(self, module: Module, path: Module) -> Module:
        first, rest = path[0], path[1:]
        return {"crate": rest, "self": module + rest, "super": module[:-1] + rest}.get(first, module + path)

    def file_of(self, path: Module, depth: int = 0) -> Module:
        """The file in which a path ends."""
        here: Module = ()
        for at, part in enumerate(path):
            if part == "super":
                here = here[:-1]
            elif here + (part,) in self.files:
                here += (part,)
            elif part in self.re_exports[here] and depth < 6:
                return self.file_of(self.re_exports[here][part] + path[at + 1 :], depth + 1)
            elif part != "self":
                break
        return here

    def edges(self) -> dict[Module, set[Module]]:
        edges: dict[Module, set[Module]] = {}
        for module, text in self.texts.items():
            paths = [leaf for tree in USE.findall(text) for leaf in self.leaves(tree)]
            paths += [tuple(path.split("::")) for path in FULL_PATH.findall(text)]
            ends = {self.file_of(self.absolute(module, path)) for path in paths}
            edges[module] = {end for end in ends if end and end != module}
        return edges

    def circles(self) -> list[list[str]]:
        """Groups of more than three files in which each reaches each."""
        edges = self.edges()

        def reached_from(module: Module) -> set[Module]:
            reached, left = set(), [module]
            while left:
                new = edges[left.pop()] - reached
                reached |= new
                left += new
            return reached

        reached = {module: reached_from(module) for module in edges}
        groups = {frozenset(end for end in ends if module in reached[end]) for module, ends in reached.items()}
        return sorted(sorted(self.files[module] for module in group) for group in groups if len(group) > 3)


def places_of(crate: Path, root: Path) -> dict[str, list[str]]:
    """The places of each kind but `names` in one crate."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources(crate):
        lines, name = shipped(path).split("\n"), path.relative_to(root)
        if len(lines) > 500:
            places["files"].append(f"{name} {len(lines)}")
        for at, function, length, num_arguments in functions(lines):
            if length > 60:
                places["functions"].append(f"{name}:{at} {function} {length}")
            if num_arguments >= 8:
                places["arguments"].append(f"{name}:{at} {function} {num_arguments}")
        places["structs"] += [f"{name}:{at} {struct} {fields}" for at, struct, fields in structs(lines) if fields >= 10]
        for at, (before, line) in enumerate(zip(["", *lines], lines), start=1):
            if ARM.match(line) and before.endswith("{"):
                places["bool"].append(f"{name}:{at}")
            if WHAT.match(line) and not DOC.match(before):
                places["what"].append(f"{name}:{at}")
    places["circles"] = [f"{len(circle)}: {', '.join(circle)}" for circle in Imports(crate).circles()]
    return places


def measure(root: Path) -> dict[str, dict[str, list[str]]]:
    """The places of each kind by crate. Those of `names` belong to no crate, and are at ""."""
    crates = sorted(path.parent for top in ("crates", "testing") for path in root.glob(f"{top}/*/src"))
    names: dict[str, set[str]] = defaultdict(set)
    for crate in crates:
        for path in sources(crate):
            for name in TYPE.findall("\n".join(line for line in shipped(path).split("\n") if TYPE.match(line))):
                names[name].add(crate.name)
    measured = {crate.name: places_of(crate, root) for crate in crates}
    measured[""] = {"names": [f"{name}: {', '.join(sorted(of))}" for name, of in sorted(names.items()) if len(of) > 1]}
    return measured


def count(root: Path, core: set[str]) -> Counter[str]:
    """How many places of each kind there are, and how many circles in the crates of the core."""
    measured = measure(root)
    counted = Counter({kind: sum(len(places.get(kind, [])) for places in measured.values()) for kind in KINDS})
    counted["circles in the core"] = sum(len(measured[crate]["circles"]) for crate in core)
    return counted


def main() -> None:
    if len(sys.argv) > 2 or sys.argv[1:] and sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    measured = measure(Path(__file__).resolve().parent.parent)
    if sys.argv[1:]:
        print("\n".join(place for places in measured.values() for place in places.get(sys.argv[1], [])))
        return
    print(f"{'':16}" + "".join(f"{kind:>11}" for kind in KINDS))
    for crate, places in measured.items():
        print(f"{crate or 'several':16}" + "".join(f"{len(places.get(kind, [])):>11}" for kind in KINDS))


if __name__ == "__main__":
    main()
