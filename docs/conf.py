"""Configures Sphinx: the guides in this folder, and the API from the docstrings. See scripts/docs.sh."""

import tomllib
from pathlib import Path

import syncbn

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
ADDRESSES = PROJECT.get("urls", {})  # none before the first release, see .github/CONTRIBUTING.md
BLUE, LIGHT_BLUE = "#0072b2", "#56b4e9"  # BLUE is for white pages, as in the plots of examples/

project = "syncbn"
author = "the syncbn authors"
release = syncbn.__version__
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton",
]  # fmt: skip
myst_enable_extensions = ["attrs_block"]  # {.doors} gives the list below it a class of static/pages.css
myst_heading_anchors = 3  # Links may name headings down to this level, as on GitHub.
html_theme = "furo"
html_title = f"syncbn {release}"
html_baseurl = ADDRESSES.get("Documentation", "")
html_favicon = "static/mark.svg"
ACCENTED = ("color-brand-primary", "color-brand-content", "color-brand-visited")
html_theme_options = {
    "light_logo": "mark.svg",
    "dark_logo": "mark_dark.svg",
    "light_css_variables": dict.fromkeys(ACCENTED, BLUE),
    "dark_css_variables": dict.fromkeys(ACCENTED, LIGHT_BLUE),
}
if "Repository" in ADDRESSES:
    html_theme_options |= {"source_repository": ADDRESSES["Repository"], "source_directory": "docs/"}
    html_theme_options["source_branch"] = "main"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["pages.css"]
copybutton_prompt_text = ">>> "
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"  # not those that a derived class inherits


def _mark_indented_blocks(app, what, name, obj, options, lines):
    """Formulas and code, which docstrings here only indent, are literal blocks."""
    for index in range(len(lines) - 1, 0, -1):
        previous = next((line for line in reversed(lines[:index]) if line), "")
        if lines[index].startswith("    ") and not lines[index - 1] and not previous.startswith(" "):
            lines[index:index] = ["::", ""]


def setup(app):
    app.connect("autodoc-process-docstring", _mark_indented_blocks, priority=0)  # before napoleon
