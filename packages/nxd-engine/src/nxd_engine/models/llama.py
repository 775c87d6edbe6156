"""Llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU; tied or untied head.

Parameter names are those of the Hugging Face model, so its weights fit. With one rank this is an ordinary PyTorch
model; with more, each layer holds its part. Notable:

- hidden states are `[seq, batch, hidden]`, so that sequence parallelism splits contiguous memory;
- query, key and value share one input, as do gate and up: one collective per direction for each such set;
- it can be traced by torch.fx, and so be cut into pipeline stages between its layers;
- where the tensor-parallel degree does not divide the key-value heads, several ranks hold copies of a head;
- the loss never sees whole logits.

Legend for shapes: S sequence, B batch, H hidden, N heads on this rank, K key-value heads on this rank, D head size,
V vocabulary. In sequence-parallel regions S is the rank's part of the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from nxd_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RMSNorm,
    RowParallelLinear,
    column_parallel_linears,
    linear_cross_entropy,
    parallel_cross_entropy,
)
from nxd_layers.attention import CoreAttention, attention_mask
from nxd_layers.chunked_loss import takes_head
from nxd_layers.context import (
    AttentionPlan,
    causal_plan,
    own_part,
    own_positions,
    sum_over_contexts,
    whole_sequence,
)
from nxd_layers.key_value_heads import kv_size_multiplier_for
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from nxd_state import active_group, all_reduce
from torch import Tensor, fx, nn
from torch.nn import functional as F

from nxd_engine.models.llama_config import LlamaConfig, check_rope, rotary_tables, rotate

IGNORED_LABEL = -100
SHORTEST_PROMPT = 512  # tokens; context-parallel ranks split prompts of at least this length

# Leaf functions of the torch.fx trace that splits the model into pipeline stages.
fx.wrap("rotary_tables")
fx.wrap("_number_of_labels")


@dataclass
class LlamaCache:
    """Keys and values of the tokens seen so far, per layer, for generation."""

    keys: list[Tensor] = field(default_factory=list)  # [B, K, S, D] per layer
    values: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.keys[0].shape[2] if self.keys else 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values of one layer; return all of them."""
        if layer == len(self.keys):
            self.keys.append(key)
            self.values.append(value)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], key], dim=2)
            self.values[layer] = torch.cat([self.values[layer], value], dim=2)
        return self.keys[layer], self.values[layer]


def _number_of_labels(labels: Tensor) -> Tensor:
    """The number of labels on all context-parallel ranks, 0-d."""
    return all_reduce((labels != IGNORED_LABEL).sum(), active_group("cp"))


def _plan_of_prompt(
    input_ids: Tensor, document_ids: Tensor | None, padding_mask: Tensor | None
) -> AttentionPlan | None:
    """The plan of a prompt that is split; None if only a dense mask can express it, such as padding between tokens."""
    try:
        return causal_plan(input_ids, document_ids, padding_mask)
    except ValueError:
        return None


class _LayerFactory:
    """Makes the layers of one model from the arguments that they share."""

    def __init__(
        self, config: LlamaConfig, sequence_parallel: bool, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        self.config, self.sequence_parallel = config, sequence_parallel
        self._norm: dict[str, Any] = {
            "sequence_parallel_enabled": sequence_parallel,
            "dtype": dtype,
            "device": device,
        }
        self._weight = {**self._norm, "init_method": partial(nn.init.normal_, std=config.initializer_range)}

    def embedding(self) -> ParallelEmbedding:
        sizes = (self.config.vocab_size, self.config.hidden_size)
        return ParallelEmbedding(*sizes, sequence_dimension=0, **self._weight)

    def column(self, input_size: int, output_size: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(input_size, output_size, bias=False, gather_output=False, **self._weight)

    def query_key_value(self) -> GQAQKVColumnParallelLinear:
        config = self.config
        return GQAQKVColumnParallelLinear(
            config.hidden_size,
            [config.hidden_size, config.num_key_value_heads * config.head_size],
            bias=False,
            gather_output=False,
            kv_size_multiplier=kv_size_multiplier_for(config.num_key_value_heads, active_group("tp").size),
            num_key_value_heads=config.num_key_value_heads,
            **self._weight,
        )

    def row(self, input_size: int, output_size: int) -> RowParallelLinear:
        return RowParallelLinear(input_size, output_size, bias=False, input_is_parallel=True, **self._weight)

    def norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, **self._norm)


class LlamaAttention(nn.Module):
    """Causal self-attention; each rank computes its share of the heads.

    Where the tensor-parallel degree does not divide the key-value heads, `qkv_proj` takes the place of `q_proj`,
    `k_proj` and `v_proj`; in checkpoints it has their names.
    """

    def __init__(self, make: _LayerFactory, layer: int) -> None:
        super().__init__()
        config = make.config
        self.layer = layer
        self.head_size = config.head_size
        self.has_copied_heads = config.num_key_value_heads % active_group("tp").size > 0
        if self.has_copied_heads:
            self.qkv_proj = make.query_key_value()
        else:
            self.q_proj = make.column(config.hidden_size, config.hidden_size)
            self.k_proj = make.column(config.hidden_size, config.num_key_value_heads * config.head_size)
            self.v_proj = make.column(config.hidden_size, config.num_key_value_heads * config.head_size)
        self.o_proj = make.row(config.hidden_size, config.hidden_size)
        self.core = CoreAttention()

    def forward(
        self,
        hidden_sbh: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: LlamaCache | None,
        mask: Tensor | AttentionPlan | None = None,
    ) -> Tensor:
        """`[S, B, H]` to `[S, B, H]`."""
        q_bnsd, k_bksd, v_bksd = (self._split_heads(p) for p in self._project(hidden_sbh))
        q_bnsd, k_bksd = rotate(q_bnsd, *rotary), rotate(k_bksd, *rotary)
        if cache is not None and not isinstance(mask, AttentionPlan):
            k_bksd, v_bksd = cache.extend(self.layer, k_bksd, v_bksd)
        mixed_bnsd = self.core(q_bnsd, k_bksd, v_bksd, mask)
        if cache is not None and isinstance(mask, AttentionPlan):  # a prompt, which is decoded by all ranks alike
            cache.extend(self.layer, *(whole_sequence(it, mask.cut, dim=2) for it in (k_bksd, v_bksd)))
        output: Tensor = self.o_proj(mixed_bnsd.permute(2, 0, 1, 3).flatten(2))
        return output

    def _project(self, hidden_sbh: Tensor) -> tuple[Tensor, ...]:
        if self.has_copied_heads:
            projected: tuple[Tensor, ...] = self.qkv_proj(hidden_sbh)
            return projected
        return column_parallel_linears(hidden_sbh, [self.q_proj, self.k_proj, self.v_proj])

    def _split_heads(self, projected_sbx: Tensor) -> Tensor:
        """`[S, B, N*D]` to `[B, N, S, D]`."""
        return projected_sbx.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3)


