"""Catches a README.md or guide whose programs fail, whose links and names lead nowhere, or that says what is not so."""

import pkgutil
import re
import shlex
import shutil
import sys
import zipfile
from email import message_from_string
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from build_description import BADGES, description
from faults import FAULTS
from jobs import run, run_on_ranks
from readme_renderer import markdown

import syncbn
from syncbn.kernels import cpu

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDES = sorted((ROOT / "docs").glob("*.md"))
FIRST_GUIDE = ROOT / "docs" / "index.md"
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", ROOT / ".github" / "CONTRIBUTING.md", *GUIDES]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OF_PROFILER = {"syncbn.forward", "syncbn.backward"}  # names that are no objects


def blocks(text: str, language: str) -> list[str]:
    """What stands between ```language and ```."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def without_blocks(page: Path) -> str:
    """The text outside of ``` and ```."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them, and MyST down to the third level (docs/conf.py)."""
    headings = re.findall(r"^#{1,3} (.*)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_it_is_short_and_the_tutorial_has_its_program() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= 120
    assert len(README.encode()) <= 13_000
    assert blocks(README, "python")[0] in (ROOT / "docs" / "tutorial.md").read_text()


def test_links() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!http)([^)\s]+)\)", without_blocks(page)):
            file, _, anchor = unquote(link).partition("#")
            target = page.parent / file if file else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target), (page, link)


def test_names() -> None:
    """Those of files, from the root, and those in the package."""
    for page in PAGES + WORKFLOWS:
        text = page.read_text()
        files = re.findall(r"(?<![\w/.-])(?:scripts|tests|examples|docs|syncbn|\.github|\.ci)/[\w/.-]*\w", text)
        assert [file for file in files if not (ROOT / file).exists()] == [], page
        for name in set(re.findall(r"(?<![\w/.-])syncbn(?:\.\w+)+", text)) - OF_PROFILER:
            pkgutil.resolve_name(name)


def test_the_reference_has_all_that_is_public() -> None:
    reference = (ROOT / "docs" / "api.md").read_text()
    public = [name for name, value in vars(syncbn).items() if name[0] != "_" and callable(value)]
    assert [name for name in public if f":: syncbn.{name}\n" not in reference] == []


def test_each_report_names_its_test() -> None:
    """In items of - [pytorch#1](address). Problem. **Solved.** Remedy. Shown by [`test_name`](file)."""
    text = " ".join((ROOT / "docs" / "reports.md").read_text().split())
    verdict, rest = r"\*\*(?:Solved|Partly)\.\*\*", r"(?:(?!Shown by).)*"
    item = rf"- \[(\w+#\d+)]\((\S+)\)\. {rest} {verdict} {rest}Shown by \[`(\w+)`]\((\S+)\)\."
    items = re.findall(item, text)
    assert len(items) == text.count("Shown by [") == 18
    for report, address, test, file in items:
        assert address.endswith("/" + report.partition("#")[2])
        assert f"\ndef {test}(" in (ROOT / "docs" / file).read_text(), report


GUIDE_OF_TEXTS = (ROOT / "docs" / "when_ranks_disagree.md").read_text()


def test_the_table_of_faults() -> None:
    """It has a row for each, with what to do, and README.md says how many these are."""
    table = GUIDE_OF_TEXTS[GUIDE_OF_TEXTS.index("## A catalogue of faults") :]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", table, re.MULTILINE)
    assert rows == [("one rank", "what to do"), *((name, fault.remedy) for name, fault in FAULTS.items())]
    assert f"for {len(FAULTS)} faults" in README


