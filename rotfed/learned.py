"""Alignment refined on data: the transform under which a source and an anchor average to the least loss.

The nearest model is not the one that averages best. By gradient steps on local data, `refine` minimises

    loss(share * T(source) + (1 - share) * anchor)

over the continuous elements of T: rotations, rotary angles, scales. Permutations stay what they are at the start: to
solve them anew between steps cost accuracy on twelve pairs of small ViTs (0.1 and 0.6 points on average). T is an exact
element of the groups at every step, so that T(source) computes what the source computes.

A rotation is learned as what it adds to the start's: the Cayley map of a skew-symmetric matrix, which reaches every
rotation without a half turn. With its gradient it takes a quarter of the exponential's time at n = 63, less above.
"""

import itertools
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rotfed.align import Alignment, AlignOptions, align, identity_share
from rotfed.barrier import Batch, run
from rotfed.errors import AlignmentError
from rotfed.layout import Unit, gather, lay_out
from rotfed.mergers import alike, normalised_weights, weighted_mean
from rotfed.spec import Group, SymmetrySpec, check_is_spec
from rotfed.tensors import Params, check_finite, squared_distance, to_work
from rotfed.transform import Transform, act, identity_transform

Loss = Callable[[Mapping[str, Tensor], Batch], Tensor]

_MATRICES = ("orthogonal", "centred_orthogonal")

# So many batches decide in `refine` whether a state is better than another, where it is given none for that.
_COMPARED = 4


def model_loss(model: nn.Module, class_counts: Sequence[float] | Tensor | None = None) -> Loss:
    """The loss of `model` with other parameters in place of its own, differentiable in them.

    Parameters
    ----------
    model
        A transformers model, which gives a loss where the batch holds labels. It is used as it stands: with dropout in
        training mode, without in evaluation mode.
    class_counts
        For classifiers: how many examples of each class the local data hold. The loss is then the cross entropy of
        logits + log(share of the class), so that an average is not drawn to the classes that one party has most of
        (logit adjustment, arXiv 2007.07314, eq. 10).

    The function takes parameters and a batch, the keyword arguments of the forward pass. It raises AlignmentError
    where the model gives no loss or has other classes than were counted, SpecError for a batch that the model cannot
    take. Raises AlignmentError for counts that are none.
    """
    log_shares = None if class_counts is None else _log_shares(class_counts)

    def loss(params: Mapping[str, Tensor], batch: Batch) -> Tensor:
        output = run(model, params, batch)
        value: Tensor | None = getattr(output, "loss", None)
        if value is None:
            raise AlignmentError(
                f"{type(model).__name__}: expected a loss, found none for a batch of {', '.join(batch)}; add labels to "
                "every batch, or pass a loss of your own"
            )
        if log_shares is None:
            return value
        if output.logits.shape[-1] != len(log_shares):
            raise AlignmentError(
                f"class_counts: expected {output.logits.shape[-1]}, one a class of the model, found {len(log_shares)}"
            )
        return nn.functional.cross_entropy(output.logits + log_shares.to(output.logits), batch["labels"])

    return loss


