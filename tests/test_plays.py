"""Plays as texts by role: what is said, and nothing else."""

from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from simulations.plays import main, read_roles

PLAY = r"""# The Storm

## ACT I

### SCENE I. A ship.

_Enter Master and
a Boatswain_

**Master**  
_\[Aside]_  
Good, speak to the mariners:  
bestir, \--bestir.

_Exit_

Yet _\[To him]_ hear.

**BOATSWAIN**  
[Within]_  
Heigh, my hearts!

*Alarum, and
a cry.*

### SCENE II. The same.

Nobody says this.

**MASTER**  
Fall to't.

**Master & Boatswain**  
We split!
"""


def test_roles_say_their_lines_by_scene_without_directions() -> None:
    assert read_roles(PLAY) == {
        "master": {3: "Good, speak to the mariners:\nbestir, --bestir.\nYet hear.\n", 4: "Fall to't.\n"},
        "boatswain": {3: "Heigh, my hearts!\n"},
        "master-boatswain": {4: "We split!\n"},
    }


@pytest.fixture
def run(tmp_path: Path):
    (tmp_path / "plays" / "comedies").mkdir(parents=True)
    (tmp_path / "plays" / "comedies" / "storm.md").write_text(PLAY)
    app = Typer()
    app.command()(main)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_roles_are_written_but_for_those_that_say_little(tmp_path, run):
    output = tmp_path / "roles"
    assert run(tmp_path, output, "--characters", 15).exit_code == 0
    files = {str(path.relative_to(output)): path.read_text() for path in output.rglob("*.txt")}
    assert sorted(files) == ["storm.boatswain/03.txt", "storm.master/03.txt", "storm.master/04.txt"]
    assert files["storm.master/04.txt"] == "Fall to't.\n"


@pytest.mark.parametrize(("source", "output", "problem"), [("", "plays", "exists"), ("plays", "new", "found none")])
def test_a_folder_without_plays_and_one_that_exists_are_refused(tmp_path, run, source, output, problem):
    result = run(tmp_path / source, tmp_path / output)
    assert result.exit_code == 2 and problem in result.output
