"""Low-rank adapters: read by PEFT's names, aggregated as the mean of their products."""

from rotfed.adapters.aggregate import METHODS, Aggregated, aggregate_adapters, fit_adapter
from rotfed.adapters.client import add_base_delta, train_factors
from rotfed.adapters.spec import AdapterSpec, load_adapter_spec

__all__ = [
    "METHODS",
    "AdapterSpec",
    "Aggregated",
    "add_base_delta",
    "aggregate_adapters",
    "fit_adapter",
    "load_adapter_spec",
    "train_factors",
]
