"""`neuronx_distributed.scripts`: commands that scripts build on."""

from neuronx_distributed.scripts import checkpoint_converter, yaml_converter

__all__ = ["checkpoint_converter", "yaml_converter"]
