"""Balance between experts over a global batch: losses of routers, biases that follow the load, and the tokens counted.

Hooks on routers count their choices, and add the gradients of the losses to those of their logits. So a model need not
return logits, and a pipeline's stages need not send them. Padding is never counted, including the padding of sequences
that are split over context-parallel ranks. `balance` has the arithmetic.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from nxd_state import active_group, all_reduce, at_least_float32, get_device, get_rng_state, set_rng_state, widest_float
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nxd_layers.context.cut import cut_under_way
from nxd_layers.experts.balance import (
    MicrobatchTokens,
    RouterSums,
    count_loads,
    one_hot_of_top_k,
    probabilities_of,
)

T = TypeVar("T")


@dataclass(frozen=True)
class BalanceConfig:
    """How the loads of experts are balanced.

    Attributes:
        aux_loss_coef: weight of the load-balancing loss, `experts * sum(share of tokens * mean probability)`.
        aux_loss_scope: "global" takes shares and means over all layers and tokens of the global batch, as models of
            transformers do over their batch. "sequence" takes them over a row of the batch in a layer (DeepSeek-AI
            2024, "DeepSeek-V3"), and the mean over these.
        z_loss_coef: weight of the mean square of the logits' logsumexp (Zoph et al. 2022, "ST-MoE").
        bias_update_rate: the change of `e_score_correction_bias` per step: up for experts with fewer tokens than the
            mean of their layer, down for those with more (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing").
    """

    aux_loss_coef: float = 0.0
    aux_loss_scope: Literal["global", "sequence"] = "global"
    z_loss_coef: float = 0.0
    bias_update_rate: float = 0.0


@dataclass(frozen=True)
class RouterLayer:
    """A router of the whole model.

    Attributes:
        num_experts: number of experts of the layer.
        top_k: experts of each token.
        bias: path of its `e_score_correction_bias`, or None.
        keeps_order: whether its tokens are in the order of the sequences, one after the other.
    """

    num_experts: int
    top_k: int
    bias: str | None = None
    keeps_order: bool = True


@dataclass(frozen=True)
class RouterStatistics:
    """The routers' choices and losses in a step, the same on all ranks.

    Attributes:
        tokens_per_expert: `[layers, experts]`, float, over the global batch.
        aux_loss: 0-d, weighted; None without one.
        z_loss: 0-d, weighted; None without one.
    """

    tokens_per_expert: Tensor
    aux_loss: Tensor | None
    z_loss: Tensor | None

    @property
    def loss(self) -> Tensor | None:
        """The sum of the routers' losses; None without any."""
        parts = [it for it in (self.aux_loss, self.z_loss) if it is not None]
        return sum(parts[1:], parts[0]) if parts else None


class RouterBalance:
    """Counts the routers' choices in a step, and trains them to choose evenly.

    Attributes:
        config: the config.
        layers: all routers of the model by name, including those on other ranks.
        statistics: the statistics of the last step; None before the first.
        padding_mask: `[batch, length]` of the next step, true for tokens, for models without a mask input; a caller of
            `train` reads it and sets it to None.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], layers: Mapping[str, RouterLayer], config: BalanceConfig
    ) -> None:
        """Hook into the routers of a model.

        Args:
            modules: this rank's modules, by their names in the whole model.
            layers: the routers of the whole model, from `find_routers`.
            config: the config.
        """
        _check(layers, config)
        self.config, self.layers = config, dict(layers)
        self.statistics: RouterStatistics | None = None
        self.padding_mask: Tensor | None = None
        self._biases: dict[int, tuple[nn.Module, str]] = {}
        self._widest = max((it.num_experts for it in layers.values()), default=0)
        self._sums: RouterSums | None = None  # of this rank, while it counts
        self._totals: RouterSums | None = None  # of all ranks, once they are known
        self._microbatches = self._sequences = 0
        self._tokens: Sequence[Tensor] | None = None
        self._microbatch: Callable[[], int] = int
        self._batch_sums: Tensor | None = None  # [3]: ranks with padding masks; tokens and rows of the global batch
        self._adds_gradients = self._is_one_forward = False
        for index, (name, layer) in enumerate(layers.items()):
            if name in modules:
                modules[name].register_forward_hook(partial(self._after_router, index, layer))
                if layer.bias is not None:
                    owner, _, attribute = layer.bias.rpartition(".")
                    self._biases[index] = modules[owner], attribute

    @property
    def needs_totals(self) -> bool:
        """Whether gradients depend on counts over the whole global batch."""
        return self.config.aux_loss_coef > 0 and self.config.aux_loss_scope == "global"

    def train(
        self,
        run: Callable[[], T],
        *,
        count: Callable[[], Any] | None,
        num_microbatches: int,
        num_sequences: int,
        num_tokens: int = 0,
        tokens: Sequence[Tensor] | None = None,
        microbatch: Callable[[], int] = int,
        loss_scale: float = 1.0,
    ) -> T:
        """Run forward and backward of a step.

        Args:
            run: runs forward and backward.
            count: computes the same forwards without gradients, for counts that the first backward needs; None if there
                is a single forward, after which `forward_is_done` is called.
            num_microbatches: number of microbatches of this rank in `run`, all with as many tokens, including padding.
            num_sequences: number of sequences in each microbatch.
            num_tokens: number of tokens of this rank in `run`, including padding; used if only other replicas have
                padding.
            tokens: bool `[sequences, length]` of each microbatch, false for padding; None without padding.
            microbatch: returns the number of the microbatch whose forward is running.
            loss_scale: the factor of the loss's gradients in `run`.

        Returns:
            The result of `run`; `statistics` then holds those of the step.

        Raises:
            ValueError: there is padding, and it is unknown which of a router's tokens are padding.
        """
        self._microbatches, self._sequences = num_microbatches, num_sequences
        self._tokens, self._microbatch, self._loss_scale = tokens, microbatch, loss_scale
        self._batch_sums = self._sum_over_replicas(num_tokens)
        self._totals, self._is_one_forward = None, count is None
        if count is not None and self.needs_totals:
            streams = get_rng_state()
            with self._counting():
                count()
                self._add_up()
            set_rng_state(streams)  # `run` draws the same numbers, and so routes alike
            with self._adding_gradients():
                result = run()
        else:
            with self._counting(), self._adding_gradients():
                result = run()
                if self._totals is None:
                    self._add_up()
        self.statistics = self._statistics()
        return result

    def forward_is_done(self) -> None:
        """Sum the ranks' counts, if this was the forward of a step. Called by all ranks."""
        if self._sums is not None and self._is_one_forward:
            self._add_up()

    def _add_up(self) -> None:
        assert self._sums is not None  # it counts
        self._totals = self._sums.over_ranks()

    def _sum_over_replicas(self, num_tokens: int) -> Tensor | None:
        """See `_batch_sums`; None if no loss needs them before backward."""
        if not (self.config.z_loss_coef or self._is_per_sequence):
            return None
        here = torch.tensor([0.0, num_tokens, self._sequences * self._microbatches])
        if self._tokens is not None:
            rows = torch.stack([torch.stack([it.sum(), it.any(dim=1).sum()]) for it in self._tokens]).sum(dim=0)
            here = torch.cat([torch.ones(1, device=rows.device), rows])
        return all_reduce(here.to(get_device(), widest_float(get_device())), active_group("dp"))

    @property
    def _is_per_sequence(self) -> bool:
        return self.config.aux_loss_coef > 0 and self.config.aux_loss_scope == "sequence"

    @torch.no_grad()
    def update_biases(self) -> None:
        """Move the biases of this rank's routers against the loads of the last step."""
        if self.statistics is None or not self.config.bias_update_rate:
            return
        for index, (owner, attribute) in self._biases.items():
            bias: Tensor = getattr(owner, attribute)
            tokens = self.statistics.tokens_per_expert[index, : bias.numel()]
            missing = tokens.sum() - tokens * bias.numel()  # whole numbers: its sign is the same at every layout
            bias += self.config.bias_update_rate * missing.sign().view_as(bias).to(bias)

    def _statistics(self) -> RouterStatistics:
        totals, config = self._totals, self.config
        assert totals is not None  # every step ends with them
        aux_loss = None
        if config.aux_loss_coef and config.aux_loss_scope == "global":
            rows = totals.rows.clamp(min=1)
            aux_loss = config.aux_loss_coef * self._widest * (totals.chosen / rows * totals.probabilities / rows).sum()
        elif config.aux_loss_coef:
            aux_loss = config.aux_loss_coef * totals.sequence_loss / len(self.layers)
        z_loss = config.z_loss_coef * totals.z_loss / len(self.layers) if config.z_loss_coef else None
        return RouterStatistics(totals.tokens, aux_loss, z_loss)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        self._sums = RouterSums.zeros(len(self.layers), self._widest)
        try:
            yield
        finally:
            self._sums = None

    @contextmanager
    def _adding_gradients(self) -> Iterator[None]:
        self._adds_gradients = True
        try:
            yield
        finally:
            self._adds_gradients = False

    def _after_router(self, index: int, layer: RouterLayer, router: nn.Module, args: Any, output: Any) -> Any:
        # While backward runs, activation checkpointing computes a router again, whose tokens are counted already.
        is_again = torch._C._current_graph_task_id() != -1
        counts = self._sums is not None and not is_again
        if not counts and not self._adds_gradients:
            return None
        outputs = list(output)
        logits = outputs[0].reshape(-1, layer.num_experts)  # [tokens, experts]
        rows = None if is_again else self._rows_of(router, logits.detach(), layer)
        if counts:
            assert rows is not None  # it is not again
            tensors = [it for it in outputs[1:] if isinstance(it, Tensor)]
            chosen = next((it for it in tensors if not it.is_floating_point()), None)
            self._count(index, layer, logits.detach(), chosen, rows)
        has_loss = self.config.aux_loss_coef or self.config.z_loss_coef
        if not (has_loss and self._adds_gradients and torch.is_grad_enabled() and logits.requires_grad):
            return None
        used = next((place for place, it in enumerate(outputs) if place and getattr(it, "requires_grad", False)), None)
        if used is None:
            raise ValueError(
                f"{type(router).__name__} returns no expert weights beside its logits, which a router's loss needs "
                "for its gradient; set the coefficients of router losses to 0"
            )
        outputs[used] = _AddGradients.apply(outputs[used], logits, self, rows)
        return type(output)(outputs)

    @torch.no_grad()
    def _rows_of(self, router: nn.Module, logits: Tensor, layer: RouterLayer) -> "MicrobatchTokens":
        """Return which of a router's tokens in a microbatch are padding, and the counts that the losses need."""
        cut, contexts, replicas = cut_under_way.get(), active_group("cp"), active_group("dp").size
        length = len(logits) // max(self._sequences, 1) * contexts.size if cut is None else cut.length
        whole = None if self._tokens is None else self._tokens[self._microbatch()].to(logits.device)
        given = whole
        if cut is not None:
            given = whole if whole is not None else logits.new_ones(self._sequences, length, dtype=torch.bool)
            given = cut.part_of(given, contexts.rank, fill=0)
        self._check_order(router, layer, len(logits), given, whole)
        is_token = given.flatten() if given is not None and layer.keeps_order else None
        tokens: Tensor | int = length * self._sequences * self._microbatches * replicas
        sequences: Tensor | int = self._sequences * self._microbatches * replicas
        if self._batch_sums is not None:
            with_masks, *sums = self._batch_sums
            tokens, sequences = (
                torch.where(with_masks > 0, of_masks, assumed)
                for of_masks, assumed in zip(sums, (tokens, sequences), strict=True)
            )
        rows = MicrobatchTokens(is_token, tokens, sequences)
        if self._is_per_sequence:
            probabilities = probabilities_of(logits)
            both = torch.stack(
                [one_hot_of_top_k(probabilities, layer.top_k), probabilities], dim=1
            )  # [tokens, 2, experts]
            summed = rows.only(both).view(self._sequences, -1, 2, layer.num_experts).sum(dim=1)
            summed = all_reduce(summed, contexts) if contexts.size > 1 else summed
            counts = summed.new_full((self._sequences,), length) if whole is None else whole.sum(dim=1)
            rows.lengths = counts.clamp(min=1).to(summed).view(-1, 1, 1)
            rows.shares = summed / rows.lengths
        return rows

    def _check_order(
        self, router: nn.Module, layer: RouterLayer, num_rows: int, given: Tensor | None, whole: Tensor | None
    ) -> None:
        if given is None or (layer.keeps_order and given.numel() == num_rows):
            return
        is_filled = given.numel() != num_rows and active_group("cp").size > 1
        if is_filled or (whole is not None and not bool(whole.all())):
            raise ValueError(
                f"{type(router).__name__} gets {num_rows} tokens, but it is unknown which of them are padding: the "
                f"batch has {tuple(given.shape)} positions here, and routers of nxd_layers take them in any order; "
                "pass batches without padding, or do not balance experts"
            )

    @torch.no_grad()
    def _count(
        self, index: int, layer: RouterLayer, logits: Tensor, chosen: Tensor | None, rows: MicrobatchTokens
    ) -> None:
        sums, experts = self._sums, layer.num_experts
        assert sums is not None  # it counts
        probabilities = probabilities_of(logits)
        top_k = torch.topk(probabilities, layer.top_k, dim=-1).indices
        used = (top_k if chosen is None else chosen).reshape(len(logits), -1)
        sums.tokens[index, :experts] += count_loads(used, experts, rows)
        if self.needs_totals:
            sums.chosen[:experts] += count_loads(top_k, experts, rows)
            sums.probabilities[:experts] += rows.only(probabilities).sum(dim=0, dtype=sums.probabilities.dtype)
            sums.rows += len(logits) if rows.is_token is None else rows.is_token.sum()
        if rows.shares is not None:
            of_sequences = experts * rows.shares.to(sums.sequence_loss).prod(dim=1).sum()
            sums.sequence_loss += of_sequences / rows.sequences / active_group("cp").size
        if self.config.z_loss_coef:
            squares = at_least_float32(logits).logsumexp(dim=-1).square()
            sums.z_loss += rows.only(squares).sum() / rows.tokens

    def gradient(self, logits: Tensor, rows: MicrobatchTokens) -> Tensor:
        """Return the gradient of all ranks' losses with respect to this rank's logits.

        It is multiplied by the number of replicas, over which gradients are averaged, and by the loss scale.

        Args:
            logits: `[tokens, experts]` of a microbatch in a layer.
            rows: the tokens of these logits.
        """
        experts = logits.shape[1]
        config, replicas = self.config, active_group("dp", "cp").size
        probabilities = probabilities_of(logits)
        gradient = torch.zeros_like(probabilities)
        if config.aux_loss_coef and len(logits):
            if rows.shares is None:
                assert self._totals is not None  # they are complete before backward begins
                of_layers = self._totals.rows.clamp(min=1)
                by_probability = self._totals.chosen[:experts] / of_layers / of_layers * replicas
            else:
                of_sequences = rows.shares[:, 0] / rows.lengths.view(-1, 1) * replicas / rows.sequences
                by_probability = of_sequences.repeat_interleave(len(logits) // self._sequences, dim=0)
                by_probability = by_probability / len(self.layers)
            scaled = probabilities * (config.aux_loss_coef * experts * by_probability).to(probabilities)
            gradient += scaled - probabilities * scaled.sum(dim=-1, keepdim=True)
        if config.z_loss_coef and len(logits):
            scaled = at_least_float32(logits).logsumexp(dim=-1, keepdim=True) * probabilities
            gradient += scaled * (2 * config.z_loss_coef * replicas / len(self.layers) / rows.tokens)
        return rows.only(gradient * self._loss_scale)


class _AddGradients(Function):
    """Passes on the router's output, and in backward adds the losses' gradient to that of the logits."""

    @staticmethod
    def forward(ctx: Any, used: Tensor, logits: Tensor, balance: RouterBalance, rows: MicrobatchTokens) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.balance, ctx.rows = balance, rows
        return used.view_as(used)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        return grad, ctx.balance.gradient(logits, ctx.rows).to(logits.dtype), None, None


def _check(layers: Mapping[str, RouterLayer], config: BalanceConfig) -> None:
    asked = [
        f"{name}={getattr(config, name):g}"
        for name in ("aux_loss_coef", "z_loss_coef", "bias_update_rate")
        if getattr(config, name)
    ]
    if asked and not layers:
        raise ValueError(f"{', '.join(asked)} needs a model with supported routers, and this one has none")
    if config.bias_update_rate and not all(layer.bias for layer in layers.values()):
        raise ValueError(
            f"bias_update_rate={config.bias_update_rate:g} needs routers with an "
            "e_score_correction_bias, as in DeepSeek-V3; set it to 0, and use aux_loss_coef instead"
        )
    if len({layer.num_experts for layer in layers.values()}) > 1 and config.aux_loss_coef:
        raise ValueError(
            f"aux_loss_coef={config.aux_loss_coef:g} sums over the experts of all layers, but this model's layers have "
            "different numbers of them; set it to 0"
        )
    if config.aux_loss_scope == "sequence" and not all(layer.keeps_order for layer in layers.values()):
        raise ValueError(
            "aux_loss_scope='sequence' needs the sequence of each token, but routers of nxd_layers take "
            "tokens in any order; use 'global'"
        )
