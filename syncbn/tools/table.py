"""Sets rows of text in columns, for what the tools print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], total: Sequence[object]) -> str:
    """The header, a line for each row, and one for the total between rules; columns as wide as what they hold."""
    texts = [tuple(map(str, row)) for row in (header, *rows, total)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join((lines[0], rule, *lines[1:-1], rule, lines[-1]))
