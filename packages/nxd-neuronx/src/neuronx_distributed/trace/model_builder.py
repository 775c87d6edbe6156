"""`neuronx_distributed.trace.model_builder`: both builders, over nxd_trace."""

from typing import Any

from nxd_neuronx.model_builder import BaseModelInstance, ModelBuilderV2
from nxd_neuronx.model_builder import ModelBuilderV1 as ModelBuilder
from nxd_neuronx.planned_ranks import shard_checkpoint
from nxd_neuronx.unsupported import explains

ModelInputType = list[Any]

__all__ = ["Any", "BaseModelInstance", "ModelBuilder", "ModelBuilderV2", "shard_checkpoint", "ModelInputType"]
__getattr__ = explains(__name__)
