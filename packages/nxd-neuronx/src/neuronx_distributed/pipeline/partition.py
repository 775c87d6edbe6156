"""`neuronx_distributed.pipeline.partition`: where a model is split, from nxd_neuronx."""

from nxd_neuronx.pipeline_parts import create_partitions, stage_to_pipeline_parallel_rank
from nxd_neuronx.unsupported import explains

__all__ = ["create_partitions", "stage_to_pipeline_parallel_rank"]
__getattr__ = explains(__name__)
