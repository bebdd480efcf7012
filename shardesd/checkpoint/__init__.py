"""Index and headers → tensors in reading order; the elements of one tensor at a time.

`open_checkpoint` for files, `open_live` for a module or a state dict; both give a `Checkpoint`.
"""

from shardesd.checkpoint.blocks import ShardMatrix
from shardesd.checkpoint.checkpoint import StoredCheckpoint, StoredShard, open_checkpoint, open_shard
from shardesd.checkpoint.elements import SUPPORTED, StoredMatrix, element_word, is_integer, is_supported
from shardesd.checkpoint.interface import Checkpoint, Shard, open_local
from shardesd.checkpoint.layout import adapter_file
from shardesd.checkpoint.live import LiveCheckpoint, open_live
from shardesd.checkpoint.minus import MinusCheckpoint
from shardesd.checkpoint.ranged import RangedShard

__all__ = [
    "SUPPORTED",
    "Checkpoint",
    "LiveCheckpoint",
    "MinusCheckpoint",
    "RangedShard",
    "Shard",
    "ShardMatrix",
    "StoredCheckpoint",
    "StoredMatrix",
    "StoredShard",
    "adapter_file",
    "element_word",
    "is_integer",
    "is_supported",
    "open_checkpoint",
    "open_live",
    "open_local",
    "open_shard",
]
