"""Markdown, for the pages of results and the README."""

from collections.abc import Sequence


def table_row(cells: Sequence[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def between(readme: str, marks: tuple[str, str], inside: str) -> str:
    """The README with what is between two marks renewed. Raises ValueError where the marks are missing."""
    before, begins, rest = readme.partition(marks[0])
    _, ends, after = rest.partition(marks[1])
    if not begins or not ends:
        raise ValueError(f"README.md: expected the lines {marks[0]!r} and {marks[1]!r} around the table; put them back")
    return f"{before}{begins}\n{inside}\n{ends}{after}"
