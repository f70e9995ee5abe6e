"""What a client trains: a model with an adapter, and everybody's examples, held in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from peft import PeftModel

from client.data import Examples
from client.models import Encoder


@dataclass(frozen=True, eq=False)
class Task:
    """A federation's data, and its model as everybody loads it, with a new adapter: copied before it is changed.

    `encode` makes a batch of inputs into the keyword arguments of `model`.
    """

    model: PeftModel
    encode: Encoder
    clients: Sequence[Examples]
    held_out: Examples
