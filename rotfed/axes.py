"""Axis strings: one short text that is a parameter's shape, its shape check and the groups that act on it.

    axes    := axis*                          one axis of the tensor after another, separated by spaces
    axis    := atom | "(" atom+ ")" | "[" atom+ ("|" atom+)* "]"
    atom    := (NAME | NUMBER | "_") ("*" GROUP | "/" GROUP)*

`(heads qk)` is one axis of size heads x qk; `[heads qk | heads vo]` one axis that concatenates two such parts; `_`
an axis of any size. An atom that names a group is acted on by it; `*g` lets the group g act as well, `/g` its dual.
"""

import re
from dataclasses import dataclass

from rotfed.errors import SpecError

_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z_][A-Za-z0-9_]*|\d+)|(?P<mark>[()\[\]|*/]))")


@dataclass(frozen=True)
class Atom:
    """One factor of an axis: a size or a group by name, and the further groups that act on it (`True`: the dual)."""

    name: str
    actions: tuple[tuple[str, bool], ...] = ()


Segment = tuple[Atom, ...]
Axis = tuple[Segment, ...]


def parse_axes(text: str) -> tuple[Axis, ...]:
    """Parse an axis string into axes of concatenated segments of atoms. Raises SpecError with the place of a fault."""
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.fault(f"found {text[position:].split()[0]!r}")
            self.tokens.append(match.group("word") or match.group("mark"))
            position = match.end()
        self.next = 0

    def fault(self, found: str) -> SpecError:
        return SpecError(f"axis string {self.text!r}: {found}; expected names, (a b), [a | b], a*group or a/group")

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
        if self.peek() == "(":
            self.take("(")
            segment = self.segment()
            self.take(")")
            return (segment,)
        if self.peek() == "[":
            self.take("[")
            segments = [self.segment()]
            while self.peek() == "|":
                self.take("|")
                segments.append(self.segment())
            self.take("]")
            return tuple(segments)
        return ((self.atom(),),)

    def segment(self) -> Segment:
        atoms = [self.atom()]
        while self.peek() and self.peek() not in ")]|":
            atoms.append(self.atom())
        return tuple(atoms)

    def atom(self) -> Atom:
        name = self.take()
        if name in "()[]|*/":
            raise self.fault(f"found {name!r} where a name should stand")
        actions = []
        while self.peek() in ("*", "/"):
            dual = self.take() == "/"
            actions.append((self.take(), dual))
        return Atom(name, tuple(actions))
