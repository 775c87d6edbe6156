"""`neuronx_distributed.pipeline.scheduler`: tasks of the old pipeline; schedules are lists of actions here."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
