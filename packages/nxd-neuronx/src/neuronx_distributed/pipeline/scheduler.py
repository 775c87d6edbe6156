"""`neuronx_distributed.pipeline.scheduler`: the tasks of the old pipeline, which has schedules of actions here."""

from nxd_neuronx.not_here import explains

__getattr__ = explains(__name__)
