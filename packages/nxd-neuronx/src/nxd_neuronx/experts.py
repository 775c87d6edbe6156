"""The mixture-of-experts layers of nxd_layers with the arguments of NeuronX Distributed; token shuffling."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import nxd_layers.experts as nxd_experts
import torch
from nxd_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from nxd_layers.initialization import default_linear_init
from nxd_layers.mappings import GivenGroup, all_to_all_region
from nxd_state import group_of
from torch import Tensor, nn

from nxd_neuronx.expert_configs import BlockwiseMatmulConfig, GLUType, RoutedExpertsMLPOpsConfig
from nxd_neuronx.expert_linears import check_unset, gated_activation, is_other_group
from nxd_neuronx.mesh import get_token_shuffle_group, get_token_shuffle_group_size, initialize_token_shuffle_group

_logger = logging.getLogger(__name__)
ACT2FN = nxd_experts.ACTIVATIONS


class RouterTopK(nxd_experts.RouterTopK):
    """`nxd_layers.experts.RouterTopK`, with the old order of arguments."""

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
        check_unset(store_transposed_weights=store_transposed_weights)
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


class GroupLimitedRouter(nxd_experts.GroupLimitedRouter):
    """`nxd_layers.experts.GroupLimitedRouter`, with the old order of arguments."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        n_group: int,
        topk_group: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        tensor_model_parallel_group: GivenGroup = None,
        jitter_eps: float = 0.0,
    ) -> None:
        super().__init__(
            num_experts,
            top_k,
            hidden_size,
            n_group=n_group,
            topk_group=topk_group,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            dtype=dtype,
            device=device,
            tensor_model_parallel_group=tensor_model_parallel_group,
            jitter_eps=jitter_eps,
        )


def _gated_activation_of(config: RoutedExpertsMLPOpsConfig) -> Callable[..., Tensor] | None:
    """Return the gated activation that a config describes; None for the layer's own."""
    activation = ACT2FN.get(config.hidden_act)
    if activation is None or not config.glu_mlp:
        return None
    return gated_activation(
        activation,
        config.glu_type,
        scale=config.hidden_act_scaling_factor,
        bias=config.hidden_act_bias,
        gate_limits=(config.gate_clamp_lower_limit, config.gate_clamp_upper_limit),
        up_limits=(config.up_clamp_lower_limit, config.up_clamp_upper_limit),
    )