def _log_shares(class_counts: Sequence[float] | Tensor) -> Tensor:
    try:
        counts = torch.as_tensor(class_counts, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        counts = torch.tensor(torch.nan)
    if counts.ndim != 1 or not bool((counts >= 0).all()) or not bool(counts.sum().isfinite()):
        raise AlignmentError(f"class_counts: expected finite numbers, none below zero, found {class_counts!r}")
    # One more of each: the share of a class that is not there is small, not zero.
    return ((counts + 1) / (counts + 1).sum()).log()


class LearnedAlignment:
    """The average of several models, as a function of how all but the first are moved.

    Parameters
    ----------
    models
        Two or more mappings from parameter name to tensor, of equal names and shapes, with folded norms where `spec`
        asks for them. The first is the anchor, which stays where it is. Not mutated.
    spec
        The bound spec of all.
    starts
        The transforms of all models but the first to begin at, as `align` gives them; by default the identity, for
        models that are in one frame already.
    weights
        The models' shares of the average, equal by default.
    groups
        Names of the groups to learn, by default all rotations. Scales are learned where they are named; the others
        stay as they are at the start.

    `parameters` holds one tensor for each learned group, zero at the start. Where several parties train one alignment
    together, they alone have to travel. Its first dimension counts the models that move. Of a rotation it holds
    `(models, *batch, n (n - 1) / 2)`, the entries of a skew-symmetric matrix above its diagonal, row by row (of size
    n - 1 where the all-ones direction stays); of a rotary plane an angle in radians, of a scale a logarithm. Float64
    where the anchor is, else float32, on its device.

    Raises AlignmentError for weights of which a model has none, starts of another spec, models that differ or are not
    finite, and where there is nothing to learn.
    """

    def __init__(
        self,
        models: Iterable[Params],
        spec: SymmetrySpec,
        starts: Sequence[Transform] | None = None,
        weights: Sequence[float] | None = None,
        groups: Iterable[str] | None = None,
    ) -> None:
        check_is_spec(spec)
        models = alike(models)
        shares = normalised_weights(len(models), weights)
        if len(models) < 2 or min(shares) == 0:
            raise AlignmentError(
                f"models: expected at least two, each with a weight, found {len(models)} with {list(shares)}; "
                "leave out those that do not count"
            )
        for number, model in enumerate(models):
            check_finite(model, f"model {number}")
        self._starts = [identity_transform(spec) for _ in models[1:]] if starts is None else list(starts)
        fit = all(isinstance(start, Transform) and start.spec == spec for start in self._starts)
        if len(self._starts) != len(models) - 1 or not fit:
            raise AlignmentError(
                f"starts: expected a transform of the spec given for each of {len(models) - 1} models after the first, "
                f"found {len(self._starts)}, or others"
            )
        moved = [models[0], *(start.apply(model) for start, model in zip(self._starts, models[1:], strict=True))]
        self._average = weighted_mean(moved, shares)
        chosen = [spec.groups[name] for name in spec.select_groups(groups)]
        learned = [kind for kind in _LEARNABLE if kind != "scale" or groups is not None]
        wanted = {group.name for group in chosen if group.kind_name in learned}
        layout = lay_out(moved[0], spec)
        units = {unit.names: unit for unit in layout.units.values() if any(b.groups & wanted for b, _ in unit.blocks)}
        acting = {name for block in layout.blocks for name in block.groups}
        self._groups = [group for group in chosen if group.name in wanted & acting]
        if not self._groups:
            raise AlignmentError(
                f"groups: expected one that can be learned ({', '.join(_LEARNABLE)}), found "
                f"{', '.join(f'{group.name} ({group.kind_name})' for group in chosen) or 'none'}"
            )
        like = moved[0][next(iter(units))[0]]
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        # A transform is linear in the model that it moves, so that the shares are multiplied once.
        self._moving = [
            _Moving(
                unit,
                [
                    (to_work(gather(model, unit.names, unit.blocks[0][0].stacked)) * share).to(like.device, dtype)
                    for model, share in zip(moved, shares, strict=True)
                ],
            )
            for unit in units.values()
        ]
        self.parameters = {
            group.name: torch.zeros(len(self._starts), *_parameter_shape(group), dtype=dtype, device=like.device)
            for group in self._groups
        }

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Take over the values of another one's `parameters`.

        Raises AlignmentError, before anything is changed, where names or shapes differ or a value is not finite.
        """
        expected = {name: tuple(own.shape) for name, own in self.parameters.items()}
        found: object = type(parameters).__name__
        if isinstance(parameters, Mapping):
            found = {n: tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for n, t in parameters.items()}
        if found != expected:
            raise AlignmentError(
                f"parameters: expected {expected}, found {found}; learn the same groups of one spec everywhere"
            )
        check_finite(parameters, "parameters")
        for name, own in self.parameters.items():
            own.copy_(parameters[name].detach())

    def transforms(self) -> list[Transform]:
        """The transforms learned so far, of all models but the first.

        Their elements are exact to float64 whatever type the parameters have.
        """
        wide = self._elements({name: to_work(own) for name, own in self.parameters.items()})
        return [
            Transform(
                start.spec,
                {name: element[number].to(start.elements.get(name, element).device) for name, element in wide.items()},
            ).compose(start)
            for number, start in enumerate(self._starts)
        ]

    def merged(self, parameters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The average in the types of the anchor: under its own parameters, in tensors of its own, or differentiably
        under those given, where what does not move is shared with this alignment.
        """
        elements = self._elements(self.parameters if parameters is None else parameters)
        merged = {n: tensor.clone() if parameters is None else tensor for n, tensor in self._average.items()}
        for moving in self._moving:
            for name, tensor in moving.under(elements):
                merged[name] = tensor.to(merged[name].dtype)
        return merged

    def train(
        self,
        loss: Loss,
        batches: Iterable[Batch],
        learning_rate: float = 0.25,
        max_steps: int = 90,
        decay: bool = True,
    ) -> list[float]:
        """Take steps of gradient (Adam) on the loss of the average; changes `parameters` in place.

        Parameters
        ----------
        loss
            A function of parameters and a batch, as `model_loss` gives it.
        batches
            One for each step; gone through again where they are fewer, unless they are an iterator, which ends it.
        learning_rate
            About how far a first step turns, in radians, 1000 at most: each entry of an n x n generator changes by
            learning_rate / sqrt(n), so that one rate fits models of all sizes.
        max_steps
            How many steps to take.
        decay
            Whether the rate falls to zero, linearly over `max_steps`. False for a round of several.

        Returns the loss before each step; deterministic given the batches. Raises AlignmentError for options out of
        range, where there is no batch, and for a loss that is no finite number with a finite gradient; the parameters
        are then those before its step.
        """
        return list(self._steps(loss, _endless(batches), learning_rate, max_steps, decay))

    def _steps(
        self, loss: Loss, batches: Iterator[Batch], learning_rate: float, max_steps: int, decay: bool
    ) -> Iterator[float]:
        _check_options(learning_rate, max_steps=max_steps)
        if torch.is_inference_mode_enabled() or any(own.is_inference() for own in self.parameters.values()):
            raise AlignmentError("parameters: expected to learn, found inference mode; build and train outside of it")
        # These share their memory with `parameters`, which stay out of autograd.
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in self.parameters.items()}
        rates = [learning_rate * _rate(group) for group in self._groups]
        optimizer = torch.optim.Adam([{"params": [leaf], "lr": 0.0} for leaf in leaves.values()])
        for step, batch in enumerate(itertools.islice(batches, max_steps)):
            for options, rate in zip(optimizer.param_groups, rates, strict=True):
                options["lr"] = rate * (1 - step / max_steps) if decay else rate
            with torch.enable_grad():
                value = _value(loss, self.merged(leaves), batch, f"step {step}")
            if not value.requires_grad:
                raise AlignmentError(
                    f"loss: expected one with a gradient, found none (step {step}); compute it from what it is given"
                )
            # Not `backward`, which would also leave gradients in a model that `loss` holds.
            gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
            if not all(bool(gradient.isfinite().all()) for gradient in gradients):
                raise AlignmentError(f"loss: expected a finite gradient, found NaN or infinity (step {step})")
            for leaf, gradient in zip(leaves.values(), gradients, strict=True):
                leaf.grad = gradient
            optimizer.step()
            yield float(value.detach())

    def _elements(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the parameters stand for; identities where they are zero."""
        return {group.name: _LEARNABLE[group.kind_name](parameters[group.name], group.size) for group in self._groups}


@dataclass(frozen=True, eq=False)
class Refinement:
    """What `refine` found.

    `alignment` is the source in its new frame. Its distances are from the anchor; a refined model may be farther than
    an aligned one. `losses` are those of the average before each of `steps` steps, `seconds` the wall time of all,
    alignment included. A step costs an ordinary training step and, for moving the source, a sixth more.
    """

    alignment: Alignment
    losses: list[float]
    steps: int
    seconds: float


def refine(
    source: Params,
    anchor: Params,
    spec: SymmetrySpec,
    loss: Loss,
    batches: Iterable[Batch],
    *,
    share: float = 0.5,
    start: Transform | None = None,
    steps: int = 90,
    learning_rate: float = 0.25,
    groups: Iterable[str] | None = None,
    patience: int = 45,
    validation: Iterable[Batch] | None = None,
) -> Refinement:
    """Move `source` to where its average with `anchor` has the least loss on local data.

    Parameters
    ----------
    source, anchor, spec
        As for `align`, with folded norms where `spec` asks for them.
    share
        The source's share of the average, between 0 and 1.
    loss, batches, learning_rate
        As for `LearnedAlignment.train`. `batches` are the refining party's own data; 64 examples each are enough.
    start
        The transform to begin at, by default that of `align` with one sweep: more sweeps cost more than they gain here.
    steps
        How many steps to take at most.
    groups
        The groups to align, where there is no `start`, and to learn.
    patience
        The steps between two looks at the loss on `validation`. The first look that finds it no lower ends it all.
    validation
        The batches that decide which state is best, by default the first four of `batches`.

    Returns the state with the lowest loss among those looked at. The start is one of them, so that the loss on
    `validation` never rises. Nothing is mutated. Raises AlignmentError as `LearnedAlignment` and its `train` do.
    """
    begin = time.perf_counter()
    check_is_spec(spec)
    _check_options(learning_rate, steps=steps, patience=patience)
    chosen = spec.select_groups(groups) if groups is not None else None
    if start is None:
        start = align(source, anchor, spec, AlignOptions(groups=chosen, max_sweeps=1)).transform
    if not isinstance(share, int | float) or not 0 < share < 1:
        raise AlignmentError(f"share: expected a number between 0 and 1, found {share!r}")
    learned = LearnedAlignment([anchor, source], spec, [start], [1 - share, share], chosen)
    stream = _endless(batches)
    compared = list(validation) if validation is not None else list(itertools.islice(stream, _COMPARED))
    if validation is None:
        stream = itertools.chain(compared, stream)
    best, lowest = learned.transforms()[0], _mean_loss(learned, loss, compared)
    losses: list[float] = []
    for value in learned._steps(loss, stream, learning_rate, steps, decay=True):
        losses.append(value)
        if len(losses) % patience == 0:
            found = _mean_loss(learned, loss, compared)
            if found >= lowest:
                break
            best, lowest = learned.transforms()[0], found
    else:
        if len(losses) % patience and _mean_loss(learned, loss, compared) < lowest:
            best = learned.transforms()[0]
    params = best.apply(source)
    before, after = (math.sqrt(squared_distance(model, anchor)) for model in (source, params))
    alignment = Alignment(
        params, best, before, after, identity_share(best, lay_out(source, spec), AlignOptions(groups=chosen))
    )
    return Refinement(alignment, losses, len(losses), time.perf_counter() - begin)


@dataclass(frozen=True)
class _Moving:
    """A parameter, or a stack of them, that learned groups act on: the models' shares in the average, anchor first."""

    unit: Unit
    shares: list[Tensor]

    def under(self, elements: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The names and the averaged tensors, with all but the first moved by the elements in their places."""
        average = self.shares[0]
        for number, share in enumerate(self.shares[1:]):
            average = average + self._moved(share, {name: element[number] for name, element in elements.items()})
        stacked = self.unit.blocks[0][0].stacked
        yield from zip(self.unit.names, average.unbind() if stacked else [average], strict=True)

    def _moved(self, share: Tensor, elements: Mapping[str, Tensor]) -> Tensor:
        whole = self.unit.blocks[0][0].size == share.numel()
        moved = share if whole else share.clone()
        for block, position in self.unit.blocks:
            view = block.view(share).unsqueeze(0)
            found = act(view, block.actions, elements, (block.layers[position],)).squeeze(0)
            if whole:
                return found.reshape(share.shape)
            block.view(moved).copy_(found)
        return moved


def _cayley(packed: Tensor, n: int) -> Tensor:
    """The rotations (I + S/2) (I - S/2)^-1 of skew-symmetric matrices S with `packed` above the diagonal."""
    row, column = torch.triu_indices(n, n, 1, device=packed.device)
    upper = packed.new_zeros(*packed.shape[:-1], n, n)
    upper[..., row, column] = packed
    eye = torch.eye(n, dtype=packed.dtype, device=packed.device)
    inverse: Tensor = torch.linalg.inv(eye - (upper - upper.mT) / 2)
    return 2 * inverse - eye


def _centred_cayley(packed: Tensor, n: int) -> Tensor:
    """Rotations that keep the all-ones direction: `_cayley` in a basis of what is orthogonal to it."""
    # The last n - 1 columns of the Householder matrix that maps the first unit vector to that direction.
    v = torch.full((n,), n**-0.5, dtype=packed.dtype, device=packed.device)
    v[0] -= 1
    eye = torch.eye(n, dtype=packed.dtype, device=packed.device)
    rest = (eye - 2 * torch.outer(v, v) / v.dot(v))[:, 1:]
    return rest @ _cayley(packed, n - 1) @ rest.mT + 1 / n


_LEARNABLE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "orthogonal": _cayley,
    "centred_orthogonal": _centred_cayley,
    "rope_planes": lambda angle, n: angle,
    "scale": lambda logarithm, n: logarithm.exp(),
}
"""By kind, the elements that parameters stand for."""


def _parameter_shape(group: Group) -> tuple[int, ...]:
    if group.kind_name not in _MATRICES:
        return group.kind.element_shape(group.batch, group.size)
    n = group.size - 1 if group.kind_name == "centred_orthogonal" else group.size
    return (*group.batch, n * (n - 1) // 2)


def _rate(group: Group) -> float:
    """How much of the learning rate an entry of the group's parameters gets."""
    # A random skew-symmetric matrix with entries of size e turns by some e sqrt(n); a scale is to change far slower.
    return 1 / 8 if group.kind_name == "scale" else float(group.size**-0.5)


def _endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, from the beginning again after the last; an iterator has no beginning to go back to."""
    if batches is None or isinstance(batches, Mapping):
        raise AlignmentError(f"batches: expected several, each a mapping, found {type(batches).__name__}")
    for number in itertools.count():
        found = False
        for batch in batches:
            found = True
            yield batch
        if not found and not number:
            raise AlignmentError("batches: expected at least one, found none")
        if not found or batches is iter(batches):
            return


def _mean_loss(learned: LearnedAlignment, loss: Loss, batches: Sequence[Batch]) -> float:
    if not batches:
        raise AlignmentError(
            "validation: expected at least one batch, found none; leave it out to use training batches"
        )
    with torch.no_grad():
        merged = learned.merged()
        return sum(float(_value(loss, merged, batch, "a batch that decides")) for batch in batches) / len(batches)


def _value(loss: Loss, params: Params, batch: Batch, place: str) -> Tensor:
    """The loss of a batch. Raises AlignmentError where it is no finite number."""
    value = loss(params, batch)
    if not isinstance(value, Tensor) or value.numel() != 1 or not bool(value.isfinite().all()):
        found = textwrap.shorten(repr(value), 100, placeholder=" ...")
        raise AlignmentError(
            f"loss: expected a tensor of one finite number, found {found} ({place}); check batches and learning rate"
        )
    return value


def _check_options(learning_rate: float, **steps: int) -> None:
    if not isinstance(learning_rate, int | float) or not 0 < learning_rate <= 1000:
        raise AlignmentError(f"learning_rate: expected a number above zero, at most 1000, found {learning_rate!r}")
    for name, value in steps.items():
        if not isinstance(value, int) or value < 1:
            raise AlignmentError(f"{name}: expected a whole number, at least 1, found {value!r}")
