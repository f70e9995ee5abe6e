"""Moments: contracted once, they give what a plain computation over moved weights gives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rotfed
from rotfed.align import Pair
from rotfed.groups import KINDS
from rotfed.library import bind_spec
from rotfed.moments import Piece, contract, merged, mixed_axes, renewed, solve
from rotfed.solvers import NO_PULL
from rotfed.spec import SymmetrySpec
from rotfed.specfile import parse_spec_file
from rotfed.transform import act
from tests.models import backbone, distance, small_params, small_spec

SEED = st.integers(0, 2**16)

# Every kind, direct and dual, within layers and shared, under permutations of heads, of experts and of units in them.
_MIXED = """
model_type = ["mixed"]
layers = "3"
[sizes]
d_model = "4"
heads = "3"
head_dim = "2"
d_ff = "3"
planes = "2"
pair = "2"
experts = "2"
[groups]
heads = { kind = "permutation", axis = "heads", per = ["layer"] }
experts = { kind = "permutation", axis = "experts", per = ["layer"] }
units = { kind = "permutation", axis = "d_ff", per = ["layer", "experts"] }
qk = { kind = "rope_planes", axis = "pair", per = ["layer", "heads", "planes"] }
vo = { kind = "orthogonal", axis = "head_dim", per = ["layer", "heads"] }
vo_scale = { kind = "scale", per = ["layer", "heads"] }
gain = { kind = "scale", per = ["layer", "experts", "d_ff"] }
flip = { kind = "sign", per = ["layer", "heads"] }
[params]
"h.{layer}.q" = "(heads planes qk) d_model"
"h.{layer}.k" = "(heads planes qk) d_model"
"h.{layer}.v" = "(heads vo*vo_scale) d_model"
"h.{layer}.v_bias" = "(heads vo*vo_scale)"
"h.{layer}.o" = "d_model (heads vo/vo_scale)"
"h.{layer}.up" = "experts units*gain d_model"
"h.{layer}.down" = "experts d_model units/gain"
"h.{layer}.gate" = "experts d_model"
"h.{layer}.fused" = "[heads vo/vo_scale | 2] d_model"
"h.{layer}.turned" = "heads*flip d_model"
"""
_SHAPES = {
    "q": (12, 4),
    "k": (12, 4),
    "v": (6, 4),
    "v_bias": (6,),
    "o": (4, 6),
    "up": (2, 3, 4),
    "down": (2, 4, 3),
    "gate": (2, 4),
    "fused": (8, 4),
    "turned": (3, 4),
}


def mixed_spec() -> SymmetrySpec:
    return bind_spec(parse_spec_file(_MIXED, "mixed.toml"), "mixed", "mixed", {})


def mixed_params(generator: torch.Generator, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {
        f"h.{layer}.{name}": torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for layer in range(3)
        for name, shape in _SHAPES.items()
    }


MIXED, SMALL = mixed_spec(), small_spec()
CASES = {"mixed": (MIXED, mixed_params), "small": (SMALL, small_params)}


def pair_of(case: str, generator: torch.Generator, dtype: torch.dtype, layers: list[int] | None = None) -> Pair:
    spec, params = CASES[case]
    source, anchor = params(generator, dtype), params(generator, dtype)
    return Pair(source, rotfed.Anchor(anchor, spec), rotfed.AlignOptions(layers=layers))


def parts_of(pair: Pair) -> list[tuple[str, ...]]:
    """Sets of groups of which one axis of a block at most is mixed: within layers, and what all layers share apart."""
    layered = [group.name for group in pair.spec.groups.values() if group.layered]
    return [*pair.spec.components(layered), *((name,) for name in pair.spec.groups if name not in layered)]


def plain(piece: Piece, elements: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Source and anchor of a piece in float64, the source moved by elements."""
    source, anchor = (torch.cat([chunk[side].double() for chunk in piece.chunks()]) for side in (1, 2))
    return act(source, piece.actions, elements, piece.layers), anchor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [None, [1]])
