"""Model directories of transformers: their weights, the parameters that several share, one made of several.

Weights are read one tensor at a time and written in shards as they come. `merge_checkpoints` is the library call
behind `rotfed merge`.
"""

from rotfed.checkpoints.folder import Checkpoint, read_checkpoint
from rotfed.checkpoints.merging import MergeOptions, MergeReport, merge_checkpoints
from rotfed.checkpoints.weights import Renamed, ShardWriter, StoredWeights
from rotfed.checkpoints.writing import write_checkpoint

__all__ = [
    "Checkpoint",
    "MergeOptions",
    "MergeReport",
    "Renamed",
    "ShardWriter",
    "StoredWeights",
    "merge_checkpoints",
    "read_checkpoint",
    "write_checkpoint",
]
