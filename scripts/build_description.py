"""Make the package's description from README.md. hatchling runs this file, see pyproject.toml.

README.md has relative links, which a clone needs and the package index cannot resolve. This hook makes links and
pictures absolute and adds badges below the title, provided that pyproject.toml sets Repository and Documentation in
[project.urls]. Otherwise the description is README.md.
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
    """Return README.md with absolute links: to pages of the documentation, and to files of this version's tag."""
    if not {"Repository", "Documentation"} <= urls.keys():
        return readme
    addresses = {name: address.rstrip("/") for name, address in urls.items()}

    def absolute(link: re.Match[str]) -> str:
        start, target = link.groups()
        if guide := GUIDE.fullmatch(target):
            return f"{start}{addresses['Documentation']}/{guide[1]}.html{guide[2] or ''})"
        kind = "raw" if start.startswith("!") else "blob"
        return f"{start}{addresses['Repository']}/{kind}/v{version}/{target})"

    title, text = RELATIVE.sub(absolute, readme).split("\n", 1)
    badges = "\n".join(BADGES).format(**addresses)
    return f"{title}\n\n{badges}\n{text}"


class DescriptionHook(MetadataHookInterface):
    """Sets `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description. hatchling calls this when it reads pyproject.toml."""
        text = Path(self.root, "README.md").read_text()
        text = description(text, metadata.get("urls", {}), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
