"""`neuronx_distributed.modules.moe.moe_process_group`: other layouts of experts for prompts than for single tokens."""

from nxd_neuronx.not_here import not_here

(
    init_tensor_expert_parallel_moe_process_groups,
    get_moe_tp_ep_group,
    get_moe_ep_group,
    destroy_moe_model_parallel,
) = not_here(
    __name__,
    "experts of a rank",
    "init_tensor_expert_parallel_moe_process_groups",
    "get_moe_tp_ep_group",
    "get_moe_ep_group",
    "destroy_moe_model_parallel",
)

__all__ = [
    "init_tensor_expert_parallel_moe_process_groups",
    "get_moe_tp_ep_group",
    "get_moe_ep_group",
    "destroy_moe_model_parallel",
]
