"""Which spec comes closest to a model that none describes, and what a file of its own would have to state."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from rotfed.axes import atoms_of
from rotfed.library import spec_files
from rotfed.specfile import ParamTable, SpecFile

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
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
    for family, file in spec_files().items():
        for patterns in _namings(file):
            found = {name: hit for name in shapes if (hit := _suffix_in(name, patterns))}
            heads = any(_rotates(patterns[hit], file) for hit in found.values())
            if 2 * len(found) < len(shapes) or not heads:
                continue
            # A file for many variants has names that no one model has, which must not count against it.
            fit = (len(found), len(found) / len(patterns))
            if best is None or fit > best[0]:
                required = {name for name, table in patterns.items() if not table.optional}
                nearest = Nearest(
                    family,
                    file.model_type,
                    {hit: shapes[name] for name, hit in found.items()},
                    {name: shape for name, shape in shapes.items() if name not in found},
                    tuple(sorted(required - set(found.values()))),
                )
                best = fit, nearest
    return best[1] if best else None


def _namings(file: SpecFile) -> Iterable[dict[str, ParamTable]]:
    """Yield the parameters of a spec file, by the patterns of their names, in each of its namings."""
    for renames in ({}, *file.aliases.values()):
        renamed = {}
        for name, table in file.params.items():
            start = max((new for new in renames if name.startswith(new)), key=len, default="")
            renamed[_PLACEHOLDER.sub("*", renames.get(start, "") + name[len(start) :])] = table
        yield renamed


def _rotates(table: ParamTable, file: SpecFile) -> bool:
    """Return whether a group of rotations acts on a parameter, as on those of heads."""
    acting = {name for atom in atoms_of(table.axes) for name in atom.names} & set(file.groups)
    return any(file.groups[name].kind in ("orthogonal", "rope_planes") for name in acting)


def _suffix_in(name: str, patterns: Collection[str]) -> str | None:
    """The longest end of a dotted name that is one of `patterns`."""
    while name not in patterns:
        if "." not in name:
            return None
        name = name.split(".", 1)[1]
    return name
