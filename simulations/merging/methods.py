"""How several models become one, by the name that the tables give it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import rotfed
from simulations.merging.parties import Params

PLAIN, PAPER, PERMUTATIONS = "plain mean", "rotations and FFN (the paper)", "permutations (Git Re-Basin)"
INSIDE, DATA_FREE, LEARNED = "rotfed without the residual stream", "rotfed", "rotfed, learned"


@dataclass(frozen=True, eq=False)
class Method:
    """The groups of a spec under which models are aligned by their weights; no spec, no alignment."""

    spec: rotfed.SymmetrySpec | None
    groups: Sequence[str] | None = None

    def merge(
        self, models: Sequence[Params], anchor: str = "medoid", weights: Sequence[float] | None = None
    ) -> dict[str, Tensor]:
        """The weighted mean of the models in one frame."""
        if self.spec is None:
            return rotfed.weighted_mean(models, weights)
        return rotfed.merge(models, self.spec, weights, anchor, options=rotfed.AlignOptions(groups=self.groups))

    def align(self, source: Params, anchor: Params) -> tuple[Params, Params]:
        """The moved source and the anchor: between them lies what `merge` makes of the two."""
        if self.spec is None:
            return source, anchor
        anchor = rotfed.fold_norms(anchor, self.spec) if self.spec.residual else anchor
        source = rotfed.fold_norms(source, self.spec) if self.spec.residual else source
        return rotfed.align(source, anchor, self.spec, rotfed.AlignOptions(groups=self.groups)).params, anchor


def data_free(model: Any) -> dict[str, Method]:
    """The methods that look at weights alone, for models like `model`."""
    inside = rotfed.load_spec(model)
    permutations = rotfed.load_spec(model, residual="permutation")
    turning = [n for n, group in inside.groups.items() if group.kind_name in ("orthogonal", "rope_planes")]
    permuting = [n for n, group in permutations.groups.items() if group.kind_name == "permutation"]
    return {
        PLAIN: Method(None),
        PAPER: Method(inside, [*turning, "d_ff"]),
        PERMUTATIONS: Method(permutations, permuting),
        INSIDE: Method(inside),
        DATA_FREE: Method(rotfed.load_spec(model, residual=True)),
    }
