"""Configures Sphinx: the guides in this folder, and the API from the docstrings. See scripts/docs.sh."""

import syncbn

project = "syncbn"
author = "the syncbn authors"
release = syncbn.__version__
extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton",
]  # fmt: skip
myst_heading_anchors = 3  # of which a link may name one, as on GitHub
html_theme = "furo"
html_title = f"syncbn {release}"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["pages.css"]
copybutton_prompt_text = ">>> "
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"  # not those that a derived class inherits
autodoc_mock_imports = ["lightning", "pytorch_lightning"]


def _mark_indented_blocks(app, what, name, obj, options, lines):
    """Formulas and code, which docstrings here only indent, are literal blocks."""
    for index in range(len(lines) - 1, 0, -1):
        previous = next((line for line in reversed(lines[:index]) if line), "")
        if lines[index].startswith("    ") and not lines[index - 1] and not previous.startswith(" "):
            lines[index:index] = ["::", ""]


def setup(app):
    app.connect("autodoc-process-docstring", _mark_indented_blocks, priority=0)  # before napoleon