@pytest.mark.parametrize("case", CASES)
def test_terms_give_the_distances_and_products_of_moved_weights(
    case: str, layers: list[int] | None, dtype: torch.dtype, generator: torch.Generator
) -> None:
    pair = pair_of(case, generator, dtype, layers)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    checked = 0
    for component in parts_of(pair):
        permutations = [name for name in component if pair.spec.groups[name].kind_name == "permutation"]
        drawn = rotfed.random_transform(pair.spec, generator).elements
        known = {name: drawn[name] for name in permutations}
        rest = {name: drawn[name] for name in component if name not in known}
        for piece in (p.under(known) for p in pair.pieces if p.touched_by(component)):
            term = contract(piece, component)
            still, anchor = plain(piece, {})
            moved, _ = plain(piece, rest)
            size = float(anchor.square().sum() + moved.square().sum())
            assert abs(float(term.distances({}).sum() - (still - anchor).square().sum())) <= tolerance * size
            assert abs(float(term.distances(rest).sum() - (moved - anchor).square().sum())) <= tolerance * size
            longer = float(moved.square().sum() - still.square().sum())
            assert abs(term.longer(rest) - longer) <= tolerance * size
            if term.inner is not None:
                assert abs(float(term.products(rest).sum() - (moved * anchor).sum())) <= tolerance * size
                both = float(still.square().sum() + anchor.square().sum())
                assert abs(float(term.energy.sum()) - both) <= tolerance * size
            checked += 1
    assert checked >= 6


@settings(max_examples=15)
@given(SEED, st.sampled_from(sorted(CASES)))
def test_a_solution_is_no_farther_than_any_other_element(seed: int, case: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    pair = pair_of(case, generator, torch.float64)
    checked = 0
    for component in parts_of(pair):
        pieces = [p for p in pair.pieces if p.touched_by(component)]
        assert all(len(mixed_axes(p, component)) < 2 for p in pieces)
        terms = merged(contract(p, component) for p in pieces)
        held = {n: e for n, e in rotfed.random_transform(pair.spec, generator).elements.items() if n in component}
        held |= {n: pair.identity(n) for n in component if pair.spec.groups[n].kind_name == "permutation"}
        for name in component:
            group = pair.spec.groups[name]
            if group.kind_name == "permutation":
                continue
            best = solve(group, terms, held, NO_PULL, True, 1e-13)
            group.kind.validate(best, group.batch, group.size, name)
            reached = math.fsum(float(t.distances({**held, name: best}).sum()) for t in terms)
            rivals = [held[name], pair.identity(name), group.kind.compose(held[name], best)]
            rivals += [group.kind.random(group.batch, group.size, generator) for _ in range(5)]
            for rival in rivals:
                found = math.fsum(float(t.distances({**held, name: rival}).sum()) for t in terms)
                assert reached <= found * (1 + 1e-9) + 1e-9
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_renewed_terms_are_those_of_the_turned_source(dtype: torch.dtype, generator: torch.Generator) -> None:
    pair = pair_of("small", generator, dtype)
    turned = {"shared": rotfed.random_transform(pair.spec, generator).elements["shared"]}
    inside = ["qk", "qk_scale"]
    pieces = [p for p in pair.pieces if p.touched_by(inside) and p.touched_by(["shared"])]
    assert len(pieces) == 2
    for piece in pieces:
        again = renewed(contract(piece, inside), piece.under(turned), inside)
        fresh = contract(piece.under(turned), inside)
        for name in ("inner", "distance2", "norm2"):
            torch.testing.assert_close(getattr(again, name), getattr(fresh, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["llama", "mixtral", "t5", "albert", "gpt2", "bert"])
def test_what_is_told_of_a_real_model_is_what_its_weights_say(case: str) -> None:
    spec, anchor = backbone(case)
    _, source = backbone(case, seed=1)
    pair = Pair(source, rotfed.Anchor(anchor, spec))
    found = pair.solved()
    for component, solved in found.items():
        moved = pair.transform([solved]).apply(source)
        change = distance(moved, anchor) ** 2 - distance(source, anchor) ** 2
        assert solved.after - solved.before == pytest.approx(change, rel=1e-9, abs=1e-9), component
    assert pair.distance2 == pytest.approx(distance(source, anchor) ** 2, rel=1e-12)


def test_every_kind_is_among_the_cases() -> None:
    kinds = {group.kind_name for spec, _ in CASES.values() for group in spec.groups.values()}
    assert kinds == set(KINDS) - {"centred_orthogonal"}
