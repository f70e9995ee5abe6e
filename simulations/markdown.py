"""Tables in Markdown, for the pages of results."""

from collections.abc import Sequence


def table_row(cells: Sequence[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"
