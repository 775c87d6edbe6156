"""`neuronx_distributed.trace.model_builder_v2`: the builder for existing models, over nxd_trace."""

from nxd_neuronx.model_builder import ModelBuilderV2 as ModelBuilder

__all__ = ["ModelBuilder"]
