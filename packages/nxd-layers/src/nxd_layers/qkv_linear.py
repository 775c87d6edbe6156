"""The query, key and value projections of attention as one layer, for any number of key and value heads.

Grouped-query attention (Ainslie et al. 2023) has fewer key and value heads than query heads, often fewer than
tensor-parallel ranks: then several ranks hold copies of a head. How the heads lie is in `key_value_heads`.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from nxd_state import (
    ShardSpec,
    active_group,
    fuse_along,
    set_partition_attributes,
    set_shard_spec,
    shard_along,
    subgroup,
)
from torch import Tensor, nn

from nxd_layers.column_linear import column_linear
from nxd_layers.initialization import (
    InitMethod,
    default_bias_init,
    default_linear_init,
    empty_parameter,
    fill_from_logical,
)
from nxd_layers.key_value_heads import HeadCopies, KeyValueLayout, kv_size_multiplier_for
from nxd_layers.layer_group import layer_group
from nxd_layers.linear import _check_arguments
from nxd_layers.regions import gather_from_tensor_model_parallel_region

_NAMES = ("q", "k", "v")


class GQAQKVColumnParallelLinear(nn.Module):
    """`(X Q + b_q, X K + b_k, X V + b_v)`, each split by columns, with one collective per direction for all three.

    Parameters hold `kv_size_multiplier` copies of each key and value head over the ranks; their gradients are summed
    when `backward()` returns, so copies stay equal. Shard metadata names the logical tensors "q_proj.weight",
    "k_proj.weight", "v_proj.weight" (and ".bias"), beside this layer in its parent, whole and without copies:
    checkpoints do not depend on degree, multiplier or fusing. Initial weights do not either: they are those of three
    `nn.Linear` made one after the other, for q, k and v.

    Args:
        input_size: length of the input's last dim.
        output_sizes: lengths of q and of k (and v), over all ranks and without copies; one number where all are equal.
        bias: whether to add biases.
        gather_output: give every rank q, k and v whole, each head once; otherwise its parts.
        sequence_parallel_enabled: the input is split along the sequence, and is gathered first.
        dtype: of all parameters.
        device: of all parameters; torch's default device if None.
        kv_size_multiplier: copies of each key and value head; divides the tensor-parallel degree.
        fuse_qkv: hold one weight and one bias per rank, and compute one product.
        init_method: fills each whole weight in place; as in `nn.Linear` if None.
        sequence_dimension: which dim of the input is the sequence.
        num_key_value_heads: of the model, so that heads are copied and dealt out as wholes. None treats a rank's rows
            as one head: right without copies, and where the multiplier just suffices for one head per rank.
        output_size: another spelling of `output_sizes`.

    Attributes:
        weight_qkv: `[(q + 2 * kv * kv_size_multiplier)/tp, in]`, q above k above v, if fused; otherwise `weight_q`
            `[q/tp, in]`, `weight_k` and `weight_v` `[kv * kv_size_multiplier/tp, in]`.
        bias_qkv: the same without `in`; otherwise `bias_q`, `bias_k`, `bias_v`. None without bias.

    Raises:
        ValueError: sizes that the tensor-parallel degree does not divide; the message names a multiplier that helps.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int] | int | None = None,
        bias: bool = True,
        gather_output: bool = True,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        *,
        init_method: InitMethod | None = None,
        sequence_dimension: int = 0,
        num_key_value_heads: int | None = None,
        output_size: Sequence[int] | int | None = None,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.q_size, self.kv_size = _query_and_key_size(output_sizes if output_size is None else output_size)
        _check_arguments(input_size, min(self.q_size, self.kv_size), sequence_parallel_enabled)
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.kv_size_multiplier = kv_size_multiplier
        self.fuse_qkv = fuse_qkv
        self.init_method = init_method or default_linear_init
        group = active_group("tp")
        self.tensor_parallel_size = group.size
        self.key_value_layout = _layout(self.q_size, self.kv_size, num_key_value_heads, kv_size_multiplier, group.size)
        self._local_sizes = (self.q_size // group.size, *[self.key_value_layout.rows_per_rank] * 2)
        self._specs = {
            "weight": self._specs_of("weight", (input_size,), group.rank),
            "bias": self._specs_of("bias", (), group.rank),
        }
        self._add_parameters("weight", dtype, device)
        self._add_parameters("bias", dtype if bias else None, device)
        self._copies()  # makes their process group, which cannot be done while a graph is recorded
        self.reset_parameters()

    def _specs_of(self, kind: str, row_shape: tuple[int, ...], tp_rank: int) -> list[ShardSpec]:
        """Of q, k and v."""
        whole = (self.q_size, *row_shape)
        query = shard_along(whole, 0, rank=tp_rank, size=self.tensor_parallel_size, name=f"q_proj.{kind}")
        return [query, *(self.key_value_layout.spec(tp_rank, row_shape, f"{name}_proj.{kind}") for name in _NAMES[1:])]

    def _add_parameters(
        self, kind: Literal["weight", "bias"], dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        """Register one fused parameter or three, uninitialised; without dtype, None in their place."""
        specs = [fuse_along(self._specs[kind], 0)] if self.fuse_qkv else self._specs[kind]
        for name, spec in zip(self._held_names(), specs, strict=True):
            parameter = None if dtype is None else empty_parameter(spec.local_shape, dtype, device)
            self.register_parameter(f"{kind}_{name}", parameter)
            if parameter is not None:
                set_shard_spec(parameter, spec)  # on one rank, too: it says the names
                if self.tensor_parallel_size > 1:
                    set_partition_attributes(parameter, partition_dim=0, num_partitions=self.tensor_parallel_size)

    def _held(self, kind: Literal["weight", "bias"]) -> list[nn.Parameter | None]:
        return [getattr(self, f"{kind}_{name}") for name in self._held_names()]

    def _held_names(self) -> tuple[str, ...]:
        return ("qkv",) if self.fuse_qkv else _NAMES

    def _sections(self, kind: Literal["weight", "bias"]) -> list[nn.Parameter | None]:
        """q, k and v, which share the memory of the parameter that holds them."""
        held = self._held(kind)
        if not self.fuse_qkv:
            return held
        if held[0] is None:
            return [None] * len(_NAMES)
        return [nn.Parameter(part, requires_grad=False) for part in held[0].detach().split(self._local_sizes)]

    def reset_parameters(self) -> None:
        """Draw all weights and biases anew, the same at every degree and multiplier, fused or not."""
        weights, biases = self._sections("weight"), self._sections("bias")
        bias_init = default_bias_init(self.input_size)
        for index, size in enumerate((self.q_size, self.kv_size, self.kv_size)):
            weight, bias = weights[index], biases[index]
            if weight is not None:
                spec = self._specs["weight"][index]
                fill_from_logical(weight, spec, (size, self.input_size), self.init_method)
            if bias is not None:
                fill_from_logical(bias, self._specs["bias"][index], (size,), bias_init)

    def _copies(self) -> HeadCopies | None:
        """Of this rank's key and value heads; None if there are none."""
        layout = self.key_value_layout
        if layout.copies == 1:
            return None
        tp_rank = layer_group(self.tensor_parallel_size).rank
        rows = self._local_sizes[1]
        return HeadCopies(
            subgroup("tp", layout.sharing_ranks),
            layout.head_size,
            layout.slots(tp_rank),
            layout.num_slots,
            rows=(2 * rows,) if self.fuse_qkv else (0, rows, rows),
        )

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project the input to queries, keys and values.

        Args:
            input_: `[..., in]`, or this rank's part of the sequence, `[seq/tp, ..., in]`.

        Returns:
            q `[..., q/tp]`, k and v `[..., kv * kv_size_multiplier/tp]`; with `gather_output` q `[..., q]`, k and v
            `[..., kv]`. Over the whole sequence.
        """
        outputs = column_linear(
            input_,
            [weight for weight in self._held("weight") if weight is not None],
            list(self._held("bias")),
            layer_group(self.tensor_parallel_size),
            sequence_dim=self.sequence_dimension if self.sequence_parallel_enabled else None,
            copies=self._copies(),
        )
        if self.gather_output and self.tensor_parallel_size > 1:
            return self._gathered(outputs[0] if self.fuse_qkv else torch.cat(outputs, dim=-1))
        query, key, value = outputs[0].split(self._local_sizes, dim=-1) if self.fuse_qkv else outputs
        return query, key, value

    def _gathered(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[..., (q + 2 * kv * kv_size_multiplier)/tp]` to q, k and v, whole and without copies."""
        by_rank = gather_from_tensor_model_parallel_region(fused).unflatten(-1, (self.tensor_parallel_size, -1))
        query, key, value = (part.flatten(-2) for part in by_rank.split(self._local_sizes, dim=-1))
        layout = self.key_value_layout
        if layout.copies > 1:
            copies = (layout.num_heads, layout.copies, layout.head_size)
            key, value = (part.unflatten(-1, copies)[..., 0, :].flatten(-2) for part in (key, value))
        return query, key, value

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"in={self.input_size}, q={self.q_size}, kv={self.kv_size}, local={self._local_sizes}, "
            f"bias={self._held('bias')[0] is not None}, kv_size_multiplier={self.kv_size_multiplier}, "
            f"fuse_qkv={self.fuse_qkv}, gather_output={self.gather_output}, "
            f"sequence_parallel={self.sequence_parallel_enabled}"
        )


def _query_and_key_size(sizes: Sequence[int] | int | None) -> tuple[int, int]:
    if isinstance(sizes, int):
        return sizes, sizes
    if sizes is None or len(sizes) != 2:
        raise ValueError(
            f"output_sizes={sizes!r}: give [length of q, length of k and v], or one number where all three are equal"
        )
    return sizes[0], sizes[1]


def _layout(q_size: int, kv_size: int, num_heads: int | None, copies: int, tp_size: int) -> KeyValueLayout:
    """Of keys and values, after checking that every rank gets equally many of them and of the queries."""
    if q_size % tp_size:
        raise ValueError(
            f"tensor_model_parallel_size={tp_size} does not divide the length of q, {q_size}; use a degree that does"
        )
    if num_heads is not None and (num_heads < 1 or kv_size % num_heads):
        raise ValueError(f"num_key_value_heads={num_heads} does not divide the length of k and v, {kv_size}")
    fewest = kv_size_multiplier_for(kv_size if num_heads is None else num_heads, tp_size)
    if copies < 1 or tp_size % copies:
        raise ValueError(
            f"kv_size_multiplier={copies} does not divide tensor_model_parallel_size={tp_size}; "
            f"use kv_size_multiplier={fewest}"
        )
    if copies % fewest:
        what = f"k and v of length {kv_size}" if num_heads is None else f"key/value heads {num_heads}"
        raise ValueError(f"{what} over tp {tp_size} need kv_size_multiplier={fewest}, not {copies}")
    if num_heads is None:
        parts = tp_size // copies
        return KeyValueLayout(parts, kv_size // parts, copies, tp_size)
    head_size = kv_size // num_heads
    query_heads, rest = divmod(q_size, head_size)
    if rest or query_heads % tp_size or query_heads % (num_heads * copies):
        raise ValueError(
            f"q of length {q_size} is {q_size / head_size:g} heads of {head_size}; expected a multiple of "
            f"tensor_model_parallel_size={tp_size} and of {num_heads} key/value heads x kv_size_multiplier={copies} "
            f"(the smallest that fits is {fewest})"
        )
    return KeyValueLayout(num_heads, head_size, copies, tp_size)
