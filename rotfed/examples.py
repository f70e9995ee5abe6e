"""Small models of every architecture that rotfed has a spec for, built from what the spec files say of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rotfed.checks import randomize, with_plain_experts
from rotfed.library import spec_files
from rotfed.specfile import ExampleTable, SpecFile


@dataclass(frozen=True)
class Example:
    """One variant of an architecture: its configuration and the transformers classes to build from it.

    The first of `classes` is the backbone, the others add task heads.
    """

    name: str
    family: str
    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ("AutoModel",)

    def config(self, **changes: Any) -> Any:
        """The transformers configuration of the variant."""
        import transformers

        return transformers.AutoConfig.for_model(self.model_type, **{**self.values, **changes})

    def model(self, class_name: str | None = None, seed: int = 0, **changes: Any) -> nn.Module:
        """A model of the variant with random weights, norms and biases, in float32."""
        import transformers

        model_class: Any = getattr(transformers, class_name or self.classes[0])
        build = getattr(model_class, "from_config", None) or model_class._from_config
        model = with_plain_experts(build(self.config(**changes)))
        return randomize(model, torch.Generator().manual_seed(seed)).eval()


def examples() -> dict[str, Example]:
    """Every example by name: what the spec files list, and a plain one for each `model_type` that they list none of."""
    return {example.name: example for family, file in spec_files().items() for example in _examples_of(family, file)}


def _examples_of(family: str, file: SpecFile) -> Iterator[Example]:
    for model_type in file.model_type:
        own = [table for table in file.examples if table.model_type == model_type]
        for table in own or [ExampleTable(model_type)]:
            values = _merged(file.tiny, table.config)
            yield Example(table.name or model_type, family, model_type, values, table.classes)


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`common` with `own` on top, tables inside merged likewise (the two towers of a model)."""
    merged = {**common, **own}
    for key in common.keys() & own.keys():
        if isinstance(common[key], dict) and isinstance(own[key], dict):
            merged[key] = _merged(common[key], own[key])
    return merged
