"""Adapters of several clients into one: the methods by name, over whole state dicts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rotfed.adapters.factors import (
    Factors,
    Stack,
    aggregation_error,
    consensus,
    left_over,
    nearest_frame,
    optimal,
    rotation,
)
from rotfed.adapters.spec import AdapterSpec, Module
from rotfed.errors import AlignmentError
from rotfed.layout import no_plain_tensor
from rotfed.mergers import mean_tensor, normalised_weights, restore_type
from rotfed.tensors import Params, check_finite, to_work

METHODS = ("mean", "rotation", "optimal", "exact", "exact-mean", "stack")
# Those that leave something for the base weights.
LEAVES_DELTA = ("exact", "exact-mean", "stack")

# Residuals travel in float32: what that rounds away of an update is no component of its own.
_FLOAT32 = torch.finfo(torch.float32).eps / 2

# So many float64 numbers of stacked factors are worked on at once (256 MB).
_AT_ONCE = 2**25


@dataclass(frozen=True, eq=False)
class Aggregated:
    """What a method makes of several adapters.

    Attributes
    ----------
    replies
        One adapter a client, whose plain weighted mean is the result: the clients' own, turned, or the result itself.
    params
        The result, in the order and types of the anchor's parameters.
    base_delta
        By module, what is to be added to the base weights beside the adapter (`add_base_delta`); only of methods that
        leave something.
    errors, mean_errors
        By module, ||result - mean of products||_F / ||mean of products||_F of the method, and of the mean of factors.
    error, mean_error
        The same over all modules together.
    """

    replies: tuple[dict[str, Tensor], ...] = field(repr=False)
    shares: tuple[float, ...]
    like: Params = field(repr=False)
    base_delta: dict[str, Factors] = field(default_factory=dict, repr=False)
    errors: dict[str, float] = field(default_factory=dict, repr=False)
    mean_errors: dict[str, float] = field(default_factory=dict, repr=False)
    error: float = 0.0
    mean_error: float = 0.0

    @property
    def params(self) -> dict[str, Tensor]:
        """The result, in the order and types of the anchor's parameters."""
        cause = "in the aggregated adapter; save the first in a wider type"
        mean = {name: mean_tensor(name, [reply[name] for reply in self.replies], self.shares) for name in self.like}
        return {name: restore_type(mean[name].double(), like.dtype, name, cause) for name, like in self.like.items()}


