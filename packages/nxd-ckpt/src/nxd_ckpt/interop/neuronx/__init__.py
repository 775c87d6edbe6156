"""The checkpoint layouts of NeuronX Distributed: the folders of `save_checkpoint` (v2) and `parallel_layers.save` (v1).

They hold each rank's tensors, but not how they form whole tensors: `Split` and `Pieces` describe that.
"""

from nxd_ckpt.interop.neuronx.fused import is_gate_up, split_gate_up
from nxd_ckpt.interop.neuronx.reading import complete_tags, open_neuronx, read_user_content
from nxd_ckpt.interop.neuronx.sharding import LLAMA, Piece, Pieces, Sharding, Split
from nxd_ckpt.interop.neuronx.writing import write_neuronx

__all__ = [
    # how ranks' tensors fit together
    "Sharding",
    "Split",
    "Pieces",
    "Piece",
    "LLAMA",
    "is_gate_up",
    "split_gate_up",
    # in and out
    "open_neuronx",
    "complete_tags",
    "read_user_content",
    "write_neuronx",
]
