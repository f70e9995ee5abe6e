"""The one property that every spec must have: no transform changes what the model computes."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rotfed.errors import FunctionChangedError, SpecError
from rotfed.spec import SymmetrySpec
from rotfed.transform import Transform, random_transform

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def check_spec(
    spec: SymmetrySpec,
    model: nn.Module,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Run a model before and after random transforms of every group, all at once and each alone.

    Parameters
    ----------
    spec, model
        A bound spec and a transformers model that it should describe; the model is copied, not touched.
    dtype
        What to compute in: float64 (the default) or float32.
    tolerance
        The largest change allowed, relative to the largest output; by default 1e-12 in float64, 1e-5 in float32.
    inputs
        Keyword arguments of the model's forward pass; random pixels or tokens by default.
    generator
        For the transforms and the inputs; seeded with 0 by default.

    Returns the largest relative change of any output. Raises FunctionChangedError, naming the group and the
    parameter to look at, where a change exceeds the tolerance; SpecError where the spec does not cover the model's
    parameters or a group moves none of them.
    """
    generator = generator or torch.Generator().manual_seed(0)
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    twin = copy.deepcopy(model).cpu().to(dtype).eval()
    params = dict(twin.state_dict())
    spec.resolve(params)
    inputs = dict(inputs) if inputs is not None else example_inputs(twin, generator)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    expected = _outputs(twin, params, inputs)
    everything = random_transform(spec, generator)
    worst = 0.0
    for groups in [*((name,) for name in spec.groups), tuple(spec.groups)]:
        transform = Transform(spec, {name: everything.elements[name] for name in groups})
        moved = transform.apply(params)
        changed = [name for name in params if moved[name] is not params[name]]
        if not changed:
            raise SpecError(f"{spec.source}: group {groups[0]} acts on no parameter; remove it or name it in [params]")
        error = relative_change(expected, _outputs(twin, moved, inputs))
        if not error <= tolerance:
            raise FunctionChangedError(
                f"{_suspect(twin, inputs, expected, params, moved, changed)}: random elements of "
                f"{', '.join(groups)} changed the outputs by {error:.2g} (relative), expected at most {tolerance:g}; "
                f"compare its axis string in {spec.source}, and those of the parameters it is multiplied with, with "
                "the model's forward pass"
            )
        worst = max(worst, error)
    return worst


def example_inputs(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Random inputs for a transformers model: pixels for a vision model, tokens for a language model."""
    config: Any = model.config
    main_input = getattr(model, "main_input_name", None)
    if main_input == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(2, config.num_channels, height, width, generator=generator)}
    if main_input == "input_ids":
        # Heads that look for the last token need a padding token to take a batch.
        batch = 2 if getattr(config, "pad_token_id", None) is not None else 1
        length = min(16, config.max_position_embeddings - 2)
        special = {getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")}
        ordinary = torch.tensor([token for token in range(min(config.vocab_size, 1000)) if token not in special])
        chosen = torch.randint(len(ordinary), (batch, length), generator=generator)
        return {"input_ids": ordinary[chosen], "attention_mask": torch.ones(batch, length, dtype=torch.long)}
    raise SpecError(
        f"{type(model).__name__}: expected a model of pixel_values or input_ids, found {main_input}; "
        "pass example inputs to check_spec"
    )


def randomize(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Give every parameter of a model random values of ordinary size, in place, and return the model.

    Fresh initialisations have norms of one and biases of zero, which hide what a wrong spec does to them.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                scaled = noise * parameter.shape[-1] ** -0.5
            elif name.endswith("weight"):
                scaled = 1 + 0.2 * noise
            else:
                scaled = 0.2 * noise
            parameter.copy_(scaled)
    return model


def relative_change(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> float:
    """The largest difference of any output, relative to that output's largest value; NaN counts as infinite."""
    changes = []
    for name, before in expected.items():
        difference = (found[name].double() - before.double()).abs().max()
        changes.append(difference / before.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny))
    return float(torch.nan_to_num(torch.stack(changes), nan=torch.inf).max())


def _outputs(model: nn.Module, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a model computes: logits, hidden states, pooled outputs (not its cache, which may turn)."""
    with torch.no_grad():
        # A state dict holds tied weights under each of their names, so nothing is left for torch to tie.
        output = torch.func.functional_call(model, dict(params), kwargs=dict(inputs), tie_weights=False)
    return {name: value for name, value in output.items() if isinstance(value, Tensor) and value.is_floating_point()}


def _suspect(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    moved: Mapping[str, Tensor],
    changed: Iterable[str],
) -> str:
    """The moved parameter whose own move does most of the damage: putting it back changes the outputs least."""

    def damage_without(name: str) -> float:
        return relative_change(expected, _outputs(model, {**moved, name: params[name]}, inputs))

    return min(changed, key=damage_without)
