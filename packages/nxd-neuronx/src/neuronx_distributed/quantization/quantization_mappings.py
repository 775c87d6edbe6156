"""`neuronx_distributed.quantization.quantization_mappings`: the quantized class of each layer class."""

from nxd_neuronx.quantization import MODULE_MAPPINGS

DEFAULT_QUANT_MODULE_MAPPINGS = MODULE_MAPPINGS
get_default_quant_module_mappings = MODULE_MAPPINGS.copy

__all__ = ["DEFAULT_QUANT_MODULE_MAPPINGS", "get_default_quant_module_mappings"]
