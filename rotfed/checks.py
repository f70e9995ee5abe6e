"""The one property that every spec must have: no transform changes what the model computes."""

import contextlib
import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rotfed.errors import FunctionChangedError, SpecError
from rotfed.layout import lay_out
from rotfed.residual import fold_norms
from rotfed.spec import SymmetrySpec, check_is_spec
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
    """Run a model before and after a random transform of all groups; where its outputs change, name the group at fault.

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

    Returns the largest relative change of any output. Raises FunctionChangedError where it exceeds the tolerance, with
    the first group that does so on its own, and the parameter to look at; SpecError where the spec does not cover the
    model's parameters or a group acts on none of them.
    """
    check_is_spec(spec)
    if not isinstance(model, nn.Module):
        raise SpecError(f"model: expected a transformers model, found {type(model).__name__}")
    generator = generator or torch.Generator().manual_seed(0)
    if dtype not in TOLERANCE:
        raise SpecError(f"dtype: expected one of {', '.join(map(str, TOLERANCE))}, found {dtype}")
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    twin = with_plain_experts(copy.deepcopy(model).cpu().to(dtype).eval())
    original = dict(twin.state_dict())
    params = fold_norms(original, spec) if spec.residual else original
    layout = lay_out(params, spec)
    inputs = dict(inputs) if inputs is not None else example_inputs(twin, generator)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    try:
        expected = outputs(twin, original, inputs)
        if spec.residual:
            # What an encoder puts out beside the logits of its decoder is in the frame of the stream.
            expected = {name: tensor for name, tensor in expected.items() if "hidden_state" not in name}
    except Exception as failure:  # whatever a model raises on inputs that it was not made for
        reason = next(iter(str(failure).strip().splitlines()), repr(failure))
        raise SpecError(
            f"{type(model).__name__}: expected a model that runs on example inputs, found: {reason}; pass inputs to "
            "check_spec"
        ) from failure
    everything = unsettling_transform(spec, generator)
    acting = {name for block in layout.blocks for name in block.groups}
    if idle := [name for name in spec.groups if name not in acting and _belongs(name, layout.stacks)]:
        raise SpecError(f"{spec.source}: group {idle[0]} acts on no parameter; remove it or name it in [params]")

    def moved_by(groups: tuple[str, ...]) -> tuple[dict[str, Tensor], float]:
        moved = Transform(spec, {name: everything.elements[name] for name in groups}).apply(params)
        return moved, relative_change(expected, outputs(twin, moved, inputs))

    groups = tuple(spec.groups)
    moved, error = moved_by(groups)
    if error <= tolerance:
        return error
    for name in spec.groups:
        alone, single = moved_by((name,))
        if not single <= tolerance:
            groups, moved, error = (name,), alone, single
            break
    changed = [name for name in params if moved[name] is not params[name]]
    raise FunctionChangedError(
        f"{_suspect(twin, inputs, expected, params, moved, changed)}: random elements of "
        f"{', '.join(groups)} changed the outputs by {error:.2g} (relative), expected at most {tolerance:g}; "
        f"compare its axis string in {spec.source}, and those of the parameters it is multiplied with, with "
        "the model's forward pass"
    )


def unsettling_transform(spec: SymmetrySpec, generator: torch.Generator) -> Transform:
    """A random transform in which no permutation is the identity, and no layer's signs are all positive.

    Chance would leave two heads in place every other time.
    """
    elements = dict(random_transform(spec, generator).elements)
    for name, group in spec.groups.items():
        if group.kind_name == "permutation":
            in_place = group.kind.identity(group.batch, group.size)
            still = (elements[name] == in_place).all(-1, keepdim=True)
            elements[name] = torch.where(still, in_place.roll(1, -1), elements[name])
        elif group.kind_name == "sign":
            by_layer = elements[name].clone().reshape(group.batch[0] if group.layered else 1, -1)
            by_layer[(by_layer == 1).all(-1), 0] = -1
            elements[name] = by_layer.reshape(elements[name].shape)
    return Transform(spec, elements)


def _belongs(group: str, stacks: tuple[str | None, ...]) -> bool:
    """Whether a group is one of the given stacks' own."""
    return None in stacks or group.split(".")[0] in stacks


