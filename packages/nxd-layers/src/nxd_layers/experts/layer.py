"""A mixture-of-experts layer of a router and experts."""

import torch
from torch import Tensor, nn

from nxd_layers.experts.mlps import ExpertMLPs
from nxd_layers.experts.routers import RouterBase
from nxd_layers.mappings import (
    GivenGroup,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)


class MoE(nn.Module):
    """Routes tokens, and adds up what their experts make of them.

    Args:
        router: chooses experts.
        expert_mlps: has them.
        shared_experts: takes all tokens, `[seq, batch, hidden]`, the same on all tensor-parallel ranks; its output, of
            the same shape and whole on each of them, is added.
        rmsnorm: applied to the hidden states first.
        sequence_parallel_enabled: hidden states are split along the sequence, before and after.
        sequence_dimension: the dim that is split; 0 if None.
        return_router_logits: return these, too, for `load_balancing_loss`.
        return_expert_index: return the experts of each token, too.
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
