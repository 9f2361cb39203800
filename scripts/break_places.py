"""Mutate forty random lines of a copy of the package, one at a time, and print the first failing test for each.

    python scripts/break_places.py                  half an hour or more
    python scripts/break_places.py --seed 41        other lines

A seed draws the same mutations until the package changes, so run it before and after a change of the tests. A mutation
that changes no result is not caught either: judge each one. (cosmic-ray and mutmut mutate no C++, draw no sample, and
cannot run tests under torchrun.)
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from build_kernels import LIBRARY, build
from run_tests import INTERPRETED, STARTS_PROGRAMS, TORCHRUN, test_file

ROOT = Path(__file__).resolve().parent.parent
NUM_MUTATIONS = 40
PAIRS = ("== !=", "< <=", "> >=", "+ -", "* /", "and or", "&& ||", "+= -=")
SWAPS = {a: b for pair in PAIRS for a, b in (pair.split(), reversed(pair.split()))}
SWAPS |= {"//": "*", "is not": "is", "not in": "in", "is": "is not", "True": "False", "False": "True"}
RULES: list[tuple[str, Callable[[str], str]]] = [  # pattern of a line -> replacement of group 1
    (r"(?<= )(is not|not in|is|and|or|[-+*/<>=!&|]+)(?= )", lambda text: SWAPS.get(text, text)),
    (r"\b(True|False)\b", lambda text: SWAPS[text]),
    (r"(?<![\w.])(\d+)(?![\w.])", lambda text: str(int(text) + 1)),
    (r"^ +(?:el)?if (.*):$", lambda text: f"not ({text})"),
    (r"^ +([\w.]+\(.*\))$", lambda text: "pass"),  # a call whose result is not used
]
IGNORED = re.compile(r"\s*(@|def |class |import |from |raise |assert |template|static_assert|using |#)")
TIMEOUT = "--timeout=600", "--timeout-method=thread"  # A test that hangs has failed.
STARTED = re.compile(r"^tests/\S+::.*?(?= (?:[A-Z]{5,}|Fatal) | *$)", re.MULTILINE)  # name of a test in a log


class Mutation(NamedTuple):
    file: str
    line: int
    old: str  # text of the line
    new: str


def mutations(path: Path) -> Iterator[Mutation]:
    """Yield every mutation of the functions in a file of Python or C++. Lines with a string are left out."""
    rules, comment = (RULES, r"\s+# ") if path.suffix == ".py" else (RULES[:1], r"\s*// ")
    in_docstring = False
    for number, old in enumerate(path.read_text().splitlines(), 1):
        in_docstring ^= old.count('"""') % 2 == 1
        code = re.split(comment, old)[0]
        if code.startswith(" ") and not (in_docstring or '"' in code or IGNORED.match(code)):
            for pattern, replace in rules:
                for match in re.finditer(pattern, code):
                    start, end = match.span(1)
                    if (new := old[:start] + replace(old[start:end]) + old[end:]) != old:
                        yield Mutation(path.relative_to(ROOT).as_posix(), number, old, new)


def draw(seed: int) -> list[Mutation]:
    """Return random mutations of the package."""
    files = sorted(path for path in (ROOT / "syncbn").rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    return random.Random(seed).sample([mutation for path in files for mutation in mutations(path)], NUM_MUTATIONS)


def failing_test(tests: list[str], tree: Path) -> str:
    """Return the first test that fails, crashes or hangs in the tree, "an import" if no test starts, or ""."""
    command, paths = ["pytest", "-x", "-v", "-p", "no:cacheprovider", *TIMEOUT, *tests], [str(tree)]
    if tests[0].startswith("tests/distributed"):
        command, paths = [*TORCHRUN.split(), "2", "-m", *command, "-p", "voting"], [*paths, "tests"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if "triton" in tests:
        environment["TRITON_INTERPRET"] = "1"
    run = subprocess.run(
        [sys.executable, "-m", *command], cwd=tree, env=environment, capture_output=True, text=True, errors="replace"
    )
    return ["an import", *STARTED.findall(run.stdout)][-1] if run.returncode else ""


def caught_by(mutation: Mutation, copy: Path) -> str:
    """Apply the mutation to a copy of the tree and return what notices it. The file's own tests run first."""
    path = copy / mutation.file
    lines = path.read_text().splitlines()
    lines[mutation.line - 1] = mutation.new
    path.write_text("\n".join(lines) + "\n")
    if path.suffix != ".py":
        try:
            build(copy, copy / LIBRARY)
        except subprocess.CalledProcessError:
            return "the compiler"
    programs = {*map(test_file, " ".join(STARTS_PROGRAMS.values()).split())}
    files = {path.relative_to(copy).as_posix() for path in copy.glob("tests/test_*.py")} - programs
    first = files & {*map(test_file, (path.stem, path.parent.name))}
    interpreted = [*map(test_file, INTERPRETED), "-m", "triton"] if "gpu" in path.name else []
    for tests in interpreted, sorted(first), ["tests/distributed"], sorted(files - first):
        if tests and (test := failing_test(tests, copy)):
            if test.startswith("tests/") and failing_test([test], ROOT):
                sys.exit(f"{test} fails without the mutation, too")
            return test
    return "not caught"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=40, help="(default %(default)s)")
    for number, mutation in enumerate(draw(parser.parse_args().seed), 1):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "copy")
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "runs"))
            test = caught_by(mutation, copy)
        lines = f"{mutation.file}:{mutation.line}: {test}", mutation.old.strip(), mutation.new.strip()
        print(f"{number:2}", "\n    ".join(lines), flush=True)


if __name__ == "__main__":
    main()
