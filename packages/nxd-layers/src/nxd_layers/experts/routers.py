"""Routers: which experts a token goes to, and with what weight."""

import torch
from nxd_state import widest_float
from nxd_state.parameter_marks import mark_sequence_parallel
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.mappings import GivenGroup, gather_from_sequence_parallel_region

_SINKHORN_ITERATIONS = 30
_SMALL = 1e-8


class RouterBase(nn.Module):
    """Base of the routers: the linear layer, and the function that turns its logits into affinities.

    Args:
        num_experts: number of experts of the layer, on all ranks together.
        top_k: experts of each token.
        hidden_size: hidden size of tokens.
        act_fn: "softmax" or "sigmoid".
        sequence_parallel_enabled: each rank computes the logits of its part of the sequence, which are then gathered.
        sequence_dimension: the dim that is split; 0 if None.
        dtype: dtype of the weight.
        device: device of the weight.
        bias: whether the linear layer has one.
        tensor_model_parallel_group: the ranks that share the sequence.
        jitter_eps: in training, tokens are multiplied by random numbers in `1 - jitter_eps` to `1 + jitter_eps` (Fedus
            et al. 2021, "Switch Transformers").

    Raises:
        ValueError: `top_k` is not possible, or `act_fn` is unknown.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str = "softmax",
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        bias: bool = False,
        tensor_model_parallel_group: GivenGroup = None,
        jitter_eps: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must be 1 to num_experts={num_experts}")
        if act_fn not in ("softmax", "sigmoid"):
            raise ValueError(f"unknown act_fn={act_fn!r}; use 'softmax' or 'sigmoid'")
        self.num_experts, self.top_k, self.hidden_size, self.act_fn = num_experts, top_k, hidden_size, act_fn
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.jitter_eps = jitter_eps
        self._group = tensor_model_parallel_group
        self.linear_router = nn.Linear(hidden_size, num_experts, bias=bias, dtype=dtype, device=device)
        for parameter in self.linear_router.parameters():
            mark_sequence_parallel(parameter, sequence_parallel_enabled)

    def get_router_logits(self, hidden_states: Tensor) -> Tensor:
        """`[seq, batch, hidden]` or another order, in part if the sequence is split, to `[tokens, experts]`, whole."""
        tokens = hidden_states.to(self.linear_router.weight.dtype)
        if self.jitter_eps and self.training:
            tokens = tokens * torch.empty_like(tokens).uniform_(1.0 - self.jitter_eps, 1.0 + self.jitter_eps)
        logits: Tensor = self.linear_router(tokens)
        if self.sequence_parallel_enabled:
            logits = gather_from_sequence_parallel_region(
                logits, self.sequence_dimension, to_model_parallel=False, process_group=self._group
            )
        return logits.reshape(-1, self.num_experts)

    def apply_activation_fn(self, weights: Tensor) -> Tensor:
        """Affinities of logits, in the widest floats that the device has."""
        wide = weights.to(widest_float(weights.device))
        return torch.sigmoid(wide) if self.act_fn == "sigmoid" else F.softmax(wide, dim=-1)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route.

        Args:
            hidden_states: as for `get_router_logits`.

        Returns:
            Logits and affinities, `[tokens, experts]`, and the chosen experts, `[tokens, top_k]` int64.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward, so it does not route; use RouterTopK")


class RouterTopK(RouterBase):
    """The `top_k` experts with the largest logits; nothing balances them but a loss, `load_balancing_loss`.

    Args:
        num_experts: see `RouterBase`.
        top_k: see `RouterBase`.
        hidden_size: see `RouterBase`.
        apply_act_fn_over_topk: affinities among the chosen ones only.
        **options: options of `RouterBase`.
    """

    def __init__(
        self, num_experts: int, top_k: int, hidden_size: int, *, apply_act_fn_over_topk: bool = False, **options: object
    ) -> None:
        super().__init__(num_experts, top_k, hidden_size, **options)  # type: ignore[arg-type]
        self.apply_act_fn_over_topk = apply_act_fn_over_topk

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `RouterBase.forward`."""
        logits = self.get_router_logits(hidden_states)
        chosen, index = torch.topk(logits, self.top_k, dim=1)
        if self.apply_act_fn_over_topk:
            wide = self.apply_activation_fn(chosen)
            affinities = torch.zeros_like(logits, dtype=wide.dtype).scatter(1, index, wide)
        else:
            affinities = self.apply_activation_fn(logits)
        return logits, affinities.to(hidden_states.dtype), index.detach()


