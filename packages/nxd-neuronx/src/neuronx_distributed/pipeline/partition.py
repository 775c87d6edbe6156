"""`neuronx_distributed.pipeline.partition`: where a model is cut, from nxd_neuronx."""

from nxd_neuronx.not_here import not_here
from nxd_neuronx.pipeline_parts import (
    PipelineIO,
    create_partitions,
    iterate_graph_model_outputs,
    stage_to_pipeline_parallel_rank,
)

(
    adding_live_obj_for_previous_stages,
    analyze_pipeline_module,
    analyze_shared_weights_across_stages,
    partition_traced_model,
) = not_here(
    __name__,
    "fx",
    "adding_live_obj_for_previous_stages",
    "analyze_pipeline_module",
    "analyze_shared_weights_across_stages",
    "partition_traced_model",
)

__all__ = [
    "PipelineIO",
    "create_partitions",
    "iterate_graph_model_outputs",
    "stage_to_pipeline_parallel_rank",
    "adding_live_obj_for_previous_stages",
    "analyze_pipeline_module",
    "analyze_shared_weights_across_stages",
    "partition_traced_model",
]
