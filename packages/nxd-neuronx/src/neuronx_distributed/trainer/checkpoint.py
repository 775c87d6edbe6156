"""`neuronx_distributed.trainer.checkpoint`: saving and loading, from nxd_engine."""

import nxd_engine
from nxd_engine import finalize_checkpoint
from nxd_neuronx.arguments import takes_names_too

save_checkpoint = takes_names_too(checkpoint_dir_str="path")(nxd_engine.save_checkpoint)
load_checkpoint = takes_names_too(checkpoint_dir_str="path")(nxd_engine.load_checkpoint)
has_checkpoint = takes_names_too(checkpoint_dir_str="path")(nxd_engine.has_checkpoint)

g_iostate = None  # nothing is shared between saves: finalize_checkpoint waits for the one in flight

__all__ = ["save_checkpoint", "load_checkpoint", "has_checkpoint", "finalize_checkpoint", "g_iostate"]
