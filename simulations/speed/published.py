"""The published procedure: arXiv 2502.00264, Algorithm 1, as a reader of the paper would write it.

Layer by layer: the feed-forward permutation by linear assignment on the full matrix of gains, then head by head the
rotation of queries and keys and that of values and outputs by singular value decompositions (eq. 9), and after each
the scale from its quartic (eq. 12). Float32 as the weights are. It is the baseline of `make speed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Names:
    """The linear maps of layer `{}` of a model, without `.weight` and `.bias`."""

    query: str
    key: str
    value: str
    output: str
    up: str
    down: str


BERT = Names(
    query="encoder.layer.{}.attention.self.query",
    key="encoder.layer.{}.attention.self.key",
    value="encoder.layer.{}.attention.self.value",
    output="encoder.layer.{}.attention.output.dense",
    up="encoder.layer.{}.intermediate.dense",
    down="encoder.layer.{}.output.dense",
)


def align_as_published(source: Params, anchor: Params, names: Names, layers: int, heads: int) -> dict[str, Tensor]:
    """Return `source` moved towards `anchor`: min over permutations, rotations and scales of ||T(source) - anchor||.

    The scale is solved once, after its rotation, as published; the two are not solved together. Nothing is mutated.
    """
    moved = dict(source)
    for layer in range(layers):
        _match_units(moved, anchor, names.up.format(layer), names.down.format(layer))
        query, key = names.query.format(layer), names.key.format(layer)
        value, output = names.value.format(layer), names.output.format(layer)
        _match_heads(moved, anchor, query, key, heads, columns=False)
        _match_heads(moved, anchor, value, output, heads, columns=True)
    return moved


def _match_units(moved: dict[str, Tensor], anchor: Params, up: str, down: str) -> None:
    """Permute the feed-forward units of one layer."""

    def rows(params: Params) -> list[Tensor]:
        return [params[f"{up}.weight"], params[f"{up}.bias"][:, None], params[f"{down}.weight"].T]

    gains = sum(theirs @ ours.T for theirs, ours in zip(rows(anchor), rows(moved), strict=True))
    assert isinstance(gains, Tensor)
    _, order = linear_sum_assignment(gains.numpy(), maximize=True)
    chosen = torch.from_numpy(order)
    moved[f"{up}.weight"] = moved[f"{up}.weight"][chosen]
    moved[f"{up}.bias"] = moved[f"{up}.bias"][chosen]
    moved[f"{down}.weight"] = moved[f"{down}.weight"][:, chosen]


def _match_heads(moved: dict[str, Tensor], anchor: Params, first: str, second: str, heads: int, columns: bool) -> None:
    """Rotate and scale the heads of one layer, in queries and keys or (`columns`) in values and outputs.

    A head is the matrix (head_dim, d_model + 1) of the rows and the bias of a map; of an output projection, whose bias
    belongs to no head, it is the transpose of its columns.
    """

    def maps(params: Params) -> tuple[Tensor, Tensor]:
        one = torch.cat([params[f"{first}.weight"], params[f"{first}.bias"][:, None]], dim=1)
        if columns:
            return one, params[f"{second}.weight"].T
        return one, torch.cat([params[f"{second}.weight"], params[f"{second}.bias"][:, None]], dim=1)

    (s_one, s_two), (a_one, a_two) = maps(moved), maps(anchor)
    size = s_one.shape[0] // heads
    one, two = torch.empty_like(s_one), torch.empty_like(s_two)
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        u, _, vt = torch.linalg.svd(a_one[rows] @ s_one[rows].T + a_two[rows] @ s_two[rows].T)
        rotated_one, rotated_two = u @ vt @ s_one[rows], u @ vt @ s_two[rows]
        scale = best_scale(rotated_one, rotated_two, a_one[rows], a_two[rows])
        one[rows], two[rows] = rotated_one * scale, rotated_two / scale
    moved[f"{first}.weight"], moved[f"{first}.bias"] = one[:, :-1].contiguous(), one[:, -1].contiguous()
    if columns:
        moved[f"{second}.weight"] = two.T.contiguous()
    else:
        moved[f"{second}.weight"], moved[f"{second}.bias"] = two[:, :-1].contiguous(), two[:, -1].contiguous()


def best_scale(one: Tensor, two: Tensor, target_one: Tensor, target_two: Tensor) -> float:
    """Return the scale a that minimises ||a one - target_one||^2 + ||two / a - target_two||^2.

    The derivative, times a^3, is a quartic in a; of its real roots the one with the lowest value is returned.
    """
    norms = float(one.square().sum()), float(two.square().sum())
    inner = float((one * target_one).sum()), float((two * target_two).sum())
    roots = np.roots([norms[0], -inner[0], 0.0, inner[1], -norms[1]])
    real = roots.real[(abs(roots.imag) < 1e-6) & (abs(roots.real) > 1e-6)]
    values = real**2 * norms[0] - 2 * real * inner[0] + norms[1] / real**2 - 2 * inner[1] / real
    return float(real[values.argmin()])
