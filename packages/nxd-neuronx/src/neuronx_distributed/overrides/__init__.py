"""`neuronx_distributed.overrides`: see `transformer_overrides`."""

from neuronx_distributed.overrides import transformer_overrides

__all__ = ["transformer_overrides"]
