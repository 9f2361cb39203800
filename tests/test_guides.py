"""Tests that the pages describe the whole API, that their links and names exist, and that a test runs their code."""

import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from urllib.parse import unquote

import pytest
from guides import BLOCK, ROOT, python_blocks

import syncbn

PAGES = [ROOT / "README.md", ROOT / "examples/README.md", ROOT / ".github/CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
API_PAGE = (ROOT / "docs/api.md").read_text()
API_NAME = re.compile(r"^syncbn\.([\w.]+)\(", re.MULTILINE)


def api_entry(name: str) -> str:
    """Return the signature of a public name, without annotations, and the first paragraph of its docstring."""
    value = pkgutil.resolve_name(f"syncbn.{name}")
    parameters = inspect.signature(value).parameters.values()
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in parameters if parameter.name != "self"]
    signature = str(inspect.Signature(parameters))
    if name in ("SyncBatchNorm1d", "SyncBatchNorm2d", "SyncBatchNorm3d"):
        signature = "(...)"  # the same as SyncBatchNorm's
    lines = textwrap.wrap(f"syncbn.{name}{signature}", 120, subsequent_indent="        ")
    summary = inspect.getdoc(value).split("\n\n")[0]
    return "\n".join([*lines, *textwrap.wrap(summary, 120, initial_indent="    ", subsequent_indent="    "), ""])


def test_the_api_page_has_signatures_and_summaries() -> None:
    for language, block in BLOCK.findall(API_PAGE):
        if language == "text":
            assert block == "".join(api_entry(name) for name in API_NAME.findall(block))


def test_the_api_page_has_each_public_name() -> None:
    public = {name for name, value in vars(syncbn).items() if not name.startswith("_") and not inspect.ismodule(value)}
    for module in (syncbn.functional, syncbn.testing):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                public.add(f"{module.__name__}.{name}".removeprefix("syncbn."))
    internal = {"testing.differences", "testing.local_layers"}  # functions that only syncbn calls
    listed = {*API_NAME.findall(API_PAGE)}
    assert public - internal <= listed
    in_sphinx = {*re.findall(r"\w+", API_PAGE.split("```{eval-rst}\n")[1])}  # Sphinx adds docstrings of these names.
    assert {name.split(".")[-1] for name in listed} - in_sphinx == {"forward"}  # Sphinx lists it with its class.


def test_contributing_names_every_file_of_the_package() -> None:
    page, package = (ROOT / ".github/CONTRIBUTING.md").read_text(), ROOT / "syncbn"
    files = [file for file in package.rglob("*.*") if file.suffix in (".py", ".cpp", ".h") and file.stem != "__init__"]
    names = [file.relative_to(package).as_posix() for file in files]
    assert [name for name in names if f"`{name}`" not in page] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MyST (docs/conf.py) give to headings down to the third level."""
    headings = re.findall(r"^#{1,3} (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob(".github/workflows/*.yml")], ids=lambda page: page.name)
def test_links_and_names_exist(page: Path) -> None:
    """Each link leads to a file, heading or test. Each path and each dotted name of the package exists."""
    text = page.read_text()
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", BLOCK.sub("", text)):
        file, _, anchor = unquote(link).partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for test, file in re.findall(r"\[`(test_\w+)`]\((\S+)\)", text):
        assert f"\ndef {test}(" in (page.parent / file).read_text(), test
    # Paths below the root of the repository, such as tests/voting.py.
    paths = re.findall(r"(?<![\w/.-])(?:scripts|tests|examples|docs|syncbn|\.github|\.ci)/[\w/.-]*\w", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    names = set(re.findall(r"(?<![\w/.-])syncbn(?:\.\w+)+", text))
    for name in names - {"syncbn.forward", "syncbn.backward"}:  # ranges of the profiler
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cells_of_tables_are_short(page: Path) -> None:
    """A longer cell is text: it belongs above or below its table. The targets of links do not count."""
    rows = re.findall(r"^\|(.*)\|$", re.sub(r"\]\([^)]*\)", "]", page.read_text()), re.MULTILINE)
    assert [cell for row in rows for cell in row.split("|") if len(cell.strip()) > 200] == []


# Blocks that no run_block or code_block names: the beginning of a line, and what runs the block or its parts.
RUN_ELSEWHERE = {
    "mesh = init_device_mesh": "eight GPUs; tests/distributed/test_wrappers.py has its pieces",
    "graph = torch.cuda.CUDAGraph()": "a GPU; tests/test_gpu.py captures a step",
    "class Trainer(DetectionTrainer)": "nothing: ultralytics starts ranks on GPUs only",
    "def configure_model(self)": "tests/distributed/test_recipes.py runs both blocks",
    "def test_trains_as_one": "tests/test_testing.py calls the function of the block",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_is_run_by_a_test(page: Path) -> None:
    """A test calls `run_block` or `code_block` with the page and the beginning of a line. test_examples.py runs
    whole programs, which create a process group."""
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    # The beginnings of lines in calls such as run_block("deploy.md", "class Tracer").
    beginnings = [*re.findall(rf'_block\(\s*"{page.name}", "(.*?)"', tests), *RUN_ELSEWHERE]
    is_run = re.compile(f"^ *({'|'.join(map(re.escape, beginnings))})|init_process_group\\(", re.MULTILINE)
    for code in python_blocks(page):
        compile(code, page.name, "exec")
        assert is_run.search(code), code


def test_the_package_prints_each_message_that_the_guide_explains() -> None:
    guide = (ROOT / "docs/when_ranks_disagree.md").read_text()
    section = guide[guide.index("### Messages of syncbn") : guide.index("## What syncbn reports")]
    messages = re.findall(r"`(.*?)`", "\n".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    assert len(messages) > 20
    source = "\n".join(file.read_text() for file in (ROOT / "syncbn").rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # Python joins adjacent strings.
    for message in messages:
        # "..." stands for a value. The code may add "syncbn: " and the other two beginnings at run time.
        for text in re.split(r"\.\.\.|^syncbn: |^running statistics are |^in ", message):
            assert text.strip(" ().") in source, message
