"""`neuronx_distributed.modules.moe.moe_process_group`: other layouts of experts for prompts than for single tokens."""

from nxd_neuronx.not_here import explains

__getattr__ = explains(__name__)
