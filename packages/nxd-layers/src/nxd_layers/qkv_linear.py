"""The query, key and value projections of attention as one layer, for any number of key and value heads.

Grouped-query attention (Ainslie et al. 2023) has fewer key and value heads than query heads, often fewer than
tensor-parallel ranks: then several ranks hold copies of a head. `key_value_heads` defines the layout of the heads.
"""

import itertools
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from nxd_state import (
    ShardSpec,
    fuse_along,
    get_world_group,
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
from nxd_layers.key_value_heads import HeadCopies, KeyValueLayout, kv_size_multiplier_for, padded_layout
from nxd_layers.linear import check_linear_arguments
from nxd_layers.mappings import gather_from_tensor_model_parallel_region
from nxd_layers.padding import zero_padding_gradient
from nxd_layers.sharded_linear import ShardedLinear

# Endings of the parameters' names, and the layers of the unsharded model.
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}

_Kind = Literal["weight", "bias"]
_KINDS: tuple[_Kind, ...] = ("weight", "bias")


class GQAQKVColumnParallelLinear(ShardedLinear):
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
        dtype: dtype of all parameters.
        device: device of all parameters; torch's default device if None.
        kv_size_multiplier: copies of each key and value head; divides the tensor-parallel degree.
        fuse_qkv: hold one weight and one bias per rank, and compute one product.
        init_method: fills each whole weight in place; as in `nn.Linear` if None.
        sequence_dimension: which dim of the input is the sequence; 0 if None.
        num_key_value_heads: the model's number of key and value heads, so that whole heads are copied and distributed.
            None treats a rank's rows as one head, which is right without copies, and with one head per rank; it warns
            if there are copies.
        output_size: another spelling of `output_sizes`.
        keep_master_weight: keep the whole initial weights as `master_weight_q`, `master_weight_k`, `master_weight_v`.
        reduce_dtype: dtype in which gradients of the input and of copied heads are summed over the ranks; their own if
            None.

    Attributes:
        weight_qkv: `[(q + 2 * kv * kv_size_multiplier)/tp, in]`, q above k above v, if fused; otherwise `weight_q`
            `[q/tp, in]`, `weight_k` and `weight_v` `[kv * kv_size_multiplier/tp, in]`.
        bias_qkv: the same without `in`; otherwise `bias_q`, `bias_k`, `bias_v`. None without bias.
        padded_q_size: length of q that is cut into equal parts, `q` unless `pad_model` has padded the heads.
        master_weight_q: `[q, in]` on the CPU with `keep_master_weight`, in no state dict; otherwise None. So are
            `master_weight_k` and `master_weight_v`, `[kv, in]`.

    Raises:
        ValueError: sizes that the tensor-parallel degree does not divide; the message names a multiplier that helps.
    """

    master_weight_q: Tensor | None
    master_weight_k: Tensor | None
    master_weight_v: Tensor | None

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
        sequence_dimension: int | None = 0,
        num_key_value_heads: int | None = None,
        output_size: Sequence[int] | int | None = None,
        keep_master_weight: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        q_size, kv_size = _query_and_key_size(output_sizes if output_size is None else output_size)
        check_linear_arguments(input_size, min(q_size, kv_size), sequence_parallel_enabled)
        super().__init__(
            (q_size, input_size),
            partition_dim=0,
            init_method=init_method or default_linear_init,
            keep_master_weight=keep_master_weight,
        )
        self.input_size, self.q_size, self.kv_size = input_size, q_size, kv_size
        self.gather_output, self.reduce_dtype = gather_output, reduce_dtype
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.kv_size_multiplier, self.fuse_qkv = kv_size_multiplier, fuse_qkv
        self.num_key_value_heads = num_key_value_heads
        if kv_size_multiplier > 1 and num_key_value_heads is None and get_world_group().rank == 0:
            warnings.warn(
                f"kv_size_multiplier={kv_size_multiplier} without num_key_value_heads is right if the model's "
                f"key/value heads times {kv_size_multiplier} are the {self.tensor_parallel_size} tensor-parallel "
                "ranks, or if pad_model follows; else pass num_key_value_heads of the model, or heads are cut apart",
                stacklevel=2,
            )
        self.key_value_layout = _layout(
            q_size, kv_size, num_key_value_heads, kv_size_multiplier, self.tensor_parallel_size
        )
        self._add_parameters(dtype, device, bias=bias)
        self.head_copies()  # makes their process group, which cannot be done while a graph is recorded

    @property
    def padded_q_size(self) -> int:
        """Length of q that is cut into equal parts: `q` unless `pad_model` has padded the heads."""
        return self.padded_length

    @property
    def _local_sizes(self) -> tuple[int, int, int]:
        """Rows of q, k and v on each rank."""
        rows = self.key_value_layout.rows_per_rank
        return self.padded_length // self.tensor_parallel_size, rows, rows

    def _logical_specs(self, kind: _Kind, tp_rank: int) -> list[ShardSpec]:
        """Return the shard metadata of q, k and v on a rank."""
        row_shape = (self.input_size,) if kind == "weight" else ()
        query, *others = (f"{name}.{kind}" for name in PROJECTIONS.values())
        return [
            shard_along(
                (self.q_size, *row_shape),
                0,
                rank=tp_rank,
                size=self.tensor_parallel_size,
                padded_length=self.padded_length,
                name=query,
            ),
            *(self.key_value_layout.spec(tp_rank, row_shape, name) for name in others),
        ]

    def _specs_of(self, rank: int) -> list[ShardSpec]:
        """Return the shard metadata of the parameters on a rank: weights, then biases."""
        by_kind = [self._logical_specs(kind, rank) for kind in _KINDS]
        return [spec for specs in by_kind for spec in ([fuse_along(specs, 0)] if self.fuse_qkv else specs)]

    def _add_parameters(self, dtype: torch.dtype, device: torch.device | str | None, *, bias: bool) -> None:
        """Register one fused weight or three, and biases likewise, and initialize them."""
        self._specs = self._specs_of(self.group().rank)
        for name, spec in zip(self._held_names(), self._specs, strict=True):
            parameter = None
            if bias or name.startswith("weight"):
                parameter = empty_parameter(spec.local_shape, dtype, device)
                set_shard_spec(parameter, spec)  # on one rank, too: it has the names
                if self.tensor_parallel_size > 1:
                    set_partition_attributes(parameter, partition_dim=0, num_partitions=self.tensor_parallel_size)
            self.register_parameter(name, parameter)  # which may put a copy on the meta device
        self.reset_parameters()

    def _held_names(self) -> list[str]:
        return [f"{kind}_{part}" for kind in _KINDS for part in (("qkv",) if self.fuse_qkv else PROJECTIONS)]

    def _held(self) -> list[nn.Parameter | None]:
        return [getattr(self, name) for name in self._held_names()]

    def _held_of(self, kind: _Kind) -> list[nn.Parameter | None]:
        held = self._held()
        half = len(held) // 2
        return held[:half] if kind == "weight" else held[half:]

    def _sections(self, kind: _Kind) -> list[nn.Parameter | None]:
        """q, k and v, which share the memory of the parameter that holds them."""
        held = self._held_of(kind)
        if not self.fuse_qkv:
            return held
        if held[0] is None:
            return [None] * len(PROJECTIONS)
        return [nn.Parameter(part, requires_grad=False) for part in held[0].detach().split(self._local_sizes)]

    def reset_parameters(self) -> None:
        """Draw all weights and biases anew, the same at every degree and multiplier, fused or not."""
        weights, biases = self._sections("weight"), self._sections("bias")
        weight_specs, bias_specs = (self._logical_specs(kind, self.group().rank) for kind in _KINDS)
        bias_init = default_bias_init(self.input_size)
        for index, size in enumerate((self.q_size, self.kv_size, self.kv_size)):
            weight, bias = weights[index], biases[index]
            assert weight is not None
            whole = fill_from_logical(weight, weight_specs[index], (size, self.input_size), self.init_method)
            setattr(self, f"master_weight_{tuple(PROJECTIONS)[index]}", self._kept(whole, weight.dtype))
            if bias is not None:
                fill_from_logical(bias, bias_specs[index], (size,), bias_init)

    def initialize_weight_biases(self) -> None:
        """`reset_parameters`, under the name that `param_init_fn` of scripts for NeuronX Distributed calls."""
        self.reset_parameters()

    def check_pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Raise what `pad_heads` would raise, without changing the layer."""
        padded = self._length_for_heads(num_heads, padded_num_heads)
        if padded != self.padded_length:
            self._padded_layout(num_heads, padded)

    def pad_heads(self, num_heads: int, padded_num_heads: int) -> None:
        """Pad q, k and v to their lengths in a model with `padded_num_heads`. `pad_model` calls this.

        All grow by the same ratio, so that query heads keep their key and value heads.

        Raises:
            ValueError: such a length is not a whole number, or the tensor-parallel degree (with `kv_size_multiplier`,
                for keys and values) does not divide it.
        """
        padded = self._length_for_heads(num_heads, padded_num_heads)
        if padded == self.padded_length:
            return
        layout = self._padded_layout(num_heads, padded)
        old = self._specs_of_ranks()
        self.padded_length, self.key_value_layout = padded, layout
        self._repartition(old)
        self.head_copies()  # as after building

    def _padded_layout(self, num_heads: int, padded_q_size: int) -> KeyValueLayout:
        """The layout of padded keys and values; the heads are the model's if their number was not given."""
        if self.num_key_value_heads is not None:
            head_size = self.kv_size // self.num_key_value_heads
        else:
            head_size = self.q_size // num_heads
        if head_size < 1 or any(size % head_size for size in (self.q_size, self.kv_size, padded_q_size)):
            raise ValueError(
                f"q of length {self.q_size} and k and v of length {self.kv_size} are no whole heads if the model has "
                f"{num_heads} query heads; call pad_model with the number of this model"
            )
        return padded_layout(
            (self.q_size // head_size, self.kv_size // head_size),
            padded_q_size // head_size,
            head_size=head_size,
            copies=self.kv_size_multiplier,
            tensor_parallel_size=self.tensor_parallel_size,
        )

    def _read(self, kind: _Kind) -> list[Tensor | None]:
        """Return the parameters as the product reads them: padding gets no gradient."""
        held = self._held_of(kind)
        if not self._is_padded:
            return [*held]
        half = len(held)
        specs = self._specs[:half] if kind == "weight" else self._specs[half:]
        return [p if p is None else zero_padding_gradient(p, spec) for p, spec in zip(held, specs, strict=True)]

    def head_copies(self) -> HeadCopies | None:
        """The copies of this rank's key and value heads; None without copies."""
        layout = self.key_value_layout
        if layout.copies == 1:
            return None
        rows = self._local_sizes[1]
        rows_of_weights = (2 * rows,) if self.fuse_qkv else (0, rows, rows)
        return HeadCopies(subgroup("tp", layout.sharing_ranks), layout, rows_of_weights)

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
            [weight for weight in self._read("weight") if weight is not None],
            self._read("bias"),
            self.group(),
            sequence_dim=self.sequence_dimension if self.sequence_parallel_enabled else None,
            copies=self.head_copies(),
            reduce_dtype=self.reduce_dtype,
        )
        if self.gather_output and self.tensor_parallel_size > 1:
            query, key, value = self.gathered(outputs[0] if self.fuse_qkv else torch.cat(outputs, dim=-1))
            return query, key, value
        query, key, value = _sections(outputs[0], self._local_sizes) if self.fuse_qkv else outputs
        return query, key, value

    def projection_spec(self, projection: str) -> ShardSpec:
        """How the weight of "q", "k" or "v" on this rank, `[out/tp, in]`, maps to the whole one."""
        return self._logical_specs("weight", self.group().rank)[tuple(PROJECTIONS).index(projection)]

    def gathered(self, fused: Tensor, projections: Sequence[str] = tuple(PROJECTIONS)) -> list[Tensor]:
        """This rank's parts of some projections, one behind the other in the last dim, to whole ones without copies.

        Args:
            fused: `[..., (q + 2 * kv * kv_size_multiplier)/tp]` for all of them.
            projections: which, of "q", "k" and "v".
        """
        sizes = [self._local_sizes[tuple(PROJECTIONS).index(name)] for name in projections]
        by_rank = gather_from_tensor_model_parallel_region(fused).unflatten(-1, (self.tensor_parallel_size, -1))
        parts = [part.flatten(-2) for part in _sections(by_rank, sizes)]
        layout = self.key_value_layout
        if layout.copies > 1:
            copies = (layout.num_heads, layout.copies, layout.head_size)
            parts = [
                part if name == "q" else part.unflatten(-1, copies)[..., 0, :].flatten(-2)
                for name, part in zip(projections, parts, strict=True)
            ]
        if not self._is_padded:
            return parts
        return [
            part[..., : self.q_size if name == "q" else self.kv_size]
            for name, part in zip(projections, parts, strict=True)
        ]

    def features(self) -> dict[str, str]:
        """See `ShardedLinear.features`."""
        return super().features() | self._set_flags("gather_output", "sequence_parallel_enabled", "reduce_dtype")

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"in={self.input_size}, q={self.q_size}, kv={self.kv_size}, local={self._local_sizes}, "
            f"bias={self._held_of('bias')[0] is not None}, kv_size_multiplier={self.kv_size_multiplier}, "
            f"fuse_qkv={self.fuse_qkv}, gather_output={self.gather_output}, "
            f"sequence_parallel={self.sequence_parallel_enabled}"
        )


