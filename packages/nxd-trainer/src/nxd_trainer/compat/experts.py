"""Mixture-of-experts layers as scripts for NeuronX Distributed make them, over those of nxd_layers."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import nxd_layers.experts as nxd_experts
import torch
from nxd_layers.mappings import GivenGroup
from torch import Tensor, nn

_logger = logging.getLogger(__name__)

ACT2FN = nxd_experts.ACTIVATIONS


class RouterTopK(nxd_experts.RouterTopK):
    """`nxd_layers.experts.RouterTopK`, with that library's order of arguments."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        bias: bool = False,
        tensor_model_parallel_group: GivenGroup = None,
        act_fn: str = "softmax",
        apply_act_fn_over_topk: bool = False,
        jitter_eps: float = 0.0,
        store_transposed_weights: bool = False,
    ) -> None:
        _check_unset(store_transposed_weights=store_transposed_weights)
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            dtype=dtype,
            device=device,
            bias=bias,
            tensor_model_parallel_group=tensor_model_parallel_group,
            act_fn=act_fn,
            apply_act_fn_over_topk=apply_act_fn_over_topk,
            jitter_eps=jitter_eps,
        )


class ExpertMLPs(nxd_experts.ExpertMLPs):
    """`nxd_layers.experts.ExpertMLPs`, with that library's arguments.

    Those that choose a kernel, or how it is fed, are taken and change nothing.

    Raises:
        NotImplementedError: biases, clamps, scales or another place of the affinities are asked for.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool,
        capacity_factor: float | None,
        sequence_parallel_enabled: bool = False,
        block_size: int | None = None,
        normalize_top_k_affinities: bool = False,
        bias: bool = False,
        glu_type: Any = None,
        hidden_act_scaling_factor: float = 1.0,
        hidden_act_bias: float = 0.0,
        gate_clamp_upper_limit: float | None = None,
        gate_clamp_lower_limit: float | None = None,
        up_clamp_upper_limit: float | None = None,
        up_clamp_lower_limit: float | None = None,
        return_bias: bool = False,
        init_method: Callable[[Tensor], Any] = nn.init.kaiming_uniform_,
        output_layer_init_method: Callable[[Tensor], Any] = nn.init.kaiming_uniform_,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        tensor_model_parallel_group: GivenGroup = None,
        expert_model_parallel_group: GivenGroup = None,
        enable_spmd_rank: bool = False,
        early_expert_affinity_modulation: bool = False,
        expert_distribution: Sequence[Sequence[int]] | None = None,
        **kernel_options: Any,
    ) -> None:
        is_swiglu = glu_type is not None and "SWIGLU" in str(getattr(glu_type, "name", glu_type)).upper()
        _check_unset(
            bias=bias,
            return_bias=return_bias,
            glu_type=is_swiglu,
            hidden_act_scaling_factor=hidden_act_scaling_factor != 1.0,
            hidden_act_bias=hidden_act_bias,
            gate_clamp_upper_limit=gate_clamp_upper_limit is not None,
            gate_clamp_lower_limit=gate_clamp_lower_limit is not None,
            up_clamp_upper_limit=up_clamp_upper_limit is not None,
            up_clamp_lower_limit=up_clamp_lower_limit is not None,
            early_expert_affinity_modulation=early_expert_affinity_modulation,
            expert_distribution=expert_distribution,
            tensor_model_parallel_group=tensor_model_parallel_group is not None,
            expert_model_parallel_group=expert_model_parallel_group is not None,
        )
        if kernel_options:
            _logger.info("ExpertMLPs: %s choose kernels and change nothing here", ", ".join(sorted(kernel_options)))
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            intermediate_size,
            hidden_act,
            glu_mlp,
            capacity_factor,
            normalize_top_k_affinities,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            dtype=dtype,
            device=device,
        )


class MoE(nxd_experts.MoE):
    """`nxd_layers.experts.MoE`, with that library's arguments.

    Raises:
        NotImplementedError: shared experts, token shuffling or its fused kernel are asked for.
    """

    def __init__(
        self,
        router: nxd_experts.RouterBase,
        expert_mlps: nxd_experts.ExpertMLPs,
        shared_experts: nn.Module | None = None,
        rmsnorm: nn.Module | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
        token_shuffle_group_size: int = 1,
        token_shuffle_seed: int | None = None,
        tensor_model_parallel_group: GivenGroup = None,
        init_tkg_module: bool = False,
        tkg_config: Any = None,
    ) -> None:
        _check_unset(
            shared_experts=shared_experts is not None,
            token_shuffle_group_size=token_shuffle_group_size > 1,
            init_tkg_module=init_tkg_module,
        )
        super().__init__(
            router,
            expert_mlps,
            rmsnorm=rmsnorm,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            return_router_logits=return_router_logits,
            return_expert_index=return_expert_index,
            tensor_model_parallel_group=tensor_model_parallel_group,
        )


def load_balancing_loss_func(router_logits: Tensor, num_experts: int, top_k: int) -> Tensor:
    """`nxd_layers.experts.load_balancing_loss`, 0-d."""
    return nxd_experts.load_balancing_loss(router_logits, num_experts, top_k)


def _check_unset(**asked: Any) -> None:
    """Raise a NotImplementedError for arguments whose work is not done here."""
    for name, value in asked.items():
        if value:
            raise NotImplementedError(f"{name} of mixture-of-experts layers is not done here; leave it out")
