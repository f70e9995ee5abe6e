"""The command line: what rotfed knows, whether a model is safe to align, and one model made of several."""

from typing import Annotated

import typer

import rotfed
from rotfed.cli.barrier import barrier as barrier_command
from rotfed.cli.check import check as check_command
from rotfed.cli.check import specs as specs_command
from rotfed.cli.merge import merge as merge_command

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_show_locals=False
)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Put transformers into one common frame before they are averaged."""
    if version:
        typer.echo(f"rotfed {rotfed.__version__}")
        raise typer.Exit()


for command in (check_command, specs_command, merge_command, barrier_command):
    app.command()(command)
