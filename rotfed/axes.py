"""Axis strings: one short text that is a parameter's shape, its shape check and the groups that act on it.

    axes    := axis*                          one axis of the tensor after another, separated by spaces
    axis    := factor | "(" factor+ ")"
    factor  := atom | "[" factor+ ("|" factor+)* "]"
    atom    := (NAME | NUMBER | "_") ("*" GROUP | "/" GROUP)*

`(heads qk)` is one axis of size heads x qk; `[heads qk | heads vo]` one axis that concatenates two such parts;
`(heads [qk | qk | vo])` one that does so inside every head; `_` an axis of any size. An atom that names a group is
acted on by it; `*g` lets the group g act as well, `/g` its dual.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rotfed.errors import SpecError

_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,18}(?![0-9]))|(?P<mark>[()\[\]|*/]))")

# Far more than any architecture concatenates; the parts of an axis string are all their combinations.
_MOST_PIECES = 16


@dataclass(frozen=True)
class Atom:
    """One factor of an axis: a size or a group by name, and the further groups that act on it (`True`: the dual)."""

    name: str
    actions: tuple[tuple[str, bool], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names in it: its own, then those of the groups after `*` and `/`."""
        return (self.name, *(group for group, _ in self.actions))


@dataclass(frozen=True)
class Concat:
    """A factor of an axis that lays several products end to end."""

    alternatives: tuple["Axis", ...]


Factor = Atom | Concat
Axis = tuple[Factor, ...]

ANY: Axis = (Atom("_"),)
"""The axis that may have any size."""


@dataclass(frozen=True)
class Step:
    """One step into a tensor: `length` entries of dimension `dim` from `start` on, split into `sizes`. Gives a view."""

    dim: int
    start: int
    length: int
    sizes: tuple[int, ...]


def parse_axes(text: str) -> tuple[Axis, ...]:
    """Parse an axis string. Raises SpecError with the place of a fault."""
    return _Parser(text).parse()


def size_of(axis: Axis, atom_size: Callable[[Atom], int]) -> int:
    """The number of entries along an axis."""
    sizes = (
        atom_size(factor) if isinstance(factor, Atom) else sum(size_of(a, atom_size) for a in factor.alternatives)
        for factor in axis
    )
    return math.prod(sizes)


def atoms_of(axes: tuple[Axis, ...]) -> Iterator[Atom]:
    """Every atom, in the order of the axis string."""
    for factor in itertools.chain.from_iterable(axes):
        if isinstance(factor, Atom):
            yield factor
        else:
            yield from atoms_of(factor.alternatives)


def parts(axes: tuple[Axis, ...]) -> Iterator[tuple[Atom, ...]]:
    """The rectangular parts of a parameter, as atoms: one alternative of every concatenation, in all combinations."""

    def of_factor(factor: Factor) -> list[tuple[Atom, ...]]:
        return [(factor,)] if isinstance(factor, Atom) else [part for a in factor.alternatives for part in parts((a,))]

    for chosen in itertools.product(*(of_factor(factor) for axis in axes for factor in axis)):
        yield tuple(itertools.chain.from_iterable(chosen))


def cuts(axis: Axis, dim: int, atom_size: Callable[[Atom], int]) -> list[tuple[tuple[Atom, ...], tuple[Step, ...]]]:
    """The parts of an axis that have a size, each with the steps that lead to it from a tensor's dimension `dim`."""
    length = size_of(axis, atom_size)
    return _cuts(axis, dim, 0, length, atom_size)


def _cuts(
    axis: Axis, dim: int, start: int, length: int, atom_size: Callable[[Atom], int]
) -> list[tuple[tuple[Atom, ...], tuple[Step, ...]]]:
    sizes = tuple(size_of((factor,), atom_size) for factor in axis)
    found: list[tuple[tuple[Atom, ...], tuple[Step, ...]]] = [((), (Step(dim, start, length, sizes),))]
    # From the last factor to the first, so that the dimensions still to be cut keep their numbers.
    for position in reversed(range(len(axis))):
        factor = axis[position]
        if isinstance(factor, Atom):
            found = [((factor, *atoms), steps) for atoms, steps in found]
            continue
        inner = []
        begin = 0
        for alternative in factor.alternatives:
            extent = size_of(alternative, atom_size)
            if extent:
                inner += _cuts(alternative, dim + position, begin, extent, atom_size)
            begin += extent
        found = [((*first, *atoms), (*steps, *more)) for first, more in inner for atoms, steps in found]
    return found


def rename_atoms(axes: tuple[Axis, ...], rename: Callable[[Atom], Atom]) -> tuple[Axis, ...]:
    """The same axes with every atom replaced."""

    def of_factor(factor: Factor) -> Factor:
        return rename(factor) if isinstance(factor, Atom) else Concat(rename_atoms(factor.alternatives, rename))

    return tuple(tuple(of_factor(factor) for factor in axis) for axis in axes)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.fault(f"found {text[position:].split()[0][:40]!r}")
            self.tokens.append(match.group("word") or match.group("mark"))
            position = match.end()
        if len([token for token in self.tokens if token in "[|"]) > _MOST_PIECES:
            raise self.fault(f"found more than {_MOST_PIECES} '[' and '|'")
        self.next = 0

    def fault(self, found: str) -> SpecError:
        text = self.text[:200]
        return SpecError(f"axis string {text!r}: {found}; expected names, (a b), [a | b], a*group or a/group")

    def peek(self) -> str:
        return self.tokens[self.next] if self.next < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.peek()
        if not token or (expected and token != expected):
            wanted = f"expected {expected!r}, " if expected else ""
            raise self.fault(f"{wanted}found {token!r}" if token else f"{wanted}found its end")
        self.next += 1
        return token

    def parse(self) -> tuple[Axis, ...]:
        axes = []
        while self.peek():
            axes.append(self.axis())
        return tuple(axes)

    def axis(self) -> Axis:
        if self.peek() != "(":
            return (self.factor(),)
        self.take("(")
        product = self.product()
        self.take(")")
        return product

    def product(self) -> Axis:
        factors = [self.factor()]
        while self.peek() and self.peek() not in ")]|":
            factors.append(self.factor())
        return tuple(factors)

    def factor(self) -> Factor:
        if self.peek() != "[":
            return self.atom()
        self.take("[")
        alternatives = [self.product()]
        while self.peek() == "|":
            self.take("|")
            alternatives.append(self.product())
        self.take("]")
        return Concat(tuple(alternatives))

    def atom(self) -> Atom:
        name = self.take()
        if name in "()[]|*/":
            raise self.fault(f"found {name!r} where a name should stand")
        actions = []
        while self.peek() in ("*", "/"):
            dual = self.take() == "/"
            actions.append((self.take(), dual))
        return Atom(name, tuple(actions))
