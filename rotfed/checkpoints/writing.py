"""New model directories, written in one step or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from rotfed.checkpoints.weights import ADAPTER_CONFIG, SHARD_SIZE, WEIGHTS, ShardWriter
from rotfed.errors import AlignmentError

# What a directory needs beside its weights: configurations, tokenizers, processors, chat templates.
_COPIED = {".json", ".txt", ".model", ".jinja", ".spm", ".tiktoken"}
_OF_THE_TRAINING = ("*.index.json", "trainer_state.json", "*_results.json", ADAPTER_CONFIG)
_TEMPLATES = "additional_chat_templates"


def check_target(out: Path, models: Sequence[Path], force: bool, config: str = "config.json") -> None:
    """Raise AlignmentError where a new model directory cannot take the place of what is at `out`.

    `config` is the file by which a model directory that may be replaced is known.
    """
    if any(out.resolve().is_relative_to(model.resolve()) for model in models):
        raise AlignmentError(f"{out}: expected a directory of its own, found one of the models; write elsewhere")
    if Path.cwd().is_relative_to(out.resolve()):
        raise AlignmentError(f"{out}: expected a directory of its own, found the one to work in; write elsewhere")
    if not out.exists():
        return
    if not out.is_dir():
        raise AlignmentError(f"{out}: expected a directory to write, found a file; write elsewhere")
    inside = sorted(path.name for path in out.iterdir())
    if inside and not force:
        raise AlignmentError(
            f"{out}: expected no such directory, or an empty one, found {inside[0]} in it; add --force"
        )
    others = [
        path.name
        for path in sorted(out.iterdir())
        if path.name != _TEMPLATES and (path.is_dir() or path.suffix not in {*_COPIED, ".safetensors"})
    ]
    if inside and (config not in inside or others):
        found = f"{others[0]} in it" if others else f"no {config} in it"
        raise AlignmentError(f"{out}: expected a model directory to replace, found {found}; write elsewhere")


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    like: Path,
    weights: str = WEIGHTS,
    texts: Mapping[str, str] | None = None,
    shard_size: float = SHARD_SIZE,
) -> None:
    """Write a model directory that transformers loads as it loads `like`, in one step or not at all.

    Parameters: `out`, the directory, which is replaced (`check_target` says where that is wrong); `tensors`, under the
    names of `like`'s files, which are written as they come; `like`, the directory from which configuration, tokenizer
    and processor come; `weights`, the name of the file of parameters, or, beyond `shard_size` bytes, of its shards;
    `texts`, files to write beside it. Raises AlignmentError where the disk does not take it.
    """
    with _replacing(out.resolve()) as new:
        copied = [path for path in like.iterdir() if path.is_file() and path.suffix in _COPIED]
        copied += (like / _TEMPLATES).glob("*.jinja")
        for path in copied:
            if not any(path.match(pattern) for pattern in _OF_THE_TRAINING):
                target = new / path.relative_to(like)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        for name, text in (texts or {}).items():
            (new / name).write_text(text, encoding="utf-8")
        writer = ShardWriter(new, weights, shard_size)
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.close()


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield a new folder beside `out`, which takes its place at the end; an error inside leaves everything as it was.

    Raises AlignmentError where the disk does not take it.
    """
    new, old = (out.parent / f".{out.name}.{os.getpid()}.{state}" for state in ("new", "old"))
    fresh = [folder for folder in out.parents if not folder.exists()]
    try:
        new.mkdir(parents=True)
        yield new
        if out.exists():
            out.rename(old)
        new.rename(out)
    except (OSError, SafetensorError) as error:
        raise AlignmentError(f"{out}: expected to write a model there, found: {error}; nothing was changed") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(out)
        else:
            with contextlib.suppress(OSError):
                for folder in fresh:
                    folder.rmdir()