class LlamaMLP(nn.Module):
    """SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`."""

    def __init__(self, make: _LayerFactory) -> None:
        super().__init__()
        self.gate_proj = make.column(make.config.hidden_size, make.config.intermediate_size)
        self.up_proj = make.column(make.config.hidden_size, make.config.intermediate_size)
        self.down_proj = make.row(make.config.intermediate_size, make.config.hidden_size)

    def forward(self, hidden_sbh: Tensor) -> Tensor:
        """`[S, B, H]` to `[S, B, H]`."""
        gate, up = column_parallel_linears(hidden_sbh, [self.gate_proj, self.up_proj])
        output: Tensor = self.down_proj(F.silu(gate) * up)
        return output


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, make: _LayerFactory, layer: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(make, layer)
        self.mlp = LlamaMLP(make)
        self.input_layernorm = make.norm()
        self.post_attention_layernorm = make.norm()

    def forward(
        self,
        hidden_sbh: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: LlamaCache | None,
        mask: Tensor | AttentionPlan | None = None,
    ) -> Tensor:
        """`[S, B, H]` to `[S, B, H]`."""
        hidden_sbh = hidden_sbh + self.self_attn(self.input_layernorm(hidden_sbh), rotary, cache, mask)
        return hidden_sbh + self.mlp(self.post_attention_layernorm(hidden_sbh))


class LlamaModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, make: _LayerFactory) -> None:
        super().__init__()
        self.config = make.config
        # Divides the positions of a chunk of a sequence that is cut over context-parallel ranks.
        self.multiple = active_group("tp").size if make.sequence_parallel else 1
        check_rope(make.config)
        self.embed_tokens = make.embedding()
        self.layers = nn.ModuleList([LlamaDecoderLayer(make, i) for i in range(make.config.num_hidden_layers)])
        self.norm = make.norm()

    def forward(
        self,
        input_ids_bs: Tensor,
        cache: LlamaCache | None,
        document_ids_bs: Tensor | None = None,
        padding_mask_bs: Tensor | None = None,
    ) -> Tensor:
        """Token ids `[B, S]` to hidden states `[S, B, H]`; with context parallelism those of this rank's positions.

        With a cache they are those of all positions: only long prompts are cut then, while they are read.
        """
        length = input_ids_bs.shape[1]
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + length, device=input_ids_bs.device)
        mask: Tensor | AttentionPlan | None = None  # made once for all layers
        cuts = active_group("cp").size > 1
        if cuts and cache is None:
            mask = causal_plan(input_ids_bs, document_ids_bs, padding_mask_bs, self.multiple)
        elif cuts and start == 0 and length >= SHORTEST_PROMPT and not torch.is_grad_enabled():
            mask = _plan_of_prompt(input_ids_bs, document_ids_bs, padding_mask_bs)
        if (cuts and cache is None) or isinstance(mask, AttentionPlan):
            positions = own_positions(input_ids_bs, self.multiple, document_ids_bs)
            input_ids_bs = own_part(input_ids_bs, self.multiple, 0, document_ids_bs)
        elif document_ids_bs is not None or padding_mask_bs is not None:
            mask = attention_mask(length, start + length, padding_mask=padding_mask_bs, document_ids=document_ids_bs)
        hidden_sbh = self.embed_tokens(input_ids_bs.t())
        rotary = rotary_tables(positions, start + length, self.config, like=hidden_sbh)
        for layer in self.layers:
            hidden_sbh = layer(hidden_sbh, rotary, cache, mask)
        output: Tensor = self.norm(hidden_sbh)
        if cache is not None and isinstance(mask, AttentionPlan):
            return whole_sequence(output, mask.cut, dim=0)
        return output


