"""`neuronx_distributed.utils.utils`: kinds of hardware, from nxd_neuronx."""

from nxd_neuronx.platform import HloMetadataLevel, get_dict_from_json, hardware

__all__ = ["HloMetadataLevel", "get_dict_from_json", "hardware"]
