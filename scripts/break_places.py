"""Mutate forty random lines of a copy of the package, one at a time, and print the first failing test for each.

    python scripts/break_places.py                  half an hour or more
    python scripts/break_places.py --seed 41        other lines

While the package does not change, a seed draws the same mutations. Run the script before and after you change tests: if
the new tests are weaker, they catch fewer mutations. A mutation that is not caught shows a gap in the tests, unless the
mutated line gives the same results. (cosmic-ray and mutmut mutate no C++, cannot mutate a random sample of the lines,
and cannot run tests under torchrun.)
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
from run_tests import INTERPRETED, STARTS_PROGRAMS, TORCHRUN, to_paths

ROOT = Path(__file__).resolve().parent.parent
NUM_MUTATIONS = 40
SWAPS = {
    "==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+", "+=": "-=", "-=": "+=",
    "*": "/", "/": "*", "//": "*", "and": "or", "or": "and", "&&": "||", "||": "&&", "is": "is not", "is not": "is",
    "not in": "in", "True": "False", "False": "True",
}  # fmt: skip
Rule = tuple[str, Callable[[str], str]]  # regular expression of a line, function that returns the new text of group 1
SWAP: Rule = (r"(?<= )(is not|not in|is|and|or|[-+*/<>=!&|]+)(?= )", lambda text: SWAPS.get(text, text))
PYTHON_RULES: list[Rule] = [
    SWAP,
    (r"\b(True|False)\b", lambda text: SWAPS[text]),
    (r"(?<![\w.])(\d+)(?![\w.])", lambda text: str(int(text) + 1)),
    (r"^ +(?:el)?if (.*):$", lambda text: f"not ({text})"),
    (r"^ +([\w.]+\(.*\))$", lambda text: "pass"),  # a call whose result is not used
]
IGNORED = re.compile(r"\s*(@|def |class |import |from |raise |assert |template|static_assert|using |#)")
# Matches the name of a test in a line of `pytest -v`. After the name comes a word such as PASSED or FAILED, "Fatal
# Python error", or nothing if the test has not ended.
STARTED_TEST = re.compile(r"^tests/\S+::.*?(?= (?:[A-Z]{5,}|Fatal) | *$)", re.MULTILINE)


class Mutation(NamedTuple):
    file: str
    line: int
    old: str  # text of the line
    new: str


def mutations(path: Path) -> Iterator[Mutation]:
    """Yield every mutation of a file of Python or C++. Top-level lines and lines with a string have none."""
    rules, comment = (PYTHON_RULES, r"\s+# ") if path.suffix == ".py" else ([SWAP], r"\s*// ")
    is_docstring = False
    for number, old in enumerate(path.read_text().splitlines(), 1):
        if old.count('"""') == 1:
            is_docstring = not is_docstring
        code = re.split(comment, old)[0]
        if is_docstring or not code.startswith(" ") or '"' in code or IGNORED.match(code):
            continue
        for expression, replace in rules:
            for match in re.finditer(expression, code):
                start, end = match.span(1)
                new = old[:start] + replace(old[start:end]) + old[end:]
                if new != old:
                    yield Mutation(path.relative_to(ROOT).as_posix(), number, old, new)


def draw(seed: int) -> list[Mutation]:
    """Return random mutations of the package."""
    files = sorted(path for path in (ROOT / "syncbn").rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    return random.Random(seed).sample([mutation for path in files for mutation in mutations(path)], NUM_MUTATIONS)


def failing_test(tests: list[str], folder: Path) -> str:
    """Run pytest in the folder. Return the first test that fails, crashes or hangs, "an import" if no test starts, or
    "" if all pass. `tests` are arguments of pytest: files, tests and options."""
    pytest = "pytest -x -v -p no:cacheprovider --timeout=600 --timeout-method=thread"
    if tests[0].startswith("tests/distributed"):
        pytest = f"{TORCHRUN} 2 -m {pytest} -p voting"
    environment = os.environ | {"PYTHONPATH": f"{folder}:tests"}
    if "triton" in tests:  # The arguments contain "-m triton".
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", *pytest.split(), *tests]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace")
    if run.returncode == 0:
        return ""
    started = STARTED_TEST.findall(run.stdout)
    return started[-1] if started else "an import"


def caught_by(mutation: Mutation, copy: Path) -> str:
    """Apply the mutation to a copy of the project. Return the first failing test; the tests of the file run first."""
    path = copy / mutation.file
    lines = path.read_text().splitlines()
    lines[mutation.line - 1] = mutation.new
    path.write_text("\n".join(lines) + "\n")
    if path.suffix != ".py":
        try:
            build(copy, copy / LIBRARY)
        except subprocess.CalledProcessError:
            return "the compiler"
    tests = {file.relative_to(copy).as_posix() for file in copy.glob("tests/test_*.py")} - {*to_paths(STARTS_PROGRAMS)}
    tests_of_file = tests & {*to_paths([path.stem, path.parent.name])}  # A kernel's tests are in test_kernels.py.
    jobs = [sorted(tests_of_file), ["tests/distributed"], sorted(tests - tests_of_file)]
    if "gpu" in path.name:
        jobs.insert(0, [*to_paths(INTERPRETED), "-m", "triton"])
    for job in jobs:
        test = failing_test(job, copy) if job else ""
        if test.startswith("tests/") and failing_test([test], ROOT):
            sys.exit(f"{test} fails without the mutation, too")
        if test:
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
        print(f"{number:2} {mutation.file}:{mutation.line}: {test}")
        print(f"    {mutation.old.strip()}\n    {mutation.new.strip()}", flush=True)


if __name__ == "__main__":
    main()