class CausalLMOutput(NamedTuple):
    """Loss and logits of a language model, by name or by index: `output_loss_value_spec=(True, False)`.

    Attributes:
        loss: 0-d; None without labels.
        logits: this rank's part, `[B, S, V/tp]`.
    """

    loss: Tensor | None
    logits: Tensor


class LlamaForCausalLM(nn.Module):
    """Llama with its language-model head.

    Args:
        config: sizes.
        sequence_parallel: split the residual stream along the sequence between the layers.
        dtype: dtype of all parameters.
        device: device of all parameters; torch's default device if None.
        return_dict: `forward` returns a `CausalLMOutput`, as scripts for models of transformers expect.

    Attributes:
        loss_function: function of this rank's part of the logits and labels that replaces the cross-entropy; may be set
            at any time.

    Raises:
        ValueError: sizes that do not fit each other or the tensor-parallel degree.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        return_dict: bool = False,
    ) -> None:
        super().__init__()
        config.check(active_group("tp").size)
        self.return_dict = return_dict
        self.config = config
        self.sequence_parallel = sequence_parallel
        self.loss_function: Callable[..., Tensor] | None = None
        make = _LayerFactory(config, sequence_parallel, dtype, device)
        self.model = LlamaModel(make)
        self.lm_head = make.column(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        cache: LlamaCache | None = None,
        document_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
        reference_log_probs: Tensor | None = None,
    ) -> Tensor | CausalLMOutput:
        """Logits, or the loss if there are labels.

        Args:
            input_ids: token ids `[B, S]`; S is a multiple of the tensor-parallel degree if sequence parallel.
            labels: `[B, S]`, the token that follows each input token; -100 where there is none.
            cache: keys and values of earlier tokens; extended in place. Not with sequence parallelism.
            document_ids: the document of each token in packed sequences, `[B, S]`, with a cache also for the tokens in
                it: attention stays within a document. Positions need not restart, since only differences of rotary
                positions count.
            attention_mask: 1 for tokens and 0 for padding, `[B, S]`, with a cache also for the tokens in it: no token
                attends to padding. Labels at padding must be -100.
            num_items_in_batch: divides the sum of the losses, instead of the number of labels here, 0-d.
            reference_log_probs: for `loss_function`, `[B]`.

        Returns:
            Without labels this rank's part of the logits, `[B, S, V/tp]`; with labels the mean loss, 0-d. Both in a
            `CausalLMOutput` with `return_dict`. With context parallelism logits are of this rank's positions
            (`nxd_layers.context.SequenceCut`), and the loss of all.

        Raises:
            ValueError: a cache with sequence parallelism, or `loss_function` with context parallelism.
        """
        if cache is not None and self.sequence_parallel:
            raise ValueError("generation with a cache needs a model built with sequence_parallel=False")
        hidden_sbh = self.model(input_ids, cache, document_ids, attention_mask)
        loss = None
        if labels is not None and cache is None and active_group("cp").size > 1:
            if self.loss_function is not None:
                raise ValueError(
                    "loss_function would see only this rank's positions; use context_parallel_size=1 with it"
                )
            labels = own_part(labels, self.model.multiple, IGNORED_LABEL, document_ids)
            head = self.lm_head
            if isinstance(head, ColumnParallelLinear) and takes_head(head) and not self.return_dict:
                # Sequences are long here, and their logits are not requested: compute them for some tokens at a time.
                total = linear_cross_entropy(hidden_sbh, head, labels.t(), ignore_index=IGNORED_LABEL, reduction="sum")
                return sum_over_contexts(total / self._divisor(labels, num_items_in_batch))
        logits_sbv = self.lm_head(hidden_sbh)
        if labels is not None and self.loss_function is not None:
            loss = self.loss_function(logits_sbv.transpose(0, 1), labels, reference_log_probs=reference_log_probs)
        elif labels is not None:
            losses_sb = parallel_cross_entropy(logits_sbv, labels.t(), ignore_index=IGNORED_LABEL)
            if cache is None:
                loss = sum_over_contexts(losses_sb.sum() / self._divisor(labels, num_items_in_batch))
            else:  # every context-parallel rank has all positions
                count = (labels != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
                loss = losses_sb.sum() / (count + (count == 0))
        if self.return_dict:
            return CausalLMOutput(loss, logits_sbv.transpose(0, 1))
        return logits_sbv.transpose(0, 1) if loss is None else loss

    def _divisor(self, labels: Tensor, num_items_in_batch: Tensor | None) -> Tensor:
        count = _number_of_labels(labels) if num_items_in_batch is None else num_items_in_batch
        return count + (count == 0)
