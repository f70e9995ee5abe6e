"""Which spec comes closest to a model that none describes, and what a file of its own would have to state."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rotfed.library import spec_files

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_WORD = re.compile(r"\w+")
_PLACEHOLDER = re.compile(r"\{\w+\}")


@dataclass(frozen=True)
class Nearest:
    """The spec file that shares most parameter names with a model.

    Names are patterns: every number is a `*`. `matched` and `unmatched` are the model's, without prefix and with, each
    with the shape of its first tensor; `lacking` are the spec's that the model does not have.
    """

    family: str
    model_types: tuple[str, ...]
    matched: Mapping[str, tuple[int, ...]]
    unmatched: Mapping[str, tuple[int, ...]]
    lacking: tuple[str, ...]


def nearest_spec(params: Mapping[str, Tensor]) -> Nearest | None:
    """The spec whose parameter names are most of those of `params`; None where none has half of them.

    Some of them have to be of heads that may be rotated: a model without attention has nothing to learn from a spec.
    Only names are compared: a spec that fits here still has to be proved by `check_spec`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in params.items():
        shapes.setdefault(_NUMBER.sub("*", name), tuple(tensor.shape))
    best: tuple[tuple[int, float], Nearest] | None = None
    for family, data in spec_files().items():
        optional = {_PLACEHOLDER.sub("*", name) for name, table in data["params"].items() if "optional" in table}
        turned = {name for name, group in data["groups"].items() if group["kind"] in ("orthogonal", "rope_planes")}
        for patterns in _namings(data["params"], data.get("aliases", {})):
            found = {name: hit for name in shapes if (hit := _suffix_in(name, patterns))}
            heads = any(turned & set(_WORD.findall(patterns[hit])) for hit in found.values())
            if 2 * len(found) < len(shapes) or not heads:
                continue
            # A file for many variants has names that no one model has, which must not count against it.
            fit = (len(found), len(found) / len(patterns))
            if best is None or fit > best[0]:
                nearest = Nearest(
                    family,
                    tuple(data["model_type"]),
                    {hit: shapes[name] for name, hit in found.items()},
                    {name: shape for name, shape in shapes.items() if name not in found},
                    tuple(sorted(set(patterns) - set(found.values()) - optional)),
                )
                best = fit, nearest
    return best[1] if best else None


def _namings(
    params: Mapping[str, Mapping[str, Any]], aliases: Mapping[str, Mapping[str, str]]
) -> Iterable[dict[str, str]]:
    """The patterns of a spec file's parameters in each of its namings, with their axis strings."""
    for table in ({}, *aliases.values()):
        renamed = {}
        for name, entry in params.items():
            start = max((new for new in table if name.startswith(new)), key=len, default="")
            renamed[_PLACEHOLDER.sub("*", table.get(start, "") + name[len(start) :])] = entry["axes"]
        yield renamed


def _suffix_in(name: str, patterns: Collection[str]) -> str | None:
    """The longest end of a dotted name that is one of `patterns`."""
    while name not in patterns:
        if "." not in name:
            return None
        name = name.split(".", 1)[1]
    return name
