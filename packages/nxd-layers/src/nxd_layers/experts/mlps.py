"""The feed-forward networks of experts, and the mixture-of-experts layer of a router and experts."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from nxd_state import active_group
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.experts.dispatch import Dispatcher, dispatch_replicated_tokens
from nxd_layers.experts.linear import ExpertLinear
from nxd_layers.experts.local_experts import needs_static_shapes, rows_of_experts, weights_of_experts
from nxd_layers.experts.routers import RouterBase
from nxd_layers.initialization import InitMethod, default_linear_init
from nxd_layers.mappings import (
    GivenGroup,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class Experts(nn.Module):
    """The experts of this rank: two products with an activation between them.

    Args:
        num_experts: number of experts of all ranks.
        hidden_size: hidden size of tokens.
        intermediate_size: size between the products.
        glu: whether the activation of a gate multiplies the first product: weights `[hidden, 2 * intermediate]`, the
            gate's first.
        activation: activation of the first product; with a gate, a function of `(gate, up)`.
        dtype: dtype of the weights.
        device: device of the weights.
        input_init_method: initializer of the first product's weight of an expert.
        output_init_method: initializer of the second product's weight.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        glu: bool,
        activation: Callable[..., Tensor],
        dtype: torch.dtype,
        device: torch.device | str | None,
        input_init_method: InitMethod,
        output_init_method: InitMethod,
    ) -> None:
        super().__init__()
        self._activation = activation
        make = partial(ExpertLinear, num_experts, dtype=dtype, device=device)
        self.gate_up_proj = self.up_proj = None
        if glu:
            self.gate_up_proj = make(
                hidden_size, 2 * intermediate_size, split="outputs", stride=2, init_method=input_init_method
            )
        else:
            self.up_proj = make(hidden_size, intermediate_size, split="outputs", init_method=input_init_method)
        self.down_proj = make(intermediate_size, hidden_size, split="inputs", init_method=output_init_method)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """`[rows, hidden]` of tokens, an expert of this rank and a weight for each, `[rows, 1]`, to `[rows, hidden]`.

        Where shapes must be static, index and weights are `[rows, k]`, and every expert computes for all rows. Where
        tensor-parallel ranks split each expert, the outputs are parts of sums.
        """
        if needs_static_shapes(tokens):
            return self._sum_over_all(tokens, index, weights)
        order = index[:, 0].argsort(stable=True)
        counts = index.new_zeros(len(self.down_proj.weight))  # not bincount, which waits for the device
        counts.index_add_(0, index[:, 0], torch.ones_like(index[:, 0]))
        outputs = self.down_proj(self._inner(tokens[order], counts), counts)
        return torch.zeros_like(tokens).index_copy(0, order, outputs) * weights

    def _sum_over_all(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum over the k experts of each token; `num_experts` means no expert."""
        of_experts = weights_of_experts(index, weights, len(self.down_proj.weight))
        inner = self._inner(rows_of_experts(tokens, of_experts), None)
        outputs = self.down_proj(inner, None)  # [experts, rows, hidden]
        return (outputs * of_experts.t().unsqueeze(-1)).sum(dim=0)

    def _inner(self, tokens: Tensor, counts: Tensor | None) -> Tensor:
        if self.gate_up_proj is None:
            assert self.up_proj is not None  # one of them is there
            return self._activation(self.up_proj(tokens, counts))
        return self._activation(*self.gate_up_proj(tokens, counts).chunk(2, dim=-1))


class ExpertMLPs(nn.Module):
    """Applies experts to their tokens, on the ranks that hold the experts.

    Args:
        num_experts: number of experts of all ranks.
        top_k: experts of each token.
        hidden_size: hidden size of tokens.
        intermediate_size: intermediate size of an expert.
        hidden_act: a key of `ACTIVATIONS`.
        glu_mlp: whether an expert has a gate.
        capacity_factor: each expert takes the first `ceil(length * top_k * capacity_factor / num_experts)` tokens of
            each sequence that choose it; None for all. Which tokens are dropped depends on their own sequence only, so
            it is the same at all layouts and microbatch sizes. Not supported with context parallelism.
        normalize_top_k_affinities: divide the affinities of a token by the sum of those that are used.
        gated_activation: activation of a gate and the other half of the first product, both `[rows, intermediate/etp]`;
            if None, `hidden_act(gate) * up`.
        init_method: initializer of the first weight of an expert, float32 `[in, out]`.
        output_layer_init_method: initializer of the second weight.
        dtype: dtype of the weights.
        device: device of the weights.
        dispatcher: as for `expert_parallel_forward`.

    Raises:
        ValueError: there is no such activation, or ranks do not divide experts or sizes.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str = "silu",
        glu_mlp: bool = True,
        capacity_factor: float | None = None,
        normalize_top_k_affinities: bool = False,
        *,
        gated_activation: Callable[[Tensor, Tensor], Tensor] | None = None,
        init_method: InitMethod = default_linear_init,
        output_layer_init_method: InitMethod = default_linear_init,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        super().__init__()
        if hidden_act not in ACTIVATIONS:
            raise ValueError(f"unknown hidden_act={hidden_act!r}; use one of {', '.join(ACTIVATIONS)}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor={capacity_factor} must be above 0, or None to drop no token")
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.capacity_factor, self.normalize_top_k_affinities = capacity_factor, normalize_top_k_affinities
        self._dispatcher = dispatcher
        activation = ACTIVATIONS[hidden_act]
        self.mlp_op = Experts(
            num_experts,
            hidden_size,
            intermediate_size,
            glu=glu_mlp,
            activation=(gated_activation or _gated_by(activation)) if glu_mlp else activation,
            dtype=dtype,
            device=device,
            input_init_method=init_method,
            output_init_method=output_layer_init_method,
        )

    @property
    def sums_over_tensor_parallel_ranks(self) -> bool:
        """Whether each rank's output is a part of the sum over the tensor-parallel ranks."""
        return active_group("etp").size > 1

    def forward(
        self,
        hidden_states: Tensor,
        expert_affinities: Tensor,
        expert_index: Tensor,
        *,
        sequences: Tensor | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Compute.

        Args:
            hidden_states: `[tokens, hidden]`, the same on all tensor-parallel ranks.
            expert_affinities: `[tokens, experts]`.
            expert_index: `[tokens, top_k]`.
            sequences: `[sequences, length]`, the tokens of each sequence, for `capacity_factor`; all tokens are one
                sequence if None.
            meanwhile: as for `expert_parallel_forward`.

        Returns:
            `[tokens, hidden]`; see `sums_over_tensor_parallel_ranks`.

        Raises:
            ValueError: tokens are to be dropped from sequences that are cut over ranks.
        """
        weights = expert_affinities.gather(1, expert_index)
        if self.capacity_factor is not None:
            _check_whole_sequences(self.capacity_factor)
            if sequences is None:
                sequences = torch.arange(len(expert_index), device=expert_index.device).unsqueeze(0)
            is_taken = within_capacity(expert_index, sequences, self.num_experts, self.capacity_factor)
            weights, expert_index = weights.masked_fill(~is_taken, 0), expert_index.masked_fill(~is_taken, -1)
        if self.normalize_top_k_affinities:
            weights = F.normalize(weights, p=1.0, dim=1)
        return dispatch_replicated_tokens(
            self.mlp_op,
            hidden_states,
            expert_index,
            weights.to(hidden_states.dtype),
            num_experts=self.num_experts,
            trains_experts=any(it.requires_grad for it in self.mlp_op.parameters()),
            dispatcher=self._dispatcher,
            meanwhile=meanwhile,
        )


def _gated_by(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda gate, up: activation(gate) * up


def _check_whole_sequences(capacity_factor: float) -> None:
    """Raise a ValueError if ranks do not have whole sequences, whose first tokens an expert takes."""
    if active_group("cp").size > 1:
        raise ValueError(
            f"capacity_factor={capacity_factor} drops tokens by their position in the sequence, but sequences are cut "
            f"over {active_group('cp').size} context-parallel ranks; use capacity_factor=None"
        )


def within_capacity(expert_index: Tensor, sequences: Tensor, num_experts: int, capacity_factor: float) -> Tensor:
    """Return which of the tokens' experts have room for them: each expert takes the first tokens of every sequence.

    Args:
        expert_index: `[tokens, k]`.
        sequences: `[sequences, length]`, the tokens of each sequence in their order; each token is there once.
        num_experts: number of experts of the layer.
        capacity_factor: the capacity of an expert, as a multiple of its even share of a sequence's tokens.

    Returns:
        `[tokens, k]` bool.
    """
    length, top_k = sequences.shape[1], expert_index.shape[1]
    capacity = min(length, math.ceil(length * top_k * capacity_factor / num_experts))
    chosen = F.one_hot(expert_index, num_experts).sum(dim=1)  # [tokens, experts]
    number_in_sequence = torch.empty_like(chosen)
    number_in_sequence[sequences] = chosen[sequences].cumsum(dim=1)
    return number_in_sequence.gather(1, expert_index) <= capacity


class MoE(nn.Module):
    """Routes tokens to experts, and sums the experts' outputs.

    Args:
        router: the router.
        expert_mlps: the experts.
        shared_experts: a module applied to all tokens, `[seq, batch, hidden]`, the same on all tensor-parallel ranks;
            its output, of the same shape and full on each rank, is added.
        rmsnorm: a norm applied to the hidden states first.
        sequence_parallel_enabled: hidden states are split along the sequence, before and after.
        sequence_dimension: the dim that is split; 0 if None.
        return_router_logits: also return the router's logits, for `load_balancing_loss`.
        return_expert_index: also return the experts of each token.
        tensor_model_parallel_group: the ranks that split experts and the sequence.

    Raises:
        ValueError: router and experts do not fit.
    """

    def __init__(
        self,
        router: RouterBase,
        expert_mlps: ExpertMLPs,
        *,
        shared_experts: nn.Module | None = None,
        rmsnorm: nn.Module | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
        tensor_model_parallel_group: GivenGroup = None,
    ) -> None:
        super().__init__()
        for name in ("num_experts", "top_k", "hidden_size"):
            if getattr(router, name) != getattr(expert_mlps, name):
                raise ValueError(
                    f"{name} is {getattr(router, name)} in the router and {getattr(expert_mlps, name)} in the experts"
                )
        if router.sequence_parallel_enabled and not sequence_parallel_enabled:
            raise ValueError("the router takes part of the sequence; pass sequence_parallel_enabled=True here, too")
        self.sequence_dimension = sequence_dimension or 0
        if router.sequence_parallel_enabled and router.sequence_dimension != self.sequence_dimension:
            raise ValueError(
                f"sequence_dimension is {router.sequence_dimension} in the router and {self.sequence_dimension} here"
            )
        self.router, self.expert_mlps, self.rmsnorm = router, expert_mlps, rmsnorm
        self.shared_experts = shared_experts
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.return_router_logits, self.return_expert_index = return_router_logits, return_expert_index
        self._group = tensor_model_parallel_group

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Compute.

        Args:
            hidden_states: `[seq, batch, hidden]`, or `[seq/tp, batch, hidden]` if the sequence is split; or in another
                order, with the sequence at `sequence_dimension`.

        Returns:
            The same shape; then the router's logits `[tokens, experts]` and experts `[tokens, top_k]` if wanted.
        """
        if self.rmsnorm is not None:
            hidden_states = self.rmsnorm(hidden_states)
        sums = self.expert_mlps.sums_over_tensor_parallel_ranks
        whole = self._whole(hidden_states, grad_is_partial=False)
        logits, affinities, index = self.router(hidden_states if self.router.sequence_parallel_enabled else whole)
        if sums:  # each rank then has a part of these gradients
            affinities = copy_to_tensor_model_parallel_region(affinities, self._group)
            tokens = self._whole(hidden_states, grad_is_partial=True)
        else:
            tokens = whole
        rows = torch.arange(len(index), device=index.device).view(tokens.shape[:-1])
        sequences = torch.atleast_2d(rows.movedim(self.sequence_dimension, -1)).flatten(0, -2)  # [batch, seq]
        flat = tokens.reshape(-1, tokens.shape[-1])
        early: list[Tensor] = []  # of the shared experts, computed while counts of tokens are on their way

        def compute_early() -> None:
            if self.shared_experts is not None:
                early.append(self.shared_experts(whole))

        output = self.expert_mlps(flat, affinities, index, sequences=sequences, meanwhile=compute_early)
        output = self._as_given(output.view(tokens.shape), sums=sums)
        if self.shared_experts is not None:
            output = output + self._as_given(early[0] if early else self.shared_experts(whole), sums=False)
        further = [logits] if self.return_router_logits else []
        further += [index] if self.return_expert_index else []
        return (output, *further)

    def _whole(self, hidden_states: Tensor, *, grad_is_partial: bool) -> Tensor:
        if self.sequence_parallel_enabled:
            return gather_from_sequence_parallel_region(
                hidden_states,
                self.sequence_dimension,
                to_model_parallel=grad_is_partial,
                process_group=self._group,
            )
        return copy_to_tensor_model_parallel_region(hidden_states, self._group) if grad_is_partial else hidden_states

    def _as_given(self, output: Tensor, *, sums: bool) -> Tensor:
        if not self.sequence_parallel_enabled:
            return reduce_from_tensor_model_parallel_region(output, self._group) if sums else output
        change = reduce_scatter_to_sequence_parallel_region if sums else scatter_to_sequence_parallel_region
        return change(output, self.sequence_dimension, process_group=self._group)