def example_inputs(model: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Random inputs for a transformers model: pixels, sound or tokens, whatever its forward pass takes.

    Raises SpecError for a model that takes none of these.
    """
    forward: Any = model.forward
    accepted = inspect.signature(forward).parameters
    config: Any = model.config
    text, vision = (getattr(config, f"{tower}_config", None) or config for tower in ("text", "vision"))
    inputs = {}
    if "pixel_values" in accepted:
        height, width = vision.image_size if isinstance(vision.image_size, list | tuple) else [vision.image_size] * 2
        frames = [vision.num_frames] if hasattr(vision, "num_frames") else []
        shape = (2, *frames, vision.num_channels, height, width)
        inputs["pixel_values"] = torch.randn(shape, generator=generator)
    if "input_features" in accepted:
        inputs["input_features"] = torch.randn(
            2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator
        )
    if "input_values" in accepted:
        sound = (config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else (800,)
        inputs["input_values"] = torch.randn(2, *sound, generator=generator)
    if "noise" in accepted and "pixel_values" in inputs:
        # A masked autoencoder draws its mask anew each time; the noise decides it.
        patches = height // config.patch_size * (width // config.patch_size)
        inputs["noise"] = torch.rand(2, patches, generator=generator)
    if "input_ids" in accepted:
        inputs["input_ids"] = _tokens(text, generator)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "encoder_hidden_states" in accepted and getattr(config, "add_cross_attention", False):
        shape = (*inputs["input_ids"].shape, text.hidden_size)
        inputs["encoder_hidden_states"] = torch.randn(shape, generator=generator)
    if "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = _tokens(text, generator)
    if not inputs:
        raise SpecError(
            f"{type(model).__name__}: expected a model of pixels, sound or tokens, found one of "
            f"{getattr(model, 'main_input_name', None)}; pass example inputs to check_spec"
        )
    return inputs


def _tokens(config: Any, generator: torch.Generator) -> Tensor:
    """Ordinary tokens, two sequences where the configuration has a padding token, which heads need for a batch."""
    batch = 2 if getattr(config, "pad_token_id", None) is not None else 1
    longest = getattr(config, "max_position_embeddings", None) or 16
    length = min(16, longest if longest > 0 else 16) - 2
    special = {getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos", "decoder_start")}
    ordinary = torch.tensor([token for token in range(min(config.vocab_size, 1000)) if token not in special])
    return ordinary[torch.randint(len(ordinary), (batch, length), generator=generator)]


def randomize(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Give every parameter of a model random values of ordinary size, in place, and return the model.

    Fresh initialisations have norms of one and biases of zero, which hide what a wrong spec does to them.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                # Sinusoids and the like: transformers computes them anew when it loads a model.
                continue
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


def with_plain_experts(model: nn.Module) -> nn.Module:
    """Have a mixture of experts computed in plain PyTorch, in place: the fused kernels do not take float64."""
    set_experts: Any = getattr(model, "set_experts_implementation", None)
    if set_experts is not None:
        set_experts("eager")
    return model


class _Float64Throughout(TorchDispatchMode):
    """Turns every conversion to float32 into one to float64.

    Many models compute norms, softmax and rotary angles in float32 whatever their weights are; its rounding would
    hide what the check looks for, or now and then look like a change.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextlib.contextmanager
def _float64_throughout() -> Iterator[None]:
    mode: Any = _Float64Throughout
    usual = torch.get_default_dtype()
    # Some models make a constant of float64's least value in the default type.
    torch.set_default_dtype(torch.float64)
    try:
        with mode():
            yield
    finally:
        torch.set_default_dtype(usual)


def outputs(model: nn.Module, params: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The floating-point tensors that a model computes with `params` in place of its own.

    Logits, hidden states, pooled outputs; not its cache, which may turn. Where `params` hold float64, everything in
    between does.
    """
    wide = any(tensor.dtype == torch.float64 for tensor in params.values())
    with torch.no_grad(), _float64_throughout() if wide else contextlib.nullcontext():
        # A state dict holds tied weights under each of their names, so nothing is left for torch to tie.
        output = torch.func.functional_call(model, dict(params), kwargs=dict(inputs), tie_weights=False)
    return dict(_tensors_of(output))


def _tensors_of(output: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of a model's output, with those of the outputs of its towers."""
    for name, value in output.items():
        if isinstance(value, Mapping):
            yield from _tensors_of(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield prefix + name, value


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
        return relative_change(expected, outputs(model, {**moved, name: params[name]}, inputs))

    return min(changed, key=damage_without)
