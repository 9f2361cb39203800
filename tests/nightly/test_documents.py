"""Tests that syncbn prints the messages that the guides explain, and that the package index gets no dead link."""

import re
from pathlib import Path

from build_description import BADGES, description
from readme_renderer import markdown

ROOT = Path(__file__).parents[2]
URLS = {"Repository": "https://example.org/syncbn", "Documentation": "https://guides.example.org/syncbn/"}


def test_the_package_has_the_texts_of_each_explained_message() -> None:
    """A message in the source may consist of two texts around a value."""
    guide = (ROOT / "docs" / "when_ranks_disagree.md").read_text()
    section = guide[guide.index("### Messages of syncbn") : guide.index("## What syncbn reports")]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    source = "\n".join(file.read_text() for file in (ROOT / "syncbn").rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # as Python joins strings
    assert len(cells) > 20
    for text in (
        part for cell in cells for quote_path in re.findall("`(.*?)`", cell) for part in quote_path.split("...")
    ):
        words = text.strip(" ().").split()
        pairs = [(" ".join(words[:n]), " ".join(words[n:])) for n in range(1, len(words))]
        is_printed = " ".join(words) in source or any(f"{one} {{" in source and two in source for one, two in pairs)
        assert is_printed, text


def test_the_description_on_the_package_index_has_no_dead_link() -> None:
    """With the setting of the first release each link of README.md, which test_readme.py follows, has an address."""
    readme = (ROOT / "README.md").read_text()
    html = [markdown.render(text) for text in (description(readme, URLS, "0.1"), readme)]  # as the index does
    targets, in_readme = (re.findall(r'(?:href|src)="([^"]*)"', text) for text in html)
    assert len(targets) == len(in_readme) + 2 * len(BADGES)
    assert all(target.startswith(("#user-content-", "https://")) for target in targets)
    assert description(readme, {}, "0.1") == readme
