"""Breaks forty drawn places of the package, one at a time in a copy of it, and names the test that notices.

    python scripts/break_places.py                  half an hour or more
    python scripts/break_places.py --seed 41        other places
    python scripts/break_places.py --places 3,7     some of them

A place is a line and what stands there instead. A seed draws the same places until the package changes: so run a seed
before and after a change of the tests. No test notices a change that makes no difference, so judge what is not caught.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from build_kernels import LIBRARY, build
from run_tests import STARTS_PROGRAMS, TORCHRUN

ROOT = Path(__file__).resolve().parent.parent
EACH = 10  # places of an area
CONVERSION = "convert", "unconverted"
TOOLS = "__init__", "__main__", "testing"  # other files at the top of the package are of the step
NEAREST = {"step": "step layer backward errors", "kernels": "kernels", "conversion": "convert unconverted"}  # tests
PAIRS = [("==", "!="), ("<", "<="), (">", ">="), ("+", "-"), ("*", "/"), ("and", "or"), ("is", "is not")]
PAIRS += [("in", "not in"), ("&&", "||"), ("+=", "-=")]
INSTEAD = dict(PAIRS) | {other: one for one, other in PAIRS} | {"//": "*"}
NO_CODE = "annotation", "returns", "decorator_list", "bases"  # fields of Python's syntax tree
LIMIT = "--timeout=600", "--timeout-method=thread"  # seconds for a test: one that hangs has noticed
BEGUN = re.compile(r"^tests/\S+::.*?(?= (?:[A-Z]{5,}|Fatal) | *$)", re.MULTILINE)  # a test in a log
Break = tuple[int, int, int, str]  # number of a line, start and end in it, what stands there instead


class Place(NamedTuple):
    area: str
    file: str
    line: int
    old: str  # the line
    new: str


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of Python that may be broken: not annotations, imports, assertions, and what makes a text to read."""
    parts = ast.walk(node) if isinstance(node, ast.stmt) and not hasattr(node, "body") else ()
    texts = [part for part in parts if isinstance(part, ast.Constant) and " " in str(part.value)]
    if texts or isinstance(node, (ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom, ast.Assert)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in NO_CODE:
                yield from nodes(child)


def breaks_of_python(text: str) -> Iterator[Break]:
    """Another operator or number, the opposite of a condition, a call that is left out."""
    node: Any
    for node in nodes(ast.parse(text)):
        match node:
            case ast.BinOp() | ast.BoolOp() | ast.Compare():
                left, right, *_ = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
                start, end = left.end_col_offset or 0, right.col_offset
                between = text.splitlines()[right.lineno - 1][start:end]
                operator = between.strip(" ()")
                if left.end_lineno == right.lineno and operator in INSTEAD:
                    yield right.lineno, start, end, between.replace(operator, INSTEAD[operator])
                continue
            case ast.Constant(value=bool(value)):
                instead = f"{not value}"
            case ast.Constant(value=int(value) | float(value)):
                instead = f"{value + 1}"
            case ast.If(test=node) | ast.IfExp(test=node) | ast.While(test=node) | ast.comprehension(ifs=[node, *_]):
                instead = f"not ({ast.get_source_segment(text, node)})"
            case ast.Expr(value=ast.Call()):
                instead = "pass"
            case _:
                continue
        if node.lineno == node.end_lineno:
            yield node.lineno, node.col_offset, node.end_col_offset, instead


def breaks_of_cpp(text: str) -> Iterator[Break]:
    """Another operator, of those with a space on either side."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in re.finditer(r"(?<= )[^\w\s]+(?= )", line.partition("//")[0]):
            if found[0] in INSTEAD and not re.match(r"\s*(template|static_assert|using|#)", line):
                yield number, found.start(), found.end(), INSTEAD[found[0]]


def area_of(file: Path) -> str:
    """The area of a file of the package; empty for a file that no layer calls."""
    if len(file.parts) > 1:
        return file.parts[0] if file.parts[0] in ("kernels", "ranks") else ""
    return "conversion" if file.stem in CONVERSION else "" if file.stem in TOOLS else "step"


def draw(seed: int) -> list[Place]:
    """EACH places of each area, in functions."""
    generator, places = random.Random(seed), dict[str, list[Place]]()
    for path in sorted((ROOT / "syncbn").rglob("*")):
        area = area_of(path.relative_to(ROOT / "syncbn"))
        if area and path.suffix in (".py", ".cpp", ".h"):
            text = path.read_text()
            for number, start, end, instead in (breaks_of_python if path.suffix == ".py" else breaks_of_cpp)(text):
                old = text.splitlines()[number - 1]
                if old.startswith(" "):
                    new, file = old[:start] + instead + old[end:], path.relative_to(ROOT).as_posix()
                    places.setdefault(area, []).append(Place(area, file, number, old, new))
    return [place for area in sorted(places) for place in generator.sample(places[area], EACH)]


def break_copy(place: Place, copy: Path) -> None:
    """Break the place in a copy of the tree. **Raises** CalledProcessError when a kernel no longer compiles."""
    path = copy / place.file
    lines = path.read_text().splitlines()
    lines[place.line - 1] = place.new
    path.write_text("\n".join(lines) + "\n")
    if path.suffix != ".py":
        build(copy, copy / LIBRARY)


def noticing(tests: list[str], tree: Path) -> str:
    """Which of these tests fails, crashes or hangs in the tree; "an import" if none begins, "" if all pass."""
    command, paths = ["pytest", "-x", "-v", "-p", "no:cacheprovider", *LIMIT, *tests], [str(tree)]
    if tests[0].startswith("tests/distributed"):
        command, paths = [*TORCHRUN.split(), "2", "-m", *command, "-p", "voting"], [*paths, "tests"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if "triton" in tests[-1]:
        environment["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        run = subprocess.run([sys.executable, "-m", *command], cwd=tree, env=environment, stdout=log, stderr=log)
        log.seek(0)
        return ["an import", *BEGUN.findall(log.read())][-1] if run.returncode else ""


def caught_by(place: Place, copy: Path) -> str:
    """The test that notices what is broken in the copy: one of the nearest, else any."""
    try:
        break_copy(place, copy)
    except subprocess.CalledProcessError:
        return "the compiler"
    apart = {f"tests/test_{name}.py" for names in STARTS_PROGRAMS.values() for name in names.split()}
    alone = {path.relative_to(copy).as_posix() for path in copy.glob("tests/test_*.py")} - apart
    nearest = [f"tests/test_{name}.py" for name in NEAREST.get(place.area, "").split()]
    if "gpu" in Path(place.file).name:
        nearest += ["-m", "triton"]
    for tests in nearest, ["tests/distributed"], sorted(alone.difference(nearest)):
        if tests and (test := noticing(tests, copy)):
            if test.startswith("tests/") and noticing([test], ROOT):
                sys.exit(f"{test} fails in the unbroken tree, too")
            return test
    return "not caught"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=40, help="(default %(default)s)")
    parser.add_argument("--places", help="numbers, with commas between them")
    options = parser.parse_args()
    for number, place in enumerate(draw(options.seed), 1):
        if options.places and str(number) not in options.places.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "copy")
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "runs"))
            test = caught_by(place, copy)
        print(
            f"{number:2} {place.file}:{place.line}: {test}\n    {place.old.strip()}\n    {place.new.strip()}",
            flush=True,
        )


if __name__ == "__main__":
    main()
