"""`neuronx_distributed.scripts`: base classes of command-line scripts."""

from neuronx_distributed.scripts import checkpoint_converter, yaml_converter

__all__ = ["checkpoint_converter", "yaml_converter"]
