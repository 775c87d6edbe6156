"""`neuronx_distributed.parallel_layers.checkpointing`: one file per model-parallel rank."""

from nxd_engine.checkpoints import shard_files
from nxd_engine.checkpoints.shard_files import NXD_SKIP_RENDEZVOUS, ensure_directory_exists
from nxd_neuronx.arguments import takes_names_too
from nxd_neuronx.tensors import invoke_preshard_hooks as _invoke_preshard_hook  # the name that scripts import

save = takes_names_too(checkpoint="state_dict", output_dir="save_dir")(shard_files.save)
load = takes_names_too(chkpt_path="load_dir", model="model_or_optimizer")(shard_files.load)

__all__ = ["NXD_SKIP_RENDEZVOUS", "ensure_directory_exists", "save", "load", "_invoke_preshard_hook"]