def aggregate_adapters(
    adapters: Sequence[Params],
    spec: AdapterSpec,
    method: str = "optimal",
    weights: Sequence[float] | None = None,
    anchor: Params | None = None,
    rank: int | Literal["sum"] | None = None,
    agree: bool = False,
    over: str = "both",
    reflections: bool = True,
    strength: float = 1.0,
    max_sweeps: int = 20,
) -> Aggregated:
    """One adapter out of several of the same modules, whose ranks may differ.

    Parameters
    ----------
    adapters
        State dicts as `get_peft_model_state_dict(model)` gives them, all under the same names.
    method
        What takes the place of the mean of the clients' products `scale_i B_i A_i`: `"mean"` of factors;
        `"rotation"`, the mean of factors that were turned to the anchor's first (`rotation`; exact for clients that
        differ by rotations alone); `"optimal"`, the best approximation of the result's rank, in the frame nearest to
        the anchor's; `"exact"`, that with a change of the base weights, and `"exact-mean"`, the mean of factors
        with one (FedEx-LoRA); `"stack"`, the anchor as it is, with everything else as such a change (FLoRA).
    anchor
        The adapter before, whose types and frame the result has; without, the first of `adapters`. Each module has
        the highest of its ranks, the anchor's among them.
    rank
        Another rank, for `"optimal"` only, up to the adapters' sum; `"sum"`, which is that, is without any error.
    agree, over, reflections, strength, max_sweeps
        Of rotations: whether to turn to the clients' consensus in place of the anchor itself; and as in `rotation`.

    All other parameters are averaged as they are (DoRA's magnitudes among them: the mean of magnitudes is what everyone
    takes, but a DoRA weight is its magnitude times a normalised sum, so no mean of magnitudes and of updates is the
    mean of the weights). Nothing is mutated. Raises RotfedError where adapters do not fit each other.
    """
    if method not in METHODS:
        raise AlignmentError(f"method: expected one of {', '.join(METHODS)}, found {method!r}")
    check_rotation(reflections, strength, max_sweeps)
    if rank is not None and (method != "optimal" or (rank != "sum" and (type(rank) is not int or rank < 1))):
        raise AlignmentError(f"rank: expected a positive one with 'optimal' only, found {rank!r} with {method!r}")
    models = [] if isinstance(adapters, Mapping) else list(adapters)
    if not models:
        alone = "one without a list" if adapters else "none"
        raise AlignmentError(f"adapters: expected a list of at least one state dict, found {alone}; pass [adapter]")
    shares = normalised_weights(len(models), weights)
    like = models[0] if anchor is None else anchor
    modules = _check_alike(models, like, spec)
    most = max(_rank_of(module, models, like, "sum") for module in modules)
    if isinstance(rank, int) and rank > most:
        raise AlignmentError(
            f"rank: expected at most {most}, the sum of the adapters' ranks, found {rank}; more ranks hold no more"
        )
    targets = {module.name: _rank_of(module, models, like, rank) for module in modules}
    replies: list[dict[str, Tensor]] = [dict(model) for model in models]
    left: dict[str, Factors] = {}
    sizes: dict[str, tuple[float, float, float]] = {}
    for group in _alike_in_shape(modules, models, like):
        target = targets[group[0].name]
        scales = [spec.scale(module, target) for module in group]
        clients = [_batch(group, model, spec, scales) for model in models]
        frame = _batch(group, like, spec, scales)
        frame = frame.leading(max(each.rank for each in (frame, *clients)))
        clients = [client.padded(frame) for client in clients]
        frame = frame.leading(target)
        stack = Stack.of(clients, shares)
        made, plain = stack.mean(), stack.mean()
        if method == "rotation":
            goal = consensus(clients, shares, frame, over, max_sweeps) if agree else frame
            turns = [rotation(client, goal, over, reflections, strength) for client in clients]
            found = [client.turned(turn, turn.mT) for client, turn in zip(clients, turns, strict=True)]
            made = stack.mean(turns)
        elif method == "mean":
            found = clients
        elif method == "stack":
            found = [frame]
        elif method == "exact-mean":
            found = [stack.factors(plain)]
        else:
            made = stack.best(target)
            found = [nearest_frame(stack.factors(made).leading(target), frame)]
        norms = [stack.norm(coefficients).tolist() for coefficients in (made, plain, None)]
        for index, (module, scale) in enumerate(zip(group, scales, strict=True)):
            written = [_written(module, factors.at(index), like) for factors in found]
            for number, reply in enumerate(replies):
                reply.update(written[number if len(written) > 1 else 0])
            error, mean_error, norm = (each[index] for each in norms)
            if method in LEAVES_DELTA:
                # From what will be sent, so that its rounding is made good, too.
                sent = module.read({name: tensor.to(like[name].dtype) for name, tensor in written[0].items()})
                own = [client.at(index) for client in clients]
                rest = left_over(own, shares, sent, _FLOAT32 * norm)
                whole = Factors(torch.cat([sent.B, rest.B], -1), torch.cat([sent.A, rest.A], -2))
                error = float(aggregation_error(whole, own, shares)[0])
                if rest.rank:
                    left[module.name] = Factors(scale * rest.B, rest.A)
            sizes[module.name] = (scale * error, scale * mean_error, scale * norm)
    for module in modules:
        if module.bias is not None:
            for reply, model in zip(replies, models, strict=True):
                ratio = spec.scale(module, module.read(model).rank) / spec.scale(module, targets[module.name])
                reply[module.bias] = _wide(to_work(model[module.bias]) * ratio, model[module.bias])
    sizes = {module.name: sizes[module.name] for module in modules}
    return Aggregated(
        tuple(replies),
        tuple(shares),
        like,
        left,
        {name: error / norm if norm else 0.0 for name, (error, _, norm) in sizes.items()},
        {name: error / norm if norm else 0.0 for name, (_, error, norm) in sizes.items()},
        *(_overall(sizes, which) for which in (0, 1)),
    )


def check_rotation(reflections: bool, strength: float, max_sweeps: int = 1) -> None:
    """Raise AlignmentError for options that no rotation has."""
    if not isinstance(reflections, bool):
        raise AlignmentError(f"reflections: expected True or False, found {reflections!r}")
    if type(max_sweeps) is not int or max_sweeps < 1:
        raise AlignmentError(f"max_sweeps: expected a whole number, at least 1, found {max_sweeps!r}")
    if isinstance(strength, bool) or not isinstance(strength, int | float) or not 0 <= strength <= 1:
        raise AlignmentError(f"strength: expected a number from 0 to 1, found {strength!r}")


def fit_adapter(params: Params, like: Params, spec: AdapterSpec) -> dict[str, Tensor]:
    """An adapter at the ranks of another, as near as they allow; what already has them is returned as it is.

    Parameters: `params`, what came from the server; `like`, the client's own adapter,
    `get_peft_model_state_dict(model)`. A lower rank gets the best approximation, in the frame nearest to the leading
    components; a higher one the same update, with the client's own A where it has nothing. The client's scale is kept
    out of it: what changes is `scale * B @ A` only by the approximation. Returns the parameters under the names of
    `params`, in their types. Nothing is mutated.
    """
    ours = {module.name: module.read(like) for module in spec.resolve(like)}
    if odd := sorted({module.name for module in spec.resolve(params)} ^ set(ours)):
        place = "in the client's adapter" if odd[0] in ours else "in the server's adapter"
        raise AlignmentError(f"{odd[0]}: expected in both adapters, found {place} only; adapt the same modules")
    for module in spec.resolve(params):
        if (found := _outer(module.read(params))) != (expected := _outer(ours[module.name])):
            raise AlignmentError(
                f"{module.name}: expected an update of shape {expected}, found {found} in the server's adapter; adapt "
                "the same base model"
            )
    check_finite(params, "server's adapter")
    return _refit(params, spec, ours)


