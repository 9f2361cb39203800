"""Catches a page that lacks a function of the API, a file of the package or a test of its code, or that grows too long.

tests/test_readme.py follows the links of the pages, and runs the complete programs.
"""

import inspect
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest
from guides import code_block, python_blocks

import syncbn

ROOT = Path(__file__).parents[1]
GUIDES = sorted(ROOT.glob("docs/*.md"))
API = {
    "Models": [
        "convert_syncbn_model", "revert_syncbn_model", "summary", "accumulate_running_stats",
        "create_syncbn_process_group",
    ],
    "Layers": ["SyncBatchNorm", "SyncBatchNorm.forward", "SyncBatchNorm1d", "SyncBatchNorm2d", "SyncBatchNorm3d"],
    "Functions": ["functional.sync_batch_norm", "functional.batch_norm_backward", "functional.sync_batch_stats"],
    "Tests and tools": ["testing.assert_matches_full_batch", "testing.unequal", "kernels.available"],
}  # fmt: skip


def parameters(name: str) -> str:
    """Return the signature without annotations, which stand in the docstring."""
    signature = inspect.signature(pkgutil.resolve_name(f"syncbn.{name}"))
    kept = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    kept = [parameter for parameter in kept if parameter.name != "self"]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def api_entry(name: str) -> str:
    """Return the signature of a public name and the first sentences of its docstring, as docs/api.md has them."""
    is_numbered = name.startswith("SyncBatchNorm") and name[-1] == "d" and name[-2].isdigit()
    signature = "(...)" if is_numbered else parameters(name)
    summary = inspect.getdoc(pkgutil.resolve_name(f"syncbn.{name}")).split("\n\n")[0]
    lines = textwrap.wrap(f"syncbn.{name}{signature}", 120, subsequent_indent="        ")
    return "\n".join([*lines, *textwrap.wrap(summary, 120, initial_indent="    ", subsequent_indent="    ")])


@pytest.mark.parametrize("section", API)
def test_the_api_page_has_each_signature(section: str) -> None:
    page = (ROOT / "docs/api.md").read_text()
    (block,) = re.findall(rf"^## {section}\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block == "".join(f"{api_entry(name)}\n" for name in API[section])


def test_the_api_page_has_each_public_name() -> None:
    public = {name for name, value in vars(syncbn).items() if not name.startswith("_") and not inspect.ismodule(value)}
    public |= {f"functional.{name}" for name in public_functions("functional")}
    public |= {f"testing.{name}" for name in public_functions("testing")} - {
        "testing.differences",
        "testing.local_layers",
    }
    assert public <= {name for names in API.values() for name in names}


def public_functions(module: str) -> list[str]:
    """Return the names of the functions that a module of the package defines for users."""
    of_module = vars(pkgutil.resolve_name(f"syncbn.{module}"))
    functions = {name: value for name, value in of_module.items() if inspect.isfunction(value)}
    return [name for name, value in functions.items() if value.__module__ == f"syncbn.{module}" and name[0] != "_"]


def test_the_api_page_documents_each_name() -> None:
    """Sphinx takes the docstrings of the names that its directives list."""
    block = (ROOT / "docs/api.md").read_text().split("```{eval-rst}\n")[1]
    listed = set(re.findall(r"autofunction:: syncbn\.(\S+)", block))
    for module, members in re.findall(r"automodule:: syncbn(\S*)\n   :members: ((?:.*,\n)*.*)\n", block):
        listed |= {f"{module}.{name}".lstrip(".") for name in re.split(r",\s+", members)}
    assert listed == {name for names in API.values() for name in names} - {"SyncBatchNorm.forward"}


def test_contributing_names_every_file_of_the_package() -> None:
    page, package = (ROOT / ".github/CONTRIBUTING.md").read_text(), ROOT / "syncbn"
    files = [file for file in package.rglob("*.*") if file.suffix in (".py", ".cpp", ".h") and file.stem != "__init__"]
    names = [file.relative_to(package).as_posix() for file in files]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=lambda page: page.name)
def test_cells_of_tables_are_short(page: Path) -> None:
    """A cell of more than 200 characters is text: it belongs above or below its table."""
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text())  # the target of a link is not read
    rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    assert [cell for row in rows for cell in row.split("|") if len(cell.strip()) > 200] == []


WITHOUT_QUESTION = "index.md", "changelog.md", "faq.md"  # the questions are in the table, nowhere, or in the headings


@pytest.mark.parametrize(
    "page", [page for page in GUIDES if page.name not in WITHOUT_QUESTION], ids=lambda page: page.name
)
def test_pages_begin_with_their_question(page: Path) -> None:
    title, paragraph = page.read_text().split("\n\n")[:2]
    assert title.startswith("# ")
    assert "?" in paragraph


# Blocks that no test of this machine can run: the beginning of a line, and what tries it.
TRIED_ELSEWHERE = {
    "def parallel(model)": "examples/train.py has it, which tests/test_readme.py runs",
    "total = torch.tensor(float(len(labels)), device=labels.device)": "tests/distributed/test_ddp.py has a copy",
    "mesh = init_device_mesh": "eight GPUs; tests/distributed/test_pipeline_schedules.py has its pieces",
    "graph = torch.cuda.CUDAGraph()": "a GPU; tests/test_gpu.py captures a step",
    "from opacus.validators": "scripts/libraries.py runs the block where Opacus is installed",
    "class Trainer(DetectionTrainer)": "ultralytics starts ranks on GPUs only",
    "def configure_model(self)": "tests/lightning_job.py",
    "class Tracer(torch.fx.Tracer)": "tests/test_tracing.py has a copy",
    "def test_trains_as_one": "tests/test_testing.py calls the function of the block",
    "program = torch.export.export": "tests/test_deploy.py runs the section",
    "class MaskedBatchNorm1d": "tests/test_deploy.py runs the section",
}


def blocks_without_a_test() -> list[str]:
    """Return the first lines of code blocks of the guides of which no test has the beginning of a line."""
    texts = [file.read_text() for file in (ROOT / "tests").rglob("*.py") if file.name != "test_guides.py"]
    texts.append((ROOT / "tests/distributed/test_guides.py").read_text())
    missing = []
    for page in GUIDES:
        literals = {
            literal for text in texts if f'"{page.name}"' in text for literal in re.findall(r'"([^"\n]{5,})"', text)
        }
        for code in python_blocks(page):
            lines = [line.strip() for line in code.splitlines()]
            names = [line.split("(")[0].split(" ")[1] for line in lines if line.startswith(("class ", "def "))]
            is_run = any(line.startswith(literal) for line in lines for literal in [*literals, *TRIED_ELSEWHERE])
            if not (is_run or literals & {*names} or "init_process_group(" in code):
                missing.append(f"{page.name}: {lines[0]}")
    return missing


def test_the_function_of_the_training_script_is_that_of_its_page() -> None:
    assert code_block("training_script.md", "def parallel") in (ROOT / "examples/train.py").read_text()


def test_every_code_block_is_run_by_a_test() -> None:
    assert blocks_without_a_test() == []
