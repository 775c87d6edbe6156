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

__all__ = [
    "MB",
    "SHM_PATH",
    "BaseCheckpointStorage",
    "FilesysCheckpointStorage",
    "S3CheckpointStorage",
    "create_checkpoint_storage",
    "is_slow_down_error",
]
