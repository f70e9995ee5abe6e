"""rotfed inside Flower: a strategy and a start for servers, a mod and a party for clients, and the codec between."""

from rotfed.flower.mods import align_mod
from rotfed.flower.multi_party import MultiPartyStart, StartReport
from rotfed.flower.party import register_party
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.reports import AdapterReport, ClientReport, RoundReport
from rotfed.flower.strategy import AlignedStrategy, RotFedAvg

__all__ = [
    "AdapterReport",
    "AlignedStrategy",
    "ClientReport",
    "MultiPartyStart",
    "RotFedAvg",
    "RoundReport",
    "StartReport",
    "align_mod",
    "register_party",
    "to_record",
    "to_state_dict",
]
