"""`neuronx_distributed.trace.model_builder`: the first builder, over nxd_trace."""

from typing import Any

from nxd_neuronx.model_builder import BaseModelInstance
from nxd_neuronx.model_builder import FirstModelBuilder as ModelBuilder
from nxd_neuronx.not_here import not_here
from nxd_neuronx.planned_ranks import shard_checkpoint

ModelInputType = list[Any]
(
    GRAPH_HLO_FILE,
    JITWrapper,
    LOG_FILE_DEFAULT_NAME,
    MONITOR_MODULES_LIST,
    ModelContainer,
    NEFF_FILE,
    WRAPPED_NEFF_FILE,
    XLA_HLO_DEBUG,
    XLA_IR_DEBUG,
    append_default_compiler_flags,
    compile,
    compile_layout_transformer,
    compile_wlo,
    get_hash_module,
    init_process_wrapper,
    trace,
) = not_here(
    __name__,
    "hlo",
    "GRAPH_HLO_FILE",
    "JITWrapper",
    "LOG_FILE_DEFAULT_NAME",
    "MONITOR_MODULES_LIST",
    "ModelContainer",
    "NEFF_FILE",
    "WRAPPED_NEFF_FILE",
    "XLA_HLO_DEBUG",
    "XLA_IR_DEBUG",
    "append_default_compiler_flags",
    "compile",
    "compile_layout_transformer",
    "compile_wlo",
    "get_hash_module",
    "init_process_wrapper",
    "trace",
)

__all__ = [
    "Any",
    "BaseModelInstance",
    "ModelBuilder",
    "shard_checkpoint",
    "GRAPH_HLO_FILE",
    "JITWrapper",
    "LOG_FILE_DEFAULT_NAME",
    "MONITOR_MODULES_LIST",
    "ModelContainer",
    "NEFF_FILE",
    "WRAPPED_NEFF_FILE",
    "XLA_HLO_DEBUG",
    "XLA_IR_DEBUG",
    "append_default_compiler_flags",
    "compile",
    "compile_layout_transformer",
    "compile_wlo",
    "get_hash_module",
    "init_process_wrapper",
    "trace",
    "ModelInputType",
]
