"""`neuronx_distributed.modules.moe.moe_process_group`: separate layouts of experts for prompts and single tokens."""

from nxd_neuronx.unsupported import explains

__getattr__ = explains(__name__)
