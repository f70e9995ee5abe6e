"""rotfed: one common frame for transformers before they are averaged.

A transformer computes the same function after many changes of its weights. `align` finds the change that brings one
model nearest to another without altering what it computes; `merge` averages several models in one frame;
`rotfed.flower` does both inside a Flower run.
"""

from rotfed.adapters import (
    AdapterSpec,
    add_base_delta,
    aggregate_adapters,
    fit_adapter,
    load_adapter_spec,
    train_factors,
)
from rotfed.align import Alignment, AlignOptions, align
from rotfed.checks import check_spec
from rotfed.errors import (
    AlignmentError,
    ConvergenceWarning,
    FunctionChangedError,
    RecordError,
    RotfedError,
    SpecError,
    TransformError,
)
from rotfed.frames import align_all, medoid, merge
from rotfed.library import load_spec, supported_model_types
from rotfed.matching import Anchor
from rotfed.mergers import weighted_mean
from rotfed.residual import fold_norms
from rotfed.spec import SymmetrySpec
from rotfed.transform import Transform, random_transform

__version__ = "0.1.0"

__all__ = [
    "AdapterSpec",
    "AlignOptions",
    "Alignment",
    "AlignmentError",
    "Anchor",
    "ConvergenceWarning",
    "FunctionChangedError",
    "RecordError",
    "RotfedError",
    "SpecError",
    "SymmetrySpec",
    "Transform",
    "TransformError",
    "add_base_delta",
    "aggregate_adapters",
    "align",
    "align_all",
    "check_spec",
    "fit_adapter",
    "fold_norms",
    "load_adapter_spec",
    "load_spec",
    "medoid",
    "merge",
    "random_transform",
    "supported_model_types",
    "train_factors",
    "weighted_mean",
]
