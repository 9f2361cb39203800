"""Breaks forty places of the package, one at a time in a copy of it, and names the test that notices.

    python scripts/break_places.py                  runs the tests on each place of tests/broken_places.json
    python scripts/break_places.py --recheck        first the test that noticed; fails where none does any more
    python scripts/break_places.py --places 3,7     some of them
    python scripts/break_places.py --draw 54e6a01   draws the places anew, from the package of this commit

A place is a line and what stands there instead: `before` in the commit that it was drawn from, `now` what differs from
that today; edit `now` where code has changed or moved. A change that makes no difference, and code that is gone, say so
as `caught_by`, and are not run.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from build_kernels import LIBRARY, build
from run_tests import STARTS_PROGRAMS, TORCHRUN

ROOT = Path(__file__).resolve().parent.parent
PLACES = ROOT / "tests/broken_places.json"
SEED, EACH = 40, 10  # places of an area
FILES = {  # of an area, drawn as often as they are named; those that are gone are for --draw of an old commit
    "step": "step.py step.py fallback.py fallback.py plan.py arguments.py layer.py statistics.py "
    "ordinary.py ordinary.py general.py gradients.py training.py checks.py raising.py",
    "kernels": "kernels/cpu.cpp kernels/cpu_*.h kernels/gpu_tiles.py kernels/gpu_tiles.py kernels/gpu_channels.py",
    "reductions": f"{4 * 'ranks/reductions.py '} {4 * 'ranks/collective.py '} {2 * 'ranks/totals.py '} ranks/*.py "
    "reductions/*.py comm/*.py",
    "conversion": "convert.py convert.py unconverted.py synchronised_classes.py bound_methods.py unsynchronised.py",
}
NEAREST = {"step": "layer step backward errors", "kernels": "kernels", "conversion": "convert"}  # tests
PAIRS = [("==", "!="), ("<", "<="), (">", ">="), ("+", "-"), ("*", "/"), ("and", "or"), ("is", "is not")]
PAIRS += [("in", "not in"), ("&&", "||"), ("+=", "-=")]
INSTEAD = dict(PAIRS) | {other: one for one, other in PAIRS} | {"//": "*"}
NO_CODE = "annotation", "returns", "decorator_list", "bases"  # fields of Python's syntax tree
LIMIT = "--timeout=600", "--timeout-method=thread"  # seconds for a test: one that hangs has noticed
BEGUN = re.compile(r"^tests/\S+::.*?(?= (?:[A-Z]{5,}|Fatal) | *$)", re.MULTILINE)  # a test in a log
Break = tuple[int, int, int, str]  # number of a line, start and end in it, what stands there instead
Place = dict[str, Any]


def lines_of(path: Path) -> list[tuple[str, str]]:
    """Each line without its indentation, and the name that is defined last above it; no name at the first column."""
    lines, name = [], ""
    for line in path.read_text().splitlines():
        defined = re.match(r"(?:\s*def |(?=\w).*?)\b(\w+)(?:\(| = | \{|:$)", line)
        name = defined[1] if defined else name
        lines.append((line.strip(), name if line.startswith(" ") else ""))
    return lines


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


def draw(root: Path) -> list[Place]:
    """EACH lines of each area, in functions, with a text that their function has once."""
    generator, places = random.Random(SEED), list[Place]()
    for area, patterns in FILES.items():
        files = [path for pattern in patterns.split() for path in sorted(root.glob(f"syncbn/{pattern}"))]
        drawn = dict[tuple[Path, int], Place]()
        while len(drawn) < EACH:
            path = generator.choice(files)
            text, lines = path.read_text(), lines_of(path)
            breaks = [*(breaks_of_python if path.suffix == ".py" else breaks_of_cpp)(text)]
            number = generator.choice(sorted({number for number, *_ in breaks} or {0}))
            old, function = lines[number - 1]
            if function and lines.count((old, function)) == 1:
                _, start, end, instead = generator.choice([one for one in breaks if one[0] == number])
                line = text.splitlines()[number - 1]
                place = {"file": path.relative_to(root).as_posix(), "line": number, "function": function}
                drawn[path, number] = place | {"old": old, "new": (line[:start] + instead + line[end:]).strip()}
        places += [{"area": area, "before": place, "now": {}} for place in drawn.values()]
    return [{"number": number} | place for number, place in enumerate(places, 1)]


def break_copy(place: Place, copy: Path) -> bool:
    """Break the place in a copy of the tree, and build the kernels where they change. Returns whether it was found."""
    path = copy / place["file"]
    fits = [(place["old"] in line, name) for line, name in lines_of(path)] if path.is_file() else []
    if fits.count((True, place["function"])) != 1:
        return False
    lines, number = path.read_text().splitlines(keepends=True), fits.index((True, place["function"]))
    lines[number] = lines[number].replace(place["old"], place["new"])
    path.write_text("".join(lines))
    if path.suffix != ".py":
        build(copy, copy / LIBRARY)
    return True


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


def caught_by(place: Place, copy: Path, recorded: str) -> str:
    """The test that notices what is broken in the copy: the recorded one, else one of the nearest, else any."""
    apart = {f"tests/test_{name}.py" for names in STARTS_PROGRAMS.values() for name in names.split()}
    alone = {path.relative_to(copy).as_posix() for path in copy.glob("tests/test_*.py")} - apart
    nearest = [f"tests/test_{name}.py" for name in NEAREST.get(place["area"], "").split()]
    if "gpu_" in place["file"]:
        nearest += ["-m", "triton"]
    test = recorded if recorded and noticing([recorded], copy) == recorded else ""
    for tests in nearest, ["tests/distributed"], sorted(alone.difference(nearest)):
        test = test or (noticing(tests, copy) if tests else "")
    if test.startswith("tests/") and noticing([test], ROOT):
        sys.exit(f"{test} fails in the unbroken tree, too")
    return test or "not caught"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", metavar="COMMIT")
    parser.add_argument("--recheck", action="store_true")
    parser.add_argument("--places", help="numbers, with commas between them")
    options = parser.parse_args()
    if options.draw:
        with tempfile.TemporaryDirectory() as folder:
            archive = ["git", "archive", "-o", f"{folder}/drawn.tar", options.draw, "syncbn"]
            subprocess.run(archive, cwd=ROOT, check=True)
            shutil.unpack_archive(f"{folder}/drawn.tar", folder, filter="data")
            PLACES.write_text(json.dumps(draw(Path(folder)), indent=2) + "\n")
        return
    places, failed = json.loads(PLACES.read_text()), False
    skipped = ("equivalent", "gone", "not caught") if options.recheck else ("equivalent", "gone")
    for entry in places:
        place = entry["before"] | entry["now"] | {"area": entry["area"]}
        recorded = place.get("caught_by", "")
        is_wanted = not options.places or str(entry["number"]) in options.places.split(",")
        if not is_wanted or recorded.startswith(skipped):
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "copy")
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "runs"))
            found = break_copy(place, copy)
            test = caught_by(place, copy, recorded if options.recheck else "") if found else "not found"
        print(f"{entry['number']:2} {place['file']}: {test}", flush=True)
        failed |= test.startswith("not ")
        entry["now"]["caught_by"] = test
        if not options.recheck:
            PLACES.write_text(json.dumps(places, indent=2) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