class ExpertMLPsV2(nxd_experts.ExpertMLPs):
    """`nxd_layers.experts.ExpertMLPs`, built from the old configurations.

    A `capacity_factor` of 0 or less drops no token, like None. Settings that select a kernel have no effect.

    Raises:
        NotImplementedError: biases, early affinity modulation, other process groups, or another layout for single
            tokens.
    """

    def __init__(
        self,
        routed_experts_mlp_config: RoutedExpertsMLPOpsConfig,
        blockwise_matmul_config: BlockwiseMatmulConfig | None = None,
        return_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        sequence_parallel_enabled: bool = False,
        device: torch.device | str | None = None,
        tensor_model_parallel_group: GivenGroup = None,
        expert_model_parallel_group: GivenGroup = None,
        tkg_tensor_model_parallel_group: GivenGroup = None,
        tkg_expert_model_parallel_group: GivenGroup = None,
        cte_tensor_model_parallel_group: GivenGroup = None,
        cte_expert_model_parallel_group: GivenGroup = None,
        is_prefill: bool = True,
        enabled_hybrid_sharding: bool = False,
    ) -> None:
        config = routed_experts_mlp_config
        check_unset(
            bias=config.bias,
            return_bias=return_bias,
            early_expert_affinity_modulation=config.early_expert_affinity_modulation,
            expert_distribution=config.expert_distribution,
            enabled_hybrid_sharding=enabled_hybrid_sharding,
            tensor_model_parallel_group=is_other_group(tensor_model_parallel_group, "tp"),
            expert_model_parallel_group=is_other_group(expert_model_parallel_group, "ep"),
        )
        capacity = config.capacity_factor
        super().__init__(
            config.num_experts,
            config.top_k,
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            config.glu_mlp,
            capacity if capacity is not None and capacity > 0 else None,
            config.normalize_top_k_affinities,
            gated_activation=_gated_activation_of(config),
            init_method=config.input_layer_init_method or default_linear_init,
            output_layer_init_method=config.output_layer_init_method or default_linear_init,
            dtype=dtype,
            device=device,
        )
        self.routed_experts_mlp_config = config
        self.blockwise_matmul_config = blockwise_matmul_config or BlockwiseMatmulConfig.default()

    def forward(
        self,
        hidden_states: Tensor,
        expert_affinities: Tensor,
        expert_index: Tensor,
        seq_len: int | None = None,
        *,
        sequences: Tensor | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """See `nxd_layers.experts.ExpertMLPs`; `seq_len` has no effect."""
        given = (hidden_states, expert_affinities, expert_index)
        return super().forward(*given, sequences=sequences, meanwhile=meanwhile)


class ExpertMLPs(ExpertMLPsV2):
    """`ExpertMLPsV2` with individual arguments; those that configure a kernel have no effect."""

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
        glu_type: GLUType | str | None = GLUType.GLU,
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
        if kernel_options:
            _logger.info("ExpertMLPs: %s select kernels and have no effect here", ", ".join(sorted(kernel_options)))
        config = RoutedExpertsMLPOpsConfig(
            num_experts,
            hidden_size,
            intermediate_size,
            top_k,
            hidden_act,
            glu_mlp,
            bias,
            glu_type,
            hidden_act_scaling_factor,
            hidden_act_bias,
            gate_clamp_upper_limit=gate_clamp_upper_limit,
            gate_clamp_lower_limit=gate_clamp_lower_limit,
            up_clamp_upper_limit=up_clamp_upper_limit,
            up_clamp_lower_limit=up_clamp_lower_limit,
            normalize_top_k_affinities=normalize_top_k_affinities,
            early_expert_affinity_modulation=early_expert_affinity_modulation,
            input_layer_init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            capacity_factor=capacity_factor,
            enable_spmd_rank=enable_spmd_rank,
            expert_distribution=expert_distribution,
        )
        super().__init__(
            config,
            BlockwiseMatmulConfig.from_kwargs(**({} if block_size is None else {"block_size": block_size})),
            return_bias,
            dtype,
            sequence_parallel_enabled,
            device,
            tensor_model_parallel_group,
            expert_model_parallel_group,
        )


class SharedExperts(nn.Module):
    """Experts that process every token: one gated feed-forward network, split over the tensor-parallel ranks.

    Args:
        hidden_size: hidden size.
        intermediate_size: intermediate size of one expert.
        num_shared_experts: number of experts, a factor of the width.
        hidden_act: a key of `ACT2FN`.
        dtype: dtype of the weights.
        tensor_model_parallel_group: the mesh's tensor-parallel group, or None.
        reduce_dtype: dtype of the sum over the ranks.
        fused_gate_up_projection: whether gate and up are one layer.
        sequence_parallel_enabled: must be False: whole weights on every rank are not supported.
        transpose_weights: must be False.

    Raises:
        NotImplementedError: another process group, whole or transposed weights.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_shared_experts: int,
        hidden_act: str,
        dtype: torch.dtype = torch.float32,
        tensor_model_parallel_group: GivenGroup = None,
        reduce_dtype: torch.dtype = torch.float32,
        fused_gate_up_projection: bool = False,
        sequence_parallel_enabled: bool = False,
        transpose_weights: bool = False,
    ) -> None:
        super().__init__()
        check_unset(
            tensor_model_parallel_group=is_other_group(tensor_model_parallel_group, "tp"),
            sequence_parallel_enabled=sequence_parallel_enabled,
            transpose_weights=transpose_weights,
        )
        self._activation = ACT2FN[hidden_act]
        width = intermediate_size * num_shared_experts
        self.fused_gate_up_projection = fused_gate_up_projection
        into = partial(ColumnParallelLinear, hidden_size, bias=False, gather_output=False, dtype=dtype)
        if fused_gate_up_projection:
            self.gate_up_proj = into(2 * width, stride=2)
        else:
            self.gate_proj, self.up_proj = into(width), into(width)
        self.down_proj = RowParallelLinear(
            width, hidden_size, bias=False, input_is_parallel=True, dtype=dtype, reduce_dtype=reduce_dtype
        )

    def forward(self, x: Tensor, seq_len: int | None = None) -> Tensor:
        """`[..., hidden]`, the same on all tensor-parallel ranks, to the same shape; `seq_len` has no effect."""
        if self.fused_gate_up_projection:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        output: Tensor = self.down_proj(self._activation(gate) * up)
        return output


class MoE(nxd_experts.MoE):
    """`nxd_layers.experts.MoE`, with the old arguments.

    With `token_shuffle_group_size`, router logits and expert indices are those of the shuffled tokens.

    Raises:
        NotImplementedError: `init_tkg_module`, the fused kernel for single tokens.
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
        check_unset(init_tkg_module=init_tkg_module)
        super().__init__(
            router,
            expert_mlps,
            shared_experts=shared_experts,
            rmsnorm=rmsnorm,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            return_router_logits=return_router_logits,
            return_expert_index=return_expert_index,
            tensor_model_parallel_group=tensor_model_parallel_group,
        )
        self.token_shuffle_group_size, self.token_shuffle_seed = token_shuffle_group_size, token_shuffle_seed
        if token_shuffle_group_size > 1:
            initialize_token_shuffle_group(token_shuffle_group_size)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """See `nxd_layers.experts.MoE`."""
        if self.token_shuffle_group_size == 1:
            return super().forward(hidden_states)
        shuffled, permutation = token_shuffle(hidden_states, self.token_shuffle_seed)
        output, *further = super().forward(shuffled)
        return (token_unshuffle(output, permutation), *further)


def load_balancing_loss_func(router_logits: Tensor, num_experts: int, top_k: int) -> Tensor:
    """Return `nxd_layers.experts.load_balancing_loss`, a 0-d tensor."""
    return nxd_experts.load_balancing_loss(router_logits, num_experts, top_k)


def token_shuffle(hidden_states: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Shuffle tokens over the replicas of the token-shuffle group (Lewis et al. 2021, "BASE Layers").

    Args:
        hidden_states: `[seq, batch, hidden]` or `[batch, seq, hidden]`.
        seed: random seed of the permutation; None uses torch's default generator.

    Returns:
        Tokens of all replicas in the same shape, and this rank's permutation `[tokens]` for `token_unshuffle`.

    Raises:
        ValueError: the number of replicas does not divide the number of tokens.
    """
    tokens = hidden_states.flatten(0, 1)
    size = get_token_shuffle_group_size()
    if len(tokens) % size:
        raise ValueError(f"{size} replicas do not divide {len(tokens)} tokens; use token_shuffle_group_size=1")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    permutation = torch.randperm(len(tokens), generator=generator).to(tokens.device)
    return all_to_all_for_shuffle(tokens[permutation]).view_as(hidden_states), permutation


def token_unshuffle(permuted_states: Tensor, permutation: Tensor) -> Tensor:
    """Undo `token_shuffle`: `permuted_states` and `permutation` are its results."""
    tokens = all_to_all_for_shuffle(permuted_states.flatten(0, 1))
    return tokens[permutation.argsort()].view_as(permuted_states)


def all_to_all_for_shuffle(hidden_states: Tensor, input_is_sequence_parallel: bool = True) -> Tensor:
    """Send the i-th part of this replica's tokens, `[tokens, hidden]`, to the i-th replica of the token-shuffle group.

    Without `input_is_sequence_parallel`, all tensor-parallel ranks hold the same tokens, and each sends a part of them.
    """
    if get_token_shuffle_group_size() == 1:
        return hidden_states
    part = hidden_states if input_is_sequence_parallel else scatter_to_sequence_parallel_region(hidden_states)
    group = group_of(get_token_shuffle_group())  # type: ignore[arg-type]  # a list only if asked
    part = all_to_all_region(part, group, 0, 0)
    if input_is_sequence_parallel:
        return part
    return gather_from_sequence_parallel_region(part, to_model_parallel=False)
