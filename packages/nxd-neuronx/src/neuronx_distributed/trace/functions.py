"""`neuronx_distributed.trace.functions`: shards of checkpoints; models are compiled by `ModelBuilder`."""

from nxd_neuronx.not_here import not_here
from nxd_neuronx.planned_ranks import shard_checkpoint

(append_default_compiler_flags, compile, compile_layout_transformer, compile_wlo, trace) = not_here(
    __name__, "hlo", "append_default_compiler_flags", "compile", "compile_layout_transformer", "compile_wlo", "trace"
)

__all__ = [
    "shard_checkpoint",
    "append_default_compiler_flags",
    "compile",
    "compile_layout_transformer",
    "compile_wlo",
    "trace",
]
