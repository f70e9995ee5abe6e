"""A model directory that was opened: its configuration, its spec, its weights, its tokens."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotfed.checkpoints.weights import StoredWeights, without_data
from rotfed.errors import SpecError
from rotfed.library import load_spec, refusing
from rotfed.mergers import restore_type
from rotfed.spec import SymmetrySpec


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model directory: `params` are under the names of its files; `spec` is without the residual stream."""

    path: Path
    config: Any
    spec: SymmetrySpec
    params: Mapping[str, Tensor]

    @cached_property
    def types(self) -> dict[str, torch.dtype]:
        """The type in which the files hold each parameter."""
        return {name: tensor.dtype for name, tensor in without_data(self.params).items()}

    @cached_property
    def tokens(self) -> dict[int, str]:
        """The token of each row, from the directory's tokenizer.json; empty without one."""
        file = self.path / "tokenizer.json"
        if not file.is_file():
            return {}
        with refusing(f"{file}: expected a tokenizer"):
            table = json.loads(file.read_text(encoding="utf-8"))
            vocab = table["model"]["vocab"]
            pairs = vocab.items() if isinstance(vocab, dict) else ((token, row) for row, (token, _) in enumerate(vocab))
            added = ((entry["content"], entry["id"]) for entry in table["added_tokens"])
            return {int(row): token for token, row in (*pairs, *added)}

    def restored(self, name: str, tensor: Tensor, source: Tensor | None = None) -> Tensor:
        """Return a parameter, or some of its rows, in the type of its file.

        Raises TransformError where that type cannot hold it; `source`, which it was made from, is for `round_to`.
        """
        cause = f"in the form in which models are averaged; save {self.path} in a wider type"
        return restore_type(tensor, self.types[name], name, cause, source)


def read_checkpoint(path: Path) -> Checkpoint:
    """Open a model directory; no weights are read. Raises RotfedError where it has no weights or no spec."""
    params = StoredWeights(path)
    spec = load_spec(path)
    if not params:
        raise SpecError(
            f"{path}: expected a model directory with safetensors files, found none; write one with save_pretrained"
        )
    return Checkpoint(path, transformers_config(path), spec, params)


def transformers_config(path: Path) -> Any:
    """Read the configuration of a directory, or a `config.json`."""
    with loading(path):
        return quiet_transformers().AutoConfig.from_pretrained(str(path), local_files_only=True)


def quiet_transformers() -> Any:
    """Return transformers, without its progress bars and advice."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def loading(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn whatever transformers raises over a directory into a SpecError."""
    return refusing(f"{path}: expected a model that transformers can load")