def test_the_texts_that_are_explained() -> None:
    """syncbn says them, word by word; some are put together of two. (Those of torch, gloo and nccl were produced by
    hand.)"""
    start, end = (GUIDE_OF_TEXTS.index(text) for text in ("These are of syncbn", "## What syncbn reports"))
    first_cells = re.findall(r"^\| (`.*?) \|", GUIDE_OF_TEXTS[start:end], re.MULTILINE)
    quoted = [part for cell in first_cells for text in re.findall("`(.*?)`", cell) for part in text.split("...")]
    source = "\n".join(file.read_text() for file in (ROOT / "syncbn").rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # as Python joins strings

    def is_said(text: str) -> bool:
        words = text.split()
        pairs = [(" ".join(words[:n]), " ".join(words[n:])) for n in range(1, len(words))]
        return text in source or any(f"{first} {{" in source and second in source for first, second in pairs)

    assert [text for text in quoted if not is_said(text.strip(" ()."))] == []
    assert len(first_cells) > 20


def test_first_pages_say_whether_it_has_run_on_a_gpu() -> None:
    """As docs/gpu.md does; and there is no 1.0 before several have run it (docs/releasing.md)."""
    on_one = "has not run on several GPUs" in " ".join((ROOT / "docs" / "gpu.md").read_text().split())
    for page in (ROOT / "README.md", FIRST_GUIDE):
        first_paragraphs = " ".join(page.read_text()[:800].split())
        assert ("one H100" in first_paragraphs) == on_one, page
    assert syncbn.__version__.startswith("0.") or not on_one


def test_programs_that_make_a_process_group_destroy_it() -> None:
    """Else they may abort at their end, see docs/rules.md."""
    files = [ROOT / "README.md", *GUIDES, *(ROOT / "examples").rglob("*.py")]
    programs = [program for file in files if file.suffix == ".md" for program in blocks(file.read_text(), "python")]
    programs += [file.read_text() for file in files if file.suffix == ".py"]
    made = [program for program in programs if "dist.init_process_group(" in program]
    assert len(made) >= 6
    assert all("dist.destroy_process_group()" in program for program in made)


def test_versions() -> None:
    """Citations have the package's; scripts/matrix.sh, tests.yml and pyproject.toml agree on Python's and torch's."""
    assert f"version = {{{syncbn.__version__}}}," in (ROOT / "docs" / "citing.md").read_text()
    assert f"\nversion: {syncbn.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    matrix = re.findall(r"^ +(?:python|torch): \[(.*)\]$", "\n".join(map(Path.read_text, WORKFLOWS)), re.MULTILINE)
    pythons, torches = (re.findall(r"[\d.]+", versions) for versions in matrix)
    script, project = (ROOT / "scripts" / "matrix.sh").read_text(), (ROOT / "pyproject.toml").read_text()
    assert f"set -- {' '.join(torches)}\n" in script
    assert f"for python in python{' python'.join(pythons)}" in script
    assert f'requires-python = ">={pythons[0]}"' in project
    assert re.findall(r'"Programming Language :: Python :: (3\..*)"', project) == pythons
    assert f'"torch>={torches[0].removesuffix(".0")}' in project


def test_the_training_script_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    """docs/training_script.md, on 2 ranks: two epochs in one run, and in two."""
    (script := tmp_path / "train.py").write_text(
        blocks((ROOT / "docs" / "training_script.md").read_text(), "python")[0]
    )
    once, twice = tmp_path / "once.pt", tmp_path / "twice.pt"
    whole = run_on_ranks(2, script, "--epochs", 2, "--checkpoint", once)
    run_on_ranks(2, script, "--epochs", 1, "--checkpoint", twice)
    rest = run_on_ranks(2, script, "--epochs", 2, "--checkpoint", twice)
    assert rest == whole[whole.index("epoch 2") :]
    assert "test: " in rest
    expected, actual = (torch.load(file, weights_only=True) for file in (once, twice))
    torch.testing.assert_close(actual["model"], expected["model"], rtol=0, atol=0)


# Blocks that make a process group are complete, others are parts of a program.
PROGRAMS = {
    f"{page.name}-{index}": block
    for page in PAGES
    if page.name not in ("tutorial.md", "training_script.md")  # whose programs are that of README.md, and tested above
    for index, block in enumerate(blocks(page.read_text(), "python"))
    if "init_process_group(" in block
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_on_two_ranks(program: str, tmp_path: Path) -> None:
    (script := tmp_path / "program.py").write_text(program)
    run_on_ranks(2, script)


URLS = {"Repository": "https://example.org/syncbn", "Documentation": "https://guides.example.org/syncbn/"}
DESCRIPTION = description(README, URLS, syncbn.__version__)


def test_the_description_on_the_package_index_has_no_dead_link() -> None:
    """With the setting of the first release each link of README.md, which test_links follows, has an address."""
    repository, documentation = URLS["Repository"], URLS["Documentation"]
    link = re.compile(r'(?:href|src)="([^"]*)"')
    targets, in_readme = (link.findall(markdown.render(text)) for text in (DESCRIPTION, README))  # as the index does
    assert len(targets) == len(in_readme) + 2 * len(BADGES)
    assert all(target.startswith(("#user-content-", "https://")) for target in targets)
    workflows = {target.removesuffix("/badge.svg") for target in targets if "/actions/workflows/" in target}
    assert workflows <= {f"{repository}/actions/workflows/{file.name}" for file in WORKFLOWS}
    text = re.sub(rf"{repository}/(?:blob|raw)/v{re.escape(syncbn.__version__)}/", "", DESCRIPTION)
    text = re.sub(rf"{documentation}(\w+)\.html", r"docs/\1.md", text)
    badges = "\n".join(BADGES).format(Repository=repository, Documentation=documentation.rstrip("/"))
    assert text.replace(f"\n{badges}\n", "", 1) == README
    assert description(README, {}, syncbn.__version__) == README


def test_installs(tmp_path: Path) -> None:
    """`pip install .` and `python -m syncbn info`, of a copy, in it and elsewhere: both find the kernels. The compiler
    copies the library that is here, which makes it fast. The package has the description for the index. An editable
    install offers the package alone, and not `import tests`, which may be meant to be the user's."""
    ignored = shutil.ignore_patterns(".*", "build", "runs", "*.so", "__pycache__")
    copy, installed = shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored), tmp_path / "installed"
    with (copy / "pyproject.toml").open("a") as project:
        project.write("[project.urls]\n" + "".join(f'{name} = "{address}"\n' for name, address in URLS.items()))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", installed]
    copies = f"import shutil, sys; shutil.copy({str(cpu.FILE)!r}, sys.argv[sys.argv.index('-o') + 1])"
    run(sys.executable, "-m", "pip", "install", *options, copy, CXX=shlex.join([sys.executable, "-c", copies]))
    for folder, package in ((tmp_path, installed), (copy, copy)):
        said = run(sys.executable, "-m", "syncbn", "info", folder=folder, PYTHONPATH=str(installed))
        assert f"{syncbn.__version__}, {package / 'syncbn'}" in said
        assert ("cpu: C++" in said) == cpu.FILE.exists(), said
    (metadata,) = (message_from_string(file.read_text()) for file in installed.glob("syncbn-*.dist-info/METADATA"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == DESCRIPTION
    build = "import hatchling.build; print(hatchling.build.build_editable('.'))"  # as pip does
    output = run(sys.executable, "-c", build, folder=copy, CXX="false")
    with zipfile.ZipFile(copy / output.strip()) as wheel:
        on_path = Path(wheel.read("_syncbn.pth").decode())
    assert [file.name for file in on_path.iterdir()] == ["syncbn"]
    assert (on_path / "syncbn" / "__init__.py").samefile(copy / "syncbn" / "__init__.py")


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="scripts/demo.sh would make its environment first")
def test_demo(tmp_path: Path) -> None:
    output = run(ROOT / "scripts" / "demo.sh", "--steps", 5, "--width", 4, "--test-scenes", 4, "--output", tmp_path)
    assert (tmp_path / "predictions.png").exists()
    assert output.splitlines()[-1].startswith("Shown, at seed 0: ")
