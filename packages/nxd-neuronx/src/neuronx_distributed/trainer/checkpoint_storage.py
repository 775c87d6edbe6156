"""`neuronx_distributed.trainer.checkpoint_storage`: a script's own files, from nxd_neuronx."""

from nxd_neuronx.checkpoint_storage import (
    MB,
    SHM_PATH,
    BaseCheckpointStorage,
    FilesysCheckpointStorage,
    S3CheckpointStorage,
    create_checkpoint_storage,
    is_slow_down_error,
)
from nxd_neuronx.not_here import not_here

(wait_decrementing_with_jitter,) = not_here(__name__, "s3", "wait_decrementing_with_jitter")

__all__ = [
    "MB",
    "SHM_PATH",
    "BaseCheckpointStorage",
    "FilesysCheckpointStorage",
    "S3CheckpointStorage",
    "create_checkpoint_storage",
    "is_slow_down_error",
    "wait_decrementing_with_jitter",
]
