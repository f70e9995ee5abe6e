"""Certificates: where one says that all units stay in their places, brute force finds nothing better."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import rotfed
from rotfed.align import Pair
from rotfed.library import bind_spec
from rotfed.spec import SymmetrySpec
from rotfed.specfile import parse_spec_file

Params = dict[str, Tensor]

_HEADER = """
model_type = ["units"]
layers = "{layers}"
[sizes]
d = "3"
n = "{n}"
k = "2"
[groups]
"""

# By name: number of layers, groups, parameters, their shapes, and the groups that turn.
_SPECS: dict[str, tuple[int, str, str, dict[str, tuple[int, ...]], tuple[str, ...]]] = {
    "plain": (
        1,
        'units = { kind = "permutation", axis = "n", per = ["layer"] }',
        '"h.{layer}.up" = "units d"\n"h.{layer}.down" = "d units"\n"h.{layer}.bias" = "units"',
        {"up": (4, 3), "down": (3, 4), "bias": (4,)},
        (),
    ),
    "turning": (
        1,
        'heads = { kind = "permutation", axis = "n", per = ["layer"] }\n'
        'qk = { kind = "orthogonal", axis = "k", per = ["layer", "n"] }\n'
        'vo = { kind = "orthogonal", axis = "k", per = ["layer", "n"] }',
        '"h.{layer}.q" = "(heads qk) d"\n"h.{layer}.k" = "(heads qk) d"\n"h.{layer}.v" = "d (heads vo)"',
        {"q": (6, 3), "k": (6, 3), "v": (3, 6)},
        ("qk", "vo"),
    ),
    "turning, one for all layers": (
        2,
        'heads = { kind = "permutation", axis = "n" }\nqk = { kind = "orthogonal", axis = "k", per = ["layer", "n"] }',
        '"h.{layer}.q" = "(heads qk) d"\n"table" = "d heads"',
        {"q": (6, 3), "table": (3, 3)},
        ("qk",),
    ),
    "nested, turning together": (
        1,
        'kv = { kind = "permutation", axis = "n", per = ["layer"] }\n'
        'q_heads = { kind = "permutation", axis = "g", per = ["layer", "n"] }\n'
        'qk = { kind = "orthogonal", axis = "k", per = ["layer", "n"] }\n'
        'vo = { kind = "orthogonal", axis = "k", per = ["layer", "n"] }',
        '"h.{layer}.q" = "(kv q_heads qk) d"\n"h.{layer}.k" = "(kv qk) d"\n'
        '"h.{layer}.v" = "(kv vo) d"\n"h.{layer}.o" = "d (kv q_heads vo)"',
        {"q": (8, 3), "k": (4, 3), "v": (4, 3), "o": (3, 8)},
        ("qk", "vo"),
    ),
    "nested, plain": (
        1,
        'experts = { kind = "permutation", axis = "n", per = ["layer"] }\n'
        'units = { kind = "permutation", axis = "g", per = ["layer", "n"] }',
        '"h.{layer}.router" = "experts d"\n"h.{layer}.up" = "experts units d"\n"h.{layer}.down" = "experts d units"',
        {"router": (2, 3), "up": (2, 2, 3), "down": (2, 3, 2)},
        (),
    ),
}


def spec_of(case: str) -> SymmetrySpec:
    layers, groups, params, *_ = _SPECS[case]
    n = {"plain": 4, "turning": 3, "nested": 2}[case.split(",")[0]]
    header = _HEADER.format(layers=layers, n=n)
    if case.startswith("nested"):
        header = header.replace('k = "2"', 'k = "2"\ng = "2"')
    return bind_spec(parse_spec_file(f"{header}{groups}\n[params]\n{params}\n", "units.toml"), "units", "units", {})


SPECS = {case: spec_of(case) for case in _SPECS}


def drawn(case: str, generator: torch.Generator, scales: dict[str, float]) -> Params:
    layers, *_, shapes, _ = _SPECS[case]
    found = {}
    for name, shape in shapes.items():
        for key in [name] if name == "table" else [f"h.{layer}.{name}" for layer in range(layers)]:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            found[key] = scales.get(name, 1.0) * values
    return found


def all_permutations(spec: SymmetrySpec) -> Iterator[dict[str, Tensor]]:
    """Every choice of an element of all permutations of a spec."""
    choices = []
    for group in spec.groups.values():
        if group.kind_name == "permutation":
            orders = list(itertools.permutations(range(group.size)))
            times = group.kind.identity(group.batch, group.size).numel() // group.size
            stacks = itertools.product(orders, repeat=times)
            choices.append([(group.name, torch.tensor(s).reshape(*group.batch, group.size)) for s in stacks])
    for chosen in itertools.product(*choices):
        yield dict(chosen)


def best_by_force(
    spec: SymmetrySpec, source: Params, anchor: Params, turns: tuple[str, ...], reflections: bool
) -> tuple[float, float]:
    """The least distance with all units in their places, and over all permutations; each turn in closed form."""
    found = []
    options = rotfed.AlignOptions(groups=turns, reflections=reflections)
    for elements in all_permutations(spec):
        moved = rotfed.Transform(spec, elements).apply(source)
        found.append(rotfed.align(moved, anchor, spec, options).distance_after)
    return found[0], min(found)


def certified(source: Params, anchor: rotfed.Anchor, options: rotfed.AlignOptions) -> bool:
    """Whether certificates say that all units stay in their places."""
    pair = Pair(source, anchor, options)
    descents = [(pair._descent(component), pair._touched(component)) for component in pair.components]
    claims = [descent.stays(pieces) for descent, pieces in descents if descent.permutations]
    assert claims
    return all(claims)


def adversary(case: str, number: int, generator: torch.Generator) -> tuple[Params, Params]:
    """A source and an anchor that some other order of units almost fits, or fits better: near-ties."""
    spec, turns = SPECS[case], _SPECS[case][-1]
    scales = {name: float(10 ** (-2 * torch.rand((), generator=generator))) for name in _SPECS[case][3]}
    anchor = drawn(case, generator, scales)
    if number % 4 == 0:
        noise = 10 ** float(-2 * torch.rand((), generator=generator))
        return {
            n: t + noise * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in anchor.items()
        }, anchor
    # The anchor is made nearly symmetric: a little away from itself in another order, turned.
    full = rotfed.random_transform(spec, generator).elements
    orders = list(all_permutations(spec))
    order = orders[int(torch.randint(1, len(orders), (), generator=generator))]
    elements = {**order, **({name: full[name] for name in turns} if number % 4 > 1 else {})}
    if number % 2:
        # A reflection undoes itself, as an exchange of two units does.
        for name in turns:
            axis = torch.randn(full[name].shape[:-1], generator=generator, dtype=torch.float64)
            axis = axis / axis.norm(dim=-1, keepdim=True)
            mirror = torch.eye(2, dtype=torch.float64) - 2 * axis[..., :, None] * axis[..., None, :]
            elements[name] = mirror[:, :1].expand_as(mirror).clone()
    other = rotfed.Transform(spec, elements)
    near = 10 ** float(-3 * torch.rand((), generator=generator))
    twin = other.apply(anchor)
    anchor = {n: (1 + near) / 2 * t + (1 - near) / 2 * twin[n] for n, t in anchor.items()}
    twin = other.apply(anchor)
    share = float(torch.rand((), generator=generator))
    return {n: (1 - share) * t + share * twin[n] for n, t in anchor.items()}, anchor


@pytest.mark.parametrize("case", _SPECS)
def test_a_certificate_never_claims_what_brute_force_refutes(case: str, generator: torch.Generator) -> None:
    spec, turns = SPECS[case], _SPECS[case][-1]
    claimed = better = 0
    for number in range(60):
        source, anchor = adversary(case, number, generator)
        shared = rotfed.Anchor(anchor, spec)
        # What less freedom proved must not be believed under more.
        certified(source, shared, rotfed.AlignOptions(strength=0.3, reflections=False))
        for reflections in (False, True) if turns else (True,):
            in_place, least = best_by_force(spec, source, anchor, turns, reflections)
            refuted = least < in_place * (1 - 1e-9)
            said = certified(source, shared, rotfed.AlignOptions(reflections=reflections))
            assert not (said and refuted), (number, reflections, in_place, least)
            claimed, better = claimed + said, better + refuted
    # Both verdicts were reached.
    assert claimed >= 5 and better >= 10, (claimed, better)
