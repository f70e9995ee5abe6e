"""The residual stream: what its norms leave of its symmetry, and the form of a model in which that can be used.

Every layer reads the stream through a norm and adds to it. A norm without gain commutes with every rotation of the
stream (RMSNorm), or with every one that keeps the all-ones direction (LayerNorm); with gain, with permutations only,
and with changes of sign where no mean is taken off. Gain and bias of a norm can be folded into the layers that read
it, which changes no output: W' = W diag(gain), b' = b + W bias. Where a reader has no bias to take that up, the norm
keeps bias / gain, which turns with the stream.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rotfed.axes import parts
from rotfed.errors import SpecError
from rotfed.layout import lay_out, shared_values
from rotfed.spec import Entry, SymmetrySpec, check_is_spec, in_layers
from rotfed.tensors import Params, round_to, to_work

STREAM_GROUP, STREAM_SIGN = "residual", "residual_sign"
"""The names of the groups that act on the residual stream."""

# The stream's rounding grows with what turns in it: 100 keeps 1e-12 in float64 and 1e-5 in float32, narrower types
# hold less.
_LARGEST_SHIFT, _LARGEST_ROUNDING = 100, 0.05


def fold_norms(params: Mapping[str, Tensor], spec: SymmetrySpec) -> dict[str, Tensor]:
    """The canonical form of a model for its residual stream, in the same architecture; computes the same.

    Parameters: `params`, a mapping from name to tensor; `spec`, from `load_spec(..., residual=True)`. Where the
    residual stream may be rotated, each norm's gain is folded into the layers that read it and becomes one, and so
    does its bias, which becomes zero, where each of them has a bias; a layer scale is folded into the layer before it;
    under LayerNorm the mean over the stream, which no layer reads, is taken off all that writes to it. Elsewhere the
    parameters are returned as they are. Computed in float64, returned in the types given; nothing is mutated. Raises
    SpecError where a bias that no layer takes up meets a gain near zero, or where parameters that share their values
    would no longer, TransformError where a value would leave the range of its type.
    """
    check_is_spec(spec)
    if spec.residual is None:
        raise SpecError("fold_norms: expected a spec with the residual stream; load it with residual=True")
    resolution = lay_out(params, spec, folded=False)
    if not spec.residual.folded:
        return dict(params)
    wide = {spec_name: to_work(params[name]).clone() for spec_name, name in resolution.names.items()}
    entries = {name: entry for entry in spec.entries for name in spec.names_of(entry)}
    # The parameters as views that end in the stream's axis, `(..., 1 or more, d_model)`.
    streams = {
        name: tensor.movedim(dim, -1).unflatten(-1, (-1, spec.groups[STREAM_GROUP].size))
        for name, tensor in wide.items()
        if name in entries and (dim := _stream_axis(entries[name])) is not None
    }
    read = set()
    norms: dict[str, str] = {}
    for norm, readers in _beside(spec.residual.folds, ".weight", wide, streams, spec.num_layers):
        if not readers:
            raise SpecError(
                f"{resolution.names[f'{norm}.weight']}: expected a layer that reads this norm, found none; add it to "
                f"the folds of {spec.source}, or load the spec without residual=True"
            )
        gain, shift = wide[f"{norm}.weight"], wide.get(f"{norm}.bias")
        gain += 1 - spec.residual.unit
        if shift is not None and bool(shift.any()):
            if all(f"{reader}.bias" in wide for reader in readers):
                for reader in readers:
                    wide[f"{reader}.bias"] += (streams[f"{reader}.weight"] @ shift).sum(-1)
                shift.zero_()
            else:
                shift /= gain
                read |= {f"{norm}.bias", *(f"{reader}.weight" for reader in readers)}
                eps = torch.finfo(params[resolution.names[f"{norm}.bias"]].dtype).eps
                if not bool((shift.abs() <= min(_LARGEST_SHIFT, _LARGEST_ROUNDING / eps)).all()):
                    raise SpecError(
                        f"{resolution.names[f'{norm}.weight']}: expected a gain not near zero, found one where the "
                        "norm has a bias that no layer can take up; load the spec with residual='permutation'"
                    )
        for reader in readers:
            streams[f"{reader}.weight"] *= gain
            norms |= dict.fromkeys((f"{reader}.weight", f"{reader}.bias"), f"{norm}.weight")
        gain.fill_(spec.residual.unit)
    for scale, writers in _beside(spec.residual.scales, "", wide, streams, spec.num_layers):
        for name in (f"{writer}.{part}" for writer in writers for part in ("weight", "bias")):
            if name in streams:
                streams[name] *= wide[scale]
        wide[scale].fill_(1)
    if spec.residual.centred:
        for name in streams.keys() - read:
            streams[name] -= streams[name].mean(-1, keepdim=True)
    folded = dict(params)
    for spec_name, name in resolution.names.items():
        source, by = params[name], norms.get(spec_name, "the mean of the stream")
        cause = f"after folding {by}; fold parameters in a wider type"
        # What is left where centring takes off all there is are rounding errors of float64.
        folded[name] = round_to(wide[spec_name], source.dtype, name, cause, source, noise=1e-13).to(source.device)
    for owner, name, same_view in shared_values(params):
        kept = all(torch.equal(folded[one], params[one]) for one in (owner, name))
        if not kept and not (same_view and torch.equal(folded[owner], folded[name])):
            raise SpecError(
                f"{name}: shares its values with {owner}, and folding would change them apart; untie them by a copy "
                "first, in the model's configuration, too"
            )
    return folded


def folded(params: Params, spec: SymmetrySpec) -> Params:
    """Return parameters as a spec needs them: with folded norms where it has the residual stream."""
    return fold_norms(params, spec) if spec.residual else params


def _beside(
    table: Mapping[str, tuple[str, ...]], ending: str, params: Params, streams: Params, layers: int
) -> Iterator[tuple[str, list[str]]]:
    """Each norm or layer scale of a model in every layer, and the layers beside it that meet the stream."""
    for pattern, others in table.items():
        for number, name in enumerate(in_layers(pattern, layers)):
            here = [other.replace("{layer}", str(number)) for other in others]
            if name + ending in params:
                yield name, [other for other in here if f"{other}.weight" in streams]


def _stream_axis(entry: Entry) -> int | None:
    """The dimension of a parameter on which the residual group acts, None where it does not."""
    for dim, axis in enumerate(entry.axes):
        if any(atom.name == STREAM_GROUP for part in parts((axis,)) for atom in part):
            return dim
    return None