class GroupLimitedRouter(RouterBase):
    """The `top_k` best experts of the best groups, whose choice a bias balances (DeepSeek-AI 2024, "DeepSeek-V3").

    Experts are compared by their sigmoid plus the bias, groups by the sum of their two best; affinities are without it.

    Args:
        num_experts: see `RouterBase`.
        top_k: see `RouterBase`.
        hidden_size: see `RouterBase`.
        n_group: groups of experts.
        topk_group: groups of each token.
        **options: options of `RouterBase`, except `act_fn`.

    Attributes:
        e_score_correction_bias: `[experts]`, float32, a buffer; zeros at first.

    Raises:
        ValueError: groups do not divide the experts, have fewer than two, or are too few for `top_k` experts.
    """

    e_score_correction_bias: Tensor

    def __init__(
        self, num_experts: int, top_k: int, hidden_size: int, *, n_group: int, topk_group: int, **options: object
    ) -> None:
        if num_experts % n_group or num_experts < 2 * n_group:
            raise ValueError(f"n_group={n_group} must divide num_experts={num_experts} into groups of two or more")
        if not 0 < topk_group <= n_group or top_k > topk_group * (num_experts // n_group):
            raise ValueError(
                f"topk_group={topk_group} of n_group={n_group} groups have fewer than top_k={top_k} experts"
            )
        super().__init__(num_experts, top_k, hidden_size, "sigmoid", **options)  # type: ignore[arg-type]
        self.n_group, self.topk_group = n_group, topk_group
        bias = torch.zeros(num_experts, device=self.linear_router.weight.device)
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `RouterBase.forward`."""
        logits = self.get_router_logits(hidden_states)
        affinities = self.apply_activation_fn(logits).to(hidden_states.dtype)
        with torch.no_grad():
            scores = (affinities + self.e_score_correction_bias).unflatten(1, (self.n_group, -1))  # [tokens, groups, .]
            groups = scores.topk(2, dim=-1).values.sum(dim=-1).topk(self.topk_group, dim=-1).indices
            is_out = torch.ones_like(scores[..., 0], dtype=torch.bool).scatter(1, groups, False)
            index = scores.masked_fill(is_out.unsqueeze(-1), 0.0).flatten(1).topk(self.top_k, dim=-1).indices
        return logits, affinities, index


class RouterSinkhorn(RouterBase):
    """One expert per token; in training, experts are chosen so that all get about as many tokens.

    The logits' exponentials are scaled by rows and columns in turn, until both are even (Sinkhorn and Knopp 1967; Clark
    et al. 2022, "Unified Scaling Laws for Routed Language Models").

    Args:
        num_experts: see `RouterBase`, also for the arguments up to `device`.
        top_k: 1.
        sinkhorn_iterations: maximum number of iterations; 30 if None.
        sinkhorn_tol: mean change of the experts' scales at which to stop; None: never.

    Raises:
        ValueError: `top_k` is not 1.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str = "sigmoid",
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        sinkhorn_iterations: int | None = None,
        sinkhorn_tol: float | None = None,
    ) -> None:
        if top_k != 1:
            raise ValueError(f"top_k={top_k} must be 1: RouterSinkhorn chooses one expert; use RouterTopK for more")
        super().__init__(
            num_experts, top_k, hidden_size, act_fn, sequence_parallel_enabled, sequence_dimension, dtype, device
        )
        self.sinkhorn_iterations = _SINKHORN_ITERATIONS if sinkhorn_iterations is None else sinkhorn_iterations
        self.sinkhorn_tol = sinkhorn_tol

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `RouterBase.forward`."""
        logits = self.get_router_logits(hidden_states)
        affinities = self.apply_activation_fn(logits).to(hidden_states.dtype)
        chosen = self._balanced(logits.detach()) if self.training else logits.detach()
        return logits, affinities, chosen.argmax(dim=1, keepdim=True)

    def _balanced(self, logits: Tensor) -> Tensor:
        wide = logits.to(widest_float(logits.device))
        cost = (wide - wide.amax(dim=1, keepdim=True)).exp()
        of_experts = cost.new_ones(cost.shape[1])
        for _ in range(self.sinkhorn_iterations):
            of_tokens = 1 / (len(cost) * (cost @ of_experts + _SMALL))
            before, of_experts = of_experts, 1 / (cost.shape[1] * (of_tokens @ cost + _SMALL))
            if self.sinkhorn_tol is not None and (of_experts - before).abs().mean() < self.sinkhorn_tol:
                break
        return cost * of_experts  # the scale of a token does not change which expert is its largest