def _sections(fused: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split along the last dim; unlike those of `Tensor.split`, the parts can be changed in place."""
    ends = itertools.accumulate(sizes)
    return [fused[..., end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _query_and_key_size(sizes: Sequence[int] | int | None) -> tuple[int, int]:
    if isinstance(sizes, int):
        return sizes, sizes
    if sizes is None or len(sizes) != 2:
        raise ValueError(
            f"output_sizes={sizes!r}: give [length of q, length of k and v], or one number where all three are equal"
        )
    return sizes[0], sizes[1]


def _layout(q_size: int, kv_size: int, num_heads: int | None, copies: int, tp_size: int) -> KeyValueLayout:
    """The layout of keys and values, checked to give every rank equally many of them and of the queries."""
    if q_size % tp_size:
        raise ValueError(
            f"tensor_model_parallel_size={tp_size} does not divide the length of q, {q_size}; use a degree that does"
        )
    if num_heads is not None and (num_heads < 1 or kv_size % num_heads):
        raise ValueError(f"num_key_value_heads={num_heads} does not divide the length of k and v, {kv_size}")
    fewest = kv_size_multiplier_for(kv_size if num_heads is None else num_heads, tp_size)
    # Without the number of heads a multiplier that divides the rows may split a head.
    advice = (
        f"use kv_size_multiplier={fewest}" if num_heads is not None else "give num_key_value_heads to learn which does"
    )
    if copies < 1 or tp_size % copies:
        raise ValueError(f"kv_size_multiplier={copies} does not divide tensor_model_parallel_size={tp_size}; {advice}")
    if copies % fewest:
        what = f"k and v of length {kv_size}" if num_heads is None else f"{num_heads} key/value heads"
        raise ValueError(f"kv_size_multiplier={copies} does not fit {what} over tp {tp_size}; {advice}")
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
