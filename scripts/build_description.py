"""Makes the package's description from README.md. hatchling runs it, see pyproject.toml.

README.md has relative links, as a clone needs them. The package index has no files beside the description: if
pyproject.toml sets Repository and Documentation under [project.urls], links and pictures become absolute, and badges
stand below the title. Without these addresses the description is README.md as it is.
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
    """The text of README.md with absolute targets: pages of the documentation, and files of the tag of this version."""
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
        """Called by hatchling when it reads pyproject.toml; it knows the version by then."""
        text = Path(self.root, "README.md").read_text()
        text = description(text, metadata.get("urls", {}), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
