"""Make the package's description from README.md. hatchling runs this file, see pyproject.toml.

README.md has relative links, which the package index cannot resolve. If pyproject.toml has Repository and Documentation
in [project.urls], the description has absolute links, and badges below the title. Otherwise it is README.md.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?\[[^]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")  # [text](target) and ![text](target)
GUIDE = re.compile(r"docs/(\w+)\.md(#.*)?")
BADGES = (
    "[![tests]({Repository}/actions/workflows/tests.yml/badge.svg)]({Repository}/actions/workflows/tests.yml)",
    "[![version](https://img.shields.io/pypi/v/syncbn)](https://pypi.org/project/syncbn/)",
    "[![documentation]({Repository}/actions/workflows/docs.yml/badge.svg)]({Documentation})",
    "[![Python](https://img.shields.io/pypi/pyversions/syncbn)](https://pypi.org/project/syncbn/)",
)


def description(readme: str, urls: dict[str, str], version: str) -> str:
    """Return README.md with links to the pages of the documentation, and to the files of this version's tag."""
    if not {"Repository", "Documentation"} <= urls.keys():
        return readme
    addresses = {name: address.rstrip("/") for name, address in urls.items()}

    def absolute(link: re.Match[str]) -> str:
        start, target = link.groups()
        guide = GUIDE.fullmatch(target)
        if guide:
            return f"{start}{addresses['Documentation']}/{guide[1]}.html{guide[2] or ''})"
        kind = "raw" if start.startswith("!") else "blob"
        return f"{start}{addresses['Repository']}/{kind}/v{version}/{target})"

    title, text = RELATIVE.sub(absolute, readme).split("\n", 1)
    badges = "\n".join(BADGES).format(**addresses)
    return f"{title}\n\n{badges}\n{text}"


class DescriptionHook(MetadataHookInterface):
    """Sets the field `readme` of the metadata when hatchling reads pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text()
        text = description(text, metadata.get("urls", {}), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
