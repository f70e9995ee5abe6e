"""What a client does with its PEFT model: which factor it trains, and what the server adds to the base weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rotfed.adapters.factors import Factors
from rotfed.adapters.spec import AdapterSpec, computable
from rotfed.errors import AlignmentError
from rotfed.layout import no_plain_tensor
from rotfed.tensors import check_finite

TRAINED = ("both", "A", "B")

_ADDED = "_rotfed_base_delta_added"


def train_factors(model: nn.Module, which: str = "both") -> None:
    """Let one factor of every LoRA module be trained, or both.

    Parameters: `which`, `"A"`, `"B"` or `"both"`, as an adapter strategy says in the train config under
    `"rotfed-train"`. `"B"` is the factor that PEFT starts at zero, which is `lora_embedding_A` of an embedding. Sets
    `requires_grad` of factors and leaves everything else as it is.
    """
    if which not in TRAINED:
        raise AlignmentError(f"rotfed-train: expected one of {', '.join(TRAINED)}, found {which!r}")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for module in AdapterSpec({}).resolve({n: p for n, p in parameters.items() if ".base_layer." not in n}):
        parameters[module.a].requires_grad_(which != "B")
        parameters[module.b].requires_grad_(which != "A")


def delta_record(left: Mapping[str, Tensor | Factors]) -> dict[str, Tensor]:
    """Name the factors of a change of the base, by module, in float32, as they travel; what has its name keeps it."""
    record: dict[str, Tensor] = {}
    for name, found in left.items():
        if isinstance(found, Factors):
            record |= {f"{name}.delta_B": found.B.float(), f"{name}.delta_A": found.A.float()}
        else:
            record[name] = found
    return record


def read_delta(left: Mapping[str, Tensor | Factors]) -> dict[str, Factors]:
    """The factors of a change of the base, by module, from its record or from an `Aggregated`'s.

    Raises AlignmentError where they are no finite pairs.
    """
    record = delta_record(left)
    modules = dict.fromkeys(name.rpartition(".delta_")[0] for name in record)
    if odd := sorted(record.keys() ^ {f"{module}.delta_{side}" for module in modules for side in "BA"}):
        raise AlignmentError(f"{odd[0]}: expected delta_B and delta_A of a module, found one alone; pass both")
    for name, tensor in record.items():
        if found := no_plain_tensor(tensor):
            raise AlignmentError(f"{name}: expected a dense torch.Tensor, found {found}; convert it first")
    check_finite(record, "change of the base")
    factors = {name: Factors(record[f"{name}.delta_B"], record[f"{name}.delta_A"]) for name in modules}
    for name, (B, A) in factors.items():
        if (B.ndim, A.ndim) != (2, 2) or B.shape[1] != A.shape[0]:
            raise AlignmentError(
                f"{name}: expected two factors of a change, found shapes {tuple(B.shape)} and {tuple(A.shape)}; pass "
                "what the server sent"
            )
    return factors


def add_base_delta(model: nn.Module, left: Mapping[str, Tensor | Factors]) -> None:
    """Add what a server's `"exact"` or `"stack"` aggregation left over to the base weights of a PEFT model.

    Parameters: `model`, a PeftModel (or what has the same module names) over the base model as it was loaded;
    `left`, what the server sent beside the adapter: `to_state_dict(message.content["base-delta"])`, the sum over all
    rounds; or `aggregate_adapters(...).base_delta`. The model is changed. Raises AlignmentError, with nothing changed,
    where a change was added before (by another PeftModel over the same base, too), where a base weight is quantised,
    tied to another or of another shape.
    """
    if any(getattr(part, _ADDED, False) for part in model.modules()):
        raise AlignmentError(
            "base delta: expected the base model as it was loaded, found one that has one already; the server sends "
            "the sum over all rounds, so load the base model anew"
        )
    owners: dict[int, set[int]] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(part))
    moved: dict[int, tuple[nn.Module, Factors, bool]] = {}
    for name, (B, A) in read_delta(left).items():
        try:
            layer = model.get_submodule(name)
        except AttributeError as error:
            raise AlignmentError(
                f"{name}: expected in the model, found no such module; adapt the server's modules"
            ) from error
        base = layer
        while isinstance(nested := getattr(base, "base_layer", None), nn.Module):
            base = nested
        weight = getattr(base, "weight", None)
        transposed = bool(getattr(layer, "fan_in_fan_out", False))
        flat = [A.shape[1], B.shape[0]] if transposed else [B.shape[0], A.shape[1]]
        plain = isinstance(weight, Tensor) and not no_plain_tensor(weight) and computable(weight) and not weight.is_meta
        if not isinstance(weight, Tensor) or not plain or list(weight.flatten(1).shape) != flat:
            found = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else "none"
            raise AlignmentError(
                f"{name}: expected a floating-point base weight of shape {tuple(flat)}, found {found}; a change can "
                "be added to plain weights only, so aggregate quantised models by 'optimal'"
            )
        if len(owners[id(weight)]) > 1:
            raise AlignmentError(
                f"{name}: expected a base weight of its own, found one that is tied to another module's, which would "
                "move with it; aggregate by 'optimal'"
            )
        moved[id(weight)] = (base, Factors(B, A), transposed)
    with torch.no_grad():
        for base, factors, transposed in moved.values():
            weight = base.get_parameter("weight")
            B, A = (factor.to(weight.device, torch.promote_types(weight.dtype, torch.float32)) for factor in factors)
            delta = (B @ A).mT if transposed else B @ A
            weight.copy_(weight.to(delta.dtype) + delta.reshape(weight.shape))
            setattr(base, _ADDED, True)