def with_ranks(params: Params, spec: AdapterSpec, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """As `fit_adapter`, with the ranks of the modules, by name, in place of an adapter that has them."""
    found = {module.name: module.read(params) for module in spec.resolve(params)}
    return _refit(params, spec, {name: found[name].leading(rank) for name, rank in ranks.items() if name in found})


def _refit(params: Params, spec: AdapterSpec, ours: Mapping[str, Factors]) -> dict[str, Tensor]:
    fitted = dict(params)
    for module in spec.resolve(params) if ours else []:
        factors = module.read(params)
        own = ours[module.name]
        if own.rank == factors.rank:
            continue
        ratio = spec.scale(module, factors.rank) / spec.scale(module, own.rank)
        scaled = Factors(to_work(factors.B) * ratio, to_work(factors.A))
        frame = scaled.leading(own.rank) if own.rank < factors.rank else Factors(*map(to_work, own))
        for name, tensor in module.write(optimal([scaled], [1.0], own.rank, frame), params).items():
            fitted[name] = tensor.to(params[name].dtype)
        if module.bias is not None:
            fitted[module.bias] = (to_work(params[module.bias]) * ratio).to(params[module.bias].dtype)
    return fitted


def _check_alike(models: Sequence[Params], like: Params, spec: AdapterSpec) -> list[Module]:
    """The modules of all. Raises RotfedError where adapters differ in more than ranks."""
    modules = spec.resolve(like)
    shapes = {module.name: _outer(module.read(like)) for module in modules}
    factors = {name for module in modules for name in (module.a, module.b)}
    for role, model in [("anchor", like), *((f"adapter {number}", model) for number, model in enumerate(models))]:
        if odd := sorted(set(model) ^ set(like)):
            place = "the first" if odd[0] in like else role
            raise AlignmentError(f"{odd[0]}: expected in every adapter, found in {place} only; adapt the same modules")
        for module in spec.resolve(model):
            if (found := _outer(module.read(model))) != shapes[module.name]:
                raise AlignmentError(
                    f"{module.name}: expected an update of shape {shapes[module.name]}, found {found} in {role}; adapt "
                    "the same base model"
                )
        for name in model.keys() - factors:
            if kind := no_plain_tensor(model[name]) or ("complex numbers" if model[name].is_complex() else ""):
                raise AlignmentError(f"{name}: expected a dense tensor of real numbers in {role}, found {kind}")
            if model[name].shape != like[name].shape:
                raise AlignmentError(
                    f"{name}: expected shape {tuple(like[name].shape)}, found {tuple(model[name].shape)} in {role}; "
                    "adapt the same base model"
                )
        check_finite(model, role)
    return modules


def _rank_of(module: Module, models: Sequence[Params], like: Params, rank: int | Literal["sum"] | None) -> int:
    if rank == "sum":
        return sum(module.read(model).rank for model in models)
    return rank or max(module.read(model).rank for model in (*models, like))


def _outer(factors: Factors) -> tuple[int, int]:
    return factors.B.shape[-2], factors.A.shape[-1]


def _alike_in_shape(modules: Sequence[Module], models: Sequence[Params], like: Params) -> Iterator[list[Module]]:
    """Modules whose factors have the same shapes with every client, as many at once as memory is to hold."""
    groups: dict[tuple[int, ...], list[Module]] = {}
    for module in modules:
        ranks = [module.read(model).rank for model in (*models, like)]
        groups.setdefault((*_outer(module.read(like)), *ranks), []).append(module)
    for (rows, columns, *ranks), group in groups.items():
        size = max(1, _AT_ONCE // ((rows + columns) * sum(ranks)))
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _batch(group: Sequence[Module], params: Params, spec: AdapterSpec, scales: Sequence[float]) -> Factors:
    """The factors of like modules, stacked, at the given scales.

    The ratio of scales goes to B: A, which starts alike everywhere, then stays as comparable as it came.
    """
    read = [module.read(params) for module in group]
    ratios = [spec.scale(module, f.rank) / scale for module, f, scale in zip(group, read, scales, strict=True)]
    return Factors(
        torch.stack([to_work(f.B) * ratio for f, ratio in zip(read, ratios, strict=True)]),
        torch.stack([to_work(f.A) for f in read]),
    )


def _written(module: Module, factors: Factors, like: Params) -> dict[str, Tensor]:
    return {name: _wide(tensor, like[name]) for name, tensor in module.write(factors, like).items()}


def _wide(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor in a type at least as wide as float32, the other's where that is."""
    return tensor.to(torch.promote_types(like.dtype, torch.float32))


def _overall(sizes: Mapping[str, tuple[float, float, float]], which: int) -> float:
    norm = math.hypot(*(size[2] for size in sizes.values()))
    return math.hypot(*(size[which] for size in sizes.values())) / norm if norm else 0.0
