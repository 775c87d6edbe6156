"""`neuronx_distributed.trainer.post_partition_hooks`: hooks called after a model is split into stages."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
