"""Sets rows of text in columns, for what the tools print."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], total: Sequence[object] = ()) -> str:
    """The header, a line for each row, and one for the total, between rules. Columns are as wide as their longest text,
    whatever the terminal's width, so that nothing is cut."""
    texts = [tuple(map(str, row)) for row in (header, *rows, total) if row]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]
    rule = "  ".join("-" * width for width in widths)
    lines.insert(1, rule)
    if total:
        lines.insert(-1, rule)
    return "\n".join(lines)
