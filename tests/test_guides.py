"""Tests that the pages have each function of the API, each file of the package and only code that a test runs.

tests/test_readme.py follows the links of the pages and runs their programs.
"""

import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest
from guides import ROOT, code_block, python_blocks

import syncbn

GUIDES = sorted(ROOT.glob("docs/*.md"))
API_PAGE = (ROOT / "docs/api.md").read_text()
API = {
    "Models": "convert_syncbn_model revert_syncbn_model summary accumulate_running_stats create_syncbn_process_group",
    "Layers": "SyncBatchNorm SyncBatchNorm.forward SyncBatchNorm1d SyncBatchNorm2d SyncBatchNorm3d",
    "Functions": "functional.sync_batch_norm functional.batch_norm_backward functional.sync_batch_stats",
    "Tests and tools": "testing.assert_matches_full_batch testing.unequal kernels.available",
}
NAMES = {name for names in API.values() for name in names.split()}


def api_entry(name: str) -> str:
    """Return the signature of a public name, without annotations, and the first sentences of its docstring."""
    value = pkgutil.resolve_name(f"syncbn.{name}")
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(value).parameters.values()]
    parameters = [parameter for parameter in parameters if parameter.name != "self"]
    signature = "(...)" if re.fullmatch(r"SyncBatchNorm\dd", name) else str(inspect.Signature(parameters))
    lines = textwrap.wrap(f"syncbn.{name}{signature}", 120, subsequent_indent="        ")
    summary = inspect.getdoc(value).split("\n\n")[0]
    return "\n".join([*lines, *textwrap.wrap(summary, 120, initial_indent="    ", subsequent_indent="    "), ""])


@pytest.mark.parametrize("section", API)
def test_the_api_page_has_each_signature(section: str) -> None:
    (block,) = re.findall(rf"^## {section}\n\n```text\n(.*?)^```$", API_PAGE, re.MULTILINE | re.DOTALL)
    assert block == "".join(map(api_entry, API[section].split()))


def test_the_api_page_has_each_public_name() -> None:
    public = {name for name, value in vars(syncbn).items() if not name.startswith("_") and not inspect.ismodule(value)}
    for module in ("functional", "testing"):
        functions = inspect.getmembers(pkgutil.resolve_name(f"syncbn.{module}"), inspect.isfunction)
        own = [name for name, function in functions if function.__module__ == f"syncbn.{module}" and name[0] != "_"]
        public |= {f"{module}.{name}" for name in own}
    assert public - {"testing.differences", "testing.local_layers"} <= NAMES


def test_the_api_page_documents_each_name() -> None:
    """Sphinx takes the docstrings of the names that its directives list."""
    block = API_PAGE.split("```{eval-rst}\n")[1]
    listed = set(re.findall(r"autofunction:: syncbn\.(\S+)", block))
    for module, members in re.findall(r"automodule:: syncbn(\S*)\n   :members: ((?:.*,\n)*.*)\n", block):
        listed |= {f"{module}.{name}".lstrip(".") for name in re.split(r",\s+", members)}
    assert listed == NAMES - {"SyncBatchNorm.forward"}


def test_contributing_names_every_file_of_the_package() -> None:
    page, package = (ROOT / ".github/CONTRIBUTING.md").read_text(), ROOT / "syncbn"
    files = [file for file in package.rglob("*.*") if file.suffix in (".py", ".cpp", ".h") and file.stem != "__init__"]
    names = [file.relative_to(package).as_posix() for file in files]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.name)
def test_cells_of_tables_are_short(page: Path) -> None:
    """A longer cell is text: it belongs above or below its table. The targets of links do not count."""
    rows = re.findall(r"^\|(.*)\|$", re.sub(r"\]\([^)]*\)", "]", page.read_text()), re.MULTILINE)
    assert [cell for row in rows for cell in row.split("|") if len(cell.strip()) > 200] == []


WITHOUT_QUESTION = "index.md", "changelog.md", "faq.md"  # Questions are in the table, nowhere, or in the headings.


@pytest.mark.parametrize("page", [page for page in GUIDES if page.name not in WITHOUT_QUESTION], ids=lambda p: p.name)
def test_pages_begin_with_their_question(page: Path) -> None:
    title, paragraph = page.read_text().split("\n\n")[:2]
    assert title.startswith("# ")
    assert "?" in paragraph


# Blocks that no test of this machine can run: the beginning of a line, and what tries it.
TRIED_ELSEWHERE = {
    "def parallel(model)": "examples/train.py has it, which tests/test_readme.py runs",
    "mesh = init_device_mesh": "eight GPUs; tests/distributed/test_pipeline_schedules.py has its pieces",
    "graph = torch.cuda.CUDAGraph()": "a GPU; tests/test_gpu.py captures a step",
    "from opacus.validators": "scripts/libraries.py runs the block where Opacus is installed",
    "class Trainer(DetectionTrainer)": "ultralytics starts ranks on GPUs only",
    "def configure_model(self)": "tests/lightning_job.py",
    "def test_trains_as_one": "tests/test_testing.py calls the function of the block",
    "program = torch.export.export": "tests/test_deploy.py runs the section",
    "class MaskedBatchNorm1d": "tests/test_deploy.py runs the section",
}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_every_code_block_is_run_by_a_test(page: Path) -> None:
    """A test that names the page has the beginning of a line of the block; test_readme.py runs whole programs."""
    files = [file for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__)]
    texts = [text for text in (file.read_text() for file in files) if f'"{page.name}"' in text]
    beginnings = [*re.findall(r'"([^"\n]{5,})"', "\n".join(texts)), *TRIED_ELSEWHERE]
    is_run = re.compile(f"^ *({'|'.join(map(re.escape, beginnings))})|init_process_group\\(", re.MULTILINE)
    assert [code for code in python_blocks(page) if not is_run.search(code)] == []


def test_the_function_of_the_training_script_is_that_of_its_page() -> None:
    assert code_block("training_script.md", "def parallel") in (ROOT / "examples/train.py").read_text()


def test_the_package_prints_each_message_that_the_guide_explains() -> None:
    """A message in the source may consist of two texts around a value."""
    guide = (ROOT / "docs/when_ranks_disagree.md").read_text()
    section = guide[guide.index("### Messages of syncbn") : guide.index("## What syncbn reports")]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    source = "\n".join(file.read_text() for file in (ROOT / "syncbn").rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # Python joins such strings.
    assert len(cells) > 20
    for text in (part for cell in cells for message in re.findall("`(.*?)`", cell) for part in message.split("...")):
        words = text.strip(" ().").split()
        pairs = [(" ".join(words[:n]), " ".join(words[n:])) for n in range(1, len(words))]
        is_printed = " ".join(words) in source or any(f"{one} {{" in source and two in source for one, two in pairs)
        assert is_printed, text
