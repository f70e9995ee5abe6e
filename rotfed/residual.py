"""The residual stream: what its norms leave of its symmetry, and the form of a model in which that can be used.

Every layer reads the stream through a norm and adds to it. A norm without gain commutes with every rotation of the
stream (RMSNorm), or with every one that keeps the all-ones direction (LayerNorm); with gain, with permutations only,
and with changes of sign where no mean is taken off. Gain and bias of a norm can be folded into the layers that read
it, which changes no output: W' = W diag(gain), b' = b + W bias.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rotfed.axes import parts
from rotfed.errors import SpecError
from rotfed.spec import Entry, Residual, SymmetrySpec, check_is_spec, shared_values
from rotfed.transform import to_work

GROUP, SIGN = "residual", "residual_sign"

_GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "centred_orthogonal": {GROUP: {"kind": "centred_orthogonal"}},
    "orthogonal": {GROUP: {"kind": "orthogonal"}},
    "signed_permutation": {GROUP: {"kind": "permutation"}, SIGN: {"kind": "sign"}},
    "permutation": {GROUP: {"kind": "permutation"}},
}


def with_residual(data: Mapping[str, Any], kind: Any, where: str) -> dict[str, Any]:
    """A parsed spec file in which a group of the given kind acts on every axis of the residual stream."""
    if kind not in _GROUPS:
        raise SpecError(f"{where}: residual.kind: expected one of {', '.join(_GROUPS)}, found {kind!r}")
    table = data["residual"]
    axes = table.get("axes", ["d_model"])
    axis = axes[0]
    groups = {name: dict(group) for name, group in _GROUPS[kind].items()}
    groups[GROUP]["axis"] = axis
    if SIGN in groups:
        groups[SIGN]["per"] = [axis]
    atom = re.compile(rf"(?<![\w*/])({'|'.join(axes)})\b")
    norms = tuple(f"{name}." for name in table["folds"])
    params = {}
    for name, entry in data["params"].items():
        if name.startswith("pooler."):
            # What reads a pooler and what reads the stream can have one name: with a pooler the model is refused.
            continue
        if not name.startswith(norms):
            acting = f"{GROUP}*{SIGN}" if SIGN in groups else GROUP
        elif kind in ("permutation", "signed_permutation"):
            # A sign acts on the stream and, through the gain, on what leaves the norm: twice is not at all.
            acting = GROUP
        else:
            acting = axis
        params[name] = {**entry, "axes": atom.sub(acting, entry["axes"])}
    for name, axes in table["head"].items():
        acting = f"{GROUP}*{SIGN}" if SIGN in groups else GROUP
        params[name] = {"axes": atom.sub(acting, axes), "optional": True, "head": True}
    return {**data, "groups": {**groups, **data["groups"]}, "params": params}


def fold_norms(params: Mapping[str, Tensor], spec: SymmetrySpec) -> dict[str, Tensor]:
    """The canonical form of a model for its residual stream, in the same architecture; computes the same.

    Parameters: `params`, a mapping from name to tensor; `spec`, from `load_spec(..., residual=True)`. Where the
    residual stream may be rotated, each norm's gain is folded into the layers that read it and becomes one, its bias
    becomes zero; under LayerNorm the mean over the stream, which no layer reads, is taken off all that writes to it.
    Elsewhere the parameters are returned as they are. Computed in float64, returned in the types given; nothing is
    mutated. Raises SpecError where a layer that reads a norm has no bias to take up the norm's, or where parameters
    that share their values would no longer.
    """
    check_is_spec(spec)
    if spec.residual is None:
        raise SpecError("fold_norms: expected a spec with the residual stream; load it with residual=True")
    resolution = spec.resolve(params, folded=False)
    if not spec.residual.folded:
        return dict(params)
    wide = {spec_name: to_work(params[name]).clone() for spec_name, name in resolution.names.items()}
    entries = {name: entry for entry in spec.entries for name in spec.names_of(entry)}
    for norm, readers in spec.residual.folds.items():
        for layer in range(spec.num_layers) if "{layer}" in norm else (None,):
            here = norm.replace("{layer}", str(layer))
            gain, bias = wide.get(f"{here}.weight"), wide.get(f"{here}.bias")
            found = [
                r.replace("{layer}", str(layer))
                for r in readers
                if r.replace("{layer}", str(layer)) + ".weight" in wide
            ]
            if gain is None:
                continue
            for reader in found:
                name = f"{reader}.weight"
                _fold(wide, name, f"{reader}.bias", _stream_axis(entries[name]), gain, bias, resolution.names[name])
            wide[f"{here}.weight"] = torch.ones_like(gain)
            if bias is not None:
                wide[f"{here}.bias"] = torch.zeros_like(bias)
    if spec.residual.centred:
        for name, tensor in wide.items():
            if (axis := _stream_axis(entries[name])) is not None:
                wide[name] = tensor - tensor.mean(axis, keepdim=True)
    folded = dict(params)
    for spec_name, name in resolution.names.items():
        folded[name] = wide[spec_name].to(device=params[name].device, dtype=params[name].dtype)
    for owner, name, same_view in shared_values(params):
        kept = all(torch.equal(folded[one], params[one]) for one in (owner, name))
        if not kept and not (same_view and torch.equal(folded[owner], folded[name])):
            raise SpecError(
                f"{name}: shares its values with {owner}, and folding would change them apart; untie them by a copy "
                "first, in the model's configuration, too"
            )
    return folded


def _fold(
    wide: dict[str, Tensor], weight: str, bias: str, axis: int | None, gain: Tensor, shift: Tensor | None, shown: str
) -> None:
    """Fold a norm's gain and shift into one layer that reads it along `axis` of its weight."""
    if axis is None:
        raise SpecError(f"{shown}: expected a layer that reads the residual stream; correct the folds of the spec")
    matrix = wide[weight].movedim(axis, -1)
    if shift is not None and bool(shift.any()):
        if bias not in wide:
            raise SpecError(
                f"{shown}: expected a bias that can take up the norm's, found none; this model cannot be folded"
            )
        wide[bias] = wide[bias] + matrix @ shift
    wide[weight] = (matrix * gain).movedim(-1, axis)


def _stream_axis(entry: Entry) -> int | None:
    """The dimension of a parameter on which the residual group acts, None where it does not."""
    for dim, axis in enumerate(entry.axes):
        if any(atom.name == GROUP for part in parts((axis,)) for atom in part):
            return dim
    return None


def bound_residual(data: Mapping[str, Any], kind: str) -> Residual:
    """What a bound spec remembers of the residual stream."""
    folds = {norm: tuple(readers) for norm, readers in data["residual"]["folds"].items()}
    return Residual(folds, kind in ("orthogonal", "centred_orthogonal"), kind == "centred_orthogonal")
