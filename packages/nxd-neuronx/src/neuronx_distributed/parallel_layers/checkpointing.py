"""`neuronx_distributed.parallel_layers.checkpointing`: files of each model-parallel rank."""

from nxd_engine.checkpoints.shard_files import (
    NXD_SKIP_RENDEZVOUS,
    ensure_directory_exists,
    load,
    save,
)
from nxd_neuronx.tensors import invoke_preshard_hooks as _invoke_preshard_hook  # the name that scripts import

__all__ = [
    "NXD_SKIP_RENDEZVOUS",
    "ensure_directory_exists",
    "save",
    "load",
    "_invoke_preshard_hook",
]
