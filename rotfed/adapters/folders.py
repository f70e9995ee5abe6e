"""Directories of LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rotfed.adapters.aggregate import Aggregated, aggregate_adapters
from rotfed.adapters.spec import PLAIN_STARTS, AdapterSpec, load_adapter_spec, plain_name
from rotfed.checkpoints.weights import ADAPTER_CONFIG, read_tensors
from rotfed.checkpoints.writing import check_target, write_checkpoint
from rotfed.errors import AlignmentError, SpecError
from rotfed.tensors import Params

WEIGHTS = "adapter_model.safetensors"

# `exact` leaves something for the base weights, which an adapter's directory does not have.
METHODS = ("optimal", "rotation", "mean", "stack")

# What adapters of one base model may differ in: scales and ranks, which count, and what training alone reads.
_FREE = {
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "lora_dropout",
    "inference_mode",
    "peft_version",
    "runtime_config",
    "eva_config",
    "auto_mapping",
}
# With a start that takes components out of the base weights, those settings count that say how many, and only these
# starts take the same ones out of the same weights every time.
_OF_THE_START = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
_REPEATABLE_STARTS = ("pissa", "olora")

_CONVERT = "convert to plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
_ALIKE = "train both alike"
_OF_MODULES = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
# What to do where a setting differs; _ALIKE where it is none of these.
_REMEDIES = {
    "base_model_name_or_path": "merge adapters of one base model or, where both name the same one, write one of the "
    f"names into both {ADAPTER_CONFIG}",
    "init_lora_weights": f"{_ALIKE}, or {_CONVERT}",
    **dict.fromkeys(_OF_MODULES, "merge adapters of the same modules"),
}


@dataclass(frozen=True, eq=False)
class AdapterFolder:
    """An adapter's directory that was read: its configuration as a spec, and its parameters under the file's names."""

    path: Path
    spec: AdapterSpec
    params: Params


@dataclass(frozen=True)
class AdapterOptions:
    """How to merge: one of `METHODS`, `"stack"` being the sum of ranks without any error.

    `rank` is for `"optimal"`, `over` and `strength` are for `"rotation"`; all as in `aggregate_adapters`. Raises
    AlignmentError for what does not go together.
    """

    method: str = "optimal"
    rank: int | None = None
    over: str = ""
    strength: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise AlignmentError(
                f"aggregation: expected one of {', '.join(METHODS)}, found {self.method!r}; 'exact' changes base "
                "weights, which an adapter's directory does not have; 'stack' is without error, too"
            )
        for name, value, taker in (
            ("rank", self.rank, "optimal"),
            ("over", self.over or None, "rotation"),
            ("strength", self.strength, "rotation"),
        ):
            if value is not None and self.method != taker:
                raise AlignmentError(
                    f"{name}: expected unset for {self.method!r}, found {value}; only {taker!r} takes one"
                )


def read_adapter(path: Path) -> AdapterFolder:
    """Read an adapter's directory. Raises SpecError for one that holds no LoRA adapter in a safetensors file."""
    spec = load_adapter_spec(path)
    if not (path / WEIGHTS).is_file():
        raise SpecError(f"{path}: expected {WEIGHTS}, found none; save the adapter with safe_serialization=True")
    params = read_tensors(path / WEIGHTS)
    spec.resolve(params)
    return AdapterFolder(path, spec, params)


def check_compatible(folders: Sequence[AdapterFolder]) -> None:
    """Raise AlignmentError, naming the setting, for adapters whose updates do not go onto the same base weights."""
    first = folders[0]
    for folder in folders:
        start = folder.spec.config.get("init_lora_weights")
        if start not in (*PLAIN_STARTS, *_REPEATABLE_STARTS):
            raise AlignmentError(
                f"{folder.path}: expected init_lora_weights that leaves the base weights as they are, found {start!r}; "
                f"{_CONVERT}, or merge the adapter into its model first (PEFT's merge_and_unload)"
            )
    start = first.spec.config.get("init_lora_weights")
    free = _FREE if start in PLAIN_STARTS else _FREE - _OF_THE_START
    for other in folders[1:]:
        for key in sorted((first.spec.config.keys() | other.spec.config.keys()) - free):
            one, two = (folder.spec.config.get(key) for folder in (first, other))
            if _comparable(key, one) != _comparable(key, two):
                remedy = _REMEDIES.get(key, _ALIKE)
                if key in _OF_THE_START:
                    remedy = f"a start by {start!r} changes the base weights by it, so {_REMEDIES['init_lora_weights']}"
                raise AlignmentError(
                    f"{other.path}: expected {key} {_sorted(one)!r} as in {first.path}, found {_sorted(two)!r}; "
                    + remedy
                )


def merge_adapters(
    folders: Sequence[AdapterFolder], options: AdapterOptions, weights: Sequence[float] | None = None
) -> Aggregated:
    """One adapter out of several, at the first one's scale and in the frame nearest to its own.

    `weights` as in `aggregate_adapters`. Raises RotfedError for adapters that do not go together.
    """
    check_compatible(folders)
    spec = folders[0].spec
    return aggregate_adapters(
        [_rescaled(folder, spec) for folder in folders],
        spec,
        "optimal" if options.method == "stack" else options.method,
        weights,
        folders[0].params,
        rank="sum" if options.method == "stack" else options.rank,
        agree=True,
        over=options.over or "both",
        strength=1.0 if options.strength is None else options.strength,
    )


def write_adapter(out: Path, params: Params, like: AdapterFolder) -> None:
    """Write an adapter's directory that PEFT loads, of the modules of `like` at the ranks that `params` have."""
    ranks = {plain_name(module.name): module.read(params).rank for module in like.spec.resolve(params)}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    config = {
        **like.spec.config,
        "r": usual,
        # PEFT matches the end of a module's name by a pattern: all of it is meant.
        "rank_pattern": {f"^{re.escape(name)}": rank for name, rank in ranks.items() if rank != usual},
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    # PEFT reads one file.
    write_checkpoint(out, params.items(), like.path, WEIGHTS, {ADAPTER_CONFIG: text}, math.inf)


def check_adapter_target(out: Path, models: Sequence[Path], force: bool) -> None:
    """As `check_target`, for adapters."""
    check_target(out, models, force, ADAPTER_CONFIG)


def _comparable(key: str, value: object) -> object:
    if key == "init_lora_weights":
        return "plain" if value in PLAIN_STARTS else value
    # Versions of PEFT write different settings that are not in use.
    return _sorted(value) or None


def _sorted(value: object) -> object:
    """A setting as it is written; PEFT writes sets of names in any order."""
    if isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
        return sorted(value)
    return value


def _rescaled(folder: AdapterFolder, spec: AdapterSpec) -> dict[str, Tensor]:
    """A folder's parameters at the scale that another spec gives to their ranks."""
    params = dict(folder.params)
    for module in folder.spec.resolve(params):
        rank = module.read(params).rank
        ratio = folder.spec.scale(module, rank) / spec.scale(module, rank)
        for name in (module.b, module.bias):
            if name is not None and ratio != 1:
                params[name] = params[name].to(torch.promote_types(params[name].dtype, torch.float32)) * ratio
    return params
