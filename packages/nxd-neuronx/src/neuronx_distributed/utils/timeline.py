"""`neuronx_distributed.utils.timeline`: a script's own events, from nxd_neuronx."""

from nxd_neuronx.timeline import Event, Timeline

__all__ = ["Event", "Timeline"]
