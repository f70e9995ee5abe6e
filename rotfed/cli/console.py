"""What all commands share: what they print with, how they refuse, and the options that several have."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console

from rotfed.checkpoints.folder import quiet_transformers
from rotfed.errors import AlignmentError, ConvergenceWarning, RotfedError
from rotfed.nearest import Nearest

Residual = Annotated[
    bool | None,
    typer.Option("--residual/--no-residual", help="Align the residual stream, too; by default up to 150M parameters."),
]
Layers = Annotated[str, typer.Option(help="Numbers of the layers to align, such as 0,1; all by default.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Examples that the model takes at once.")]
DATA = "A safetensors file of examples: the arguments of the model's forward pass, and labels."

_Number = TypeVar("_Number", int, float)


def open_console(stderr: bool = False) -> Console:
    """A console that prints names as they are: a bracket in one is no markup, a colon no emoji."""
    return Console(stderr=stderr, soft_wrap=True, highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn a RotfedError, or a disk's, into one sentence and exit code 1."""
    quiet_transformers()
    try:
        yield
    except RotfedError as refusal:
        refuse(refusal)
    except OSError as error:
        refuse(RotfedError(f"{error.filename or 'disk'}: expected to read and write there, found: {error.strerror}"))
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        reason = str(error).partition("\n")[0]
        refuse(RotfedError(f"GPU: expected to run the model, found: {reason}; set CUDA_VISIBLE_DEVICES= for the CPU"))


@contextlib.contextmanager
def notes(console: Console) -> Iterator[None]:
    """Print warnings as lines of their own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        yield
    for warning in caught:
        console.print(f"note: {warning.message}")


def refuse(refusal: RotfedError, nearest: Nearest | None = None) -> None:
    """Print one sentence on the error stream, what comes closest below it, and exit with 1."""
    console = open_console(stderr=True)
    console.print(f"refused: {refusal}")
    if nearest is not None:
        total = len(nearest.matched) + len(nearest.unmatched)
        console.print(
            f"closest: specs/{nearest.family}.toml ({', '.join(nearest.model_types)}) has "
            f"{len(nearest.matched)} of the model's {total} kinds of parameter, by name"
        )
        for title, lines in [
            ("a new file needs an axis string for", [f'"{n}", shape {s}' for n, s in nearest.unmatched.items()]),
            (f"not found here of specs/{nearest.family}.toml", list(nearest.lacking)),
        ]:
            if lines:
                console.print("\n  ".join([f"{title}:", *lines]))
        console.print("see docs/new-architecture.md for how to write the file")
    raise typer.Exit(1)


def numbers(option: str, text: str, kind: Callable[[str], _Number]) -> list[_Number] | None:
    """The numbers of an option such as 2,1,1; None for an empty one."""
    try:
        return [kind(part) for part in text.split(",")] if text else None
    except ValueError as error:
        raise AlignmentError(f"{option}: expected numbers with commas between, such as 2,1, found {text!r}") from error
