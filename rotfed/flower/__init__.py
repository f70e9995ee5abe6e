"""rotfed inside Flower: strategies and a start for servers, mods and a party for clients, and the codec between."""

from rotfed.flower.adapters import AdapterStrategy
from rotfed.flower.mods import adapter_mod, align_mod
from rotfed.flower.multi_party import MultiPartyStart, StartReport
from rotfed.flower.party import register_party
from rotfed.flower.records import to_record, to_state_dict
from rotfed.flower.reports import AdapterReport, ClientReport, RoundReport
from rotfed.flower.strategy import AlignedStrategy, RotFedAvg

__all__ = [
    "AdapterReport",
    "AdapterStrategy",
    "AlignedStrategy",
    "ClientReport",
    "MultiPartyStart",
    "RotFedAvg",
    "RoundReport",
    "StartReport",
    "adapter_mod",
    "align_mod",
    "register_party",
    "to_record",
    "to_state_dict",
]
