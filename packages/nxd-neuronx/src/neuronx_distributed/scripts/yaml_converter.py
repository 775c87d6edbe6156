"""`neuronx_distributed.scripts.yaml_converter`: training configs for the converter, from nxd_neuronx."""

from nxd_neuronx.nxdt_config import convert_yaml_to_json, load_yaml_file

__all__ = ["convert_yaml_to_json", "load_yaml_file"]
