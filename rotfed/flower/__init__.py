"""rotfed inside Flower: a strategy for servers, a mod for clients, and the codec between them."""

from rotfed.flower.mods import align_mod
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.reports import ClientReport, RoundReport
from rotfed.flower.strategy import AlignedStrategy, RotFedAvg

__all__ = [
    "AlignedStrategy",
    "ClientReport",
    "RotFedAvg",
    "RoundReport",
    "align_mod",
    "to_record",
    "to_state_dict",
]
