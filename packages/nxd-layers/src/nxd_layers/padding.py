"""Padding of split weights: its arithmetic, moving rows when it changes, and keeping it zero.

Zero weights may still have a nonzero gradient: an activation that is not zero at zero, or a loss that reads padded
outputs, would change the padding, and with it the output of the model. So layers read their weights through
`zero_padding_gradient`. The mask is part of the forward and not a hook on the parameter, because hooks are lost where a
parameter is replaced (on its way from the meta device, in a copy), and are not seen by `torch.compile`. The padded
elements differ between ranks. On XLA, where all ranks must record the same graph, they are given as data, and ranks
without padding take part.
"""

import functools
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from nxd_state import Group, ShardSpec, all_gather, is_lazy_device, is_padded_on_some_rank, set_shard_spec
from nxd_state.parameter_marks import get_partition
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def divide(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, which must be whole.

    Raises:
        ValueError: it is not, or the denominator is not positive.
    """
    if denominator < 1 or numerator % denominator:
        raise ValueError(f"{numerator} cannot be divided by {denominator} without a remainder")
    return numerator // denominator


def get_number_of_extra_heads(n_heads: int, tp_degree: int) -> int:
    """How many heads to add so that each tensor-parallel rank has as many as the others.

    Raises:
        ValueError: a number that is not positive.
    """
    if n_heads < 1 or tp_degree < 1:
        raise ValueError(f"n_heads={n_heads}, tp_degree={tp_degree}: both must be positive")
    return -n_heads % tp_degree


def generate_padding_mask(
    num_heads: int,
    num_heads_with_pad: int,
    num_kv_heads: int,
    tp_degree: int,
    tp_rank: int,
    hardware_type: Enum | None = None,
) -> torch.Tensor:
    """Return which query heads of a rank are the model's, if padding follows the heads of each key and value head.

    Args:
        num_heads: query heads of the model.
        num_heads_with_pad: query heads with padding.
        num_kv_heads: key and value heads of the model.
        tp_degree: tensor-parallel ranks.
        tp_rank: the rank.
        hardware_type: a member of the enum `hardware` of scripts for NeuronX Distributed. On "TRN1" copies of a key
            and value head are spread over the ranks; on others, and if None, they are neighbors.

    Returns:
        bool `[num_heads_with_pad / tp_degree]`, true for heads of the model.

    Raises:
        ValueError: the ranks do not divide the padded heads.
        RuntimeError: `hardware_type` is no member of an enum.
    """
    if not isinstance(hardware_type, Enum | None):
        raise RuntimeError(f"Unexpected hardware_type={hardware_type!r}; give hardware.TRN1, another member, or None")
    each = divide(num_heads_with_pad, tp_degree)
    copies = max(tp_degree // num_kv_heads, 1)
    spread = hardware_type is not None and hardware_type.name == "TRN1"
    copy = tp_rank // num_kv_heads if spread else tp_rank % copies
    kv_heads_here = 1 if spread else num_kv_heads * copies // tp_degree
    return torch.arange(each * copy, each * (copy + 1)) < num_heads // num_kv_heads * kv_heads_here


def length_for_heads(length: int, num_heads: int, padded_num_heads: int, *, num_parts: int) -> int:
    """The length of a split dim after the model's heads are padded: it grows by the same ratio.

    Args:
        length: length of the dim for `num_heads`. Dims of fewer (key and value) heads, or of no heads, grow by the same
            ratio.
        num_heads: attention heads of the model.
        padded_num_heads: attention heads after padding.
        num_parts: number of equal parts that the dim is cut into.
    """
    padded, rest = divmod(length * padded_num_heads, num_heads)
    if rest or padded % num_parts:
        raise ValueError(
            f"a split dim of length {length} cannot be padded as {num_heads} heads are to {padded_num_heads}: "
            f"{length} * {padded_num_heads} / {num_heads} must be a multiple of {num_parts}; leave the layer's class "
            "out of wrapped_classes, or use a degree for which the key and value heads grow to a whole number too"
        )
    return padded


@torch.no_grad()
def repartition(parameter: nn.Parameter, old_specs: Sequence[ShardSpec], new_spec: ShardSpec, group: Group) -> None:
    """Give a parameter, in place, the parts of its logical tensors that `new_spec` says; padding becomes zero.

    The whole tensors are gathered on the way; on the meta device nothing is.

    Args:
        parameter: keeps its identity and attributes, so ties and optimizers stay valid.
        old_specs: how the logical tensors are cut now, one spec per rank of the group.
        new_spec: how this rank's part is to be cut.
        group: the ranks that hold the parts.
    """
    data = parameter.new_zeros(new_spec.local_shape)
    if not parameter.is_meta:
        gathered = all_gather(parameter.detach().unsqueeze(0), group)  # [tp, *local]
        shapes = {name: shape for spec in old_specs for name, shape in spec.logical_shapes.items()}
        wholes = {name: parameter.new_empty(shape) for name, shape in shapes.items()}
        for local, spec in zip(gathered, old_specs, strict=True):
            spec.copy_to_logical(local, wholes)
        new_spec.copy_from_logical(wholes, data)
    parameter.data = data
    set_shard_spec(parameter, new_spec)


class _ZeroPaddingGradient(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, kept: tuple[tuple[slice, ...], ...]) -> Tensor:
        ctx.kept = kept
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        masked = torch.zeros_like(grad)  # not a product with zeros: that would keep a NaN
        for box in ctx.kept:
            masked[box] = grad[box]
        return masked, None


class _MaskedGradient(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, kept: Tensor) -> Tensor:
        ctx.kept = kept
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.kept, grad, torch.zeros_like(grad)), None


def zero_padding_gradient(parameter: Tensor, spec: ShardSpec) -> Tensor:
    """The parameter itself forward; backward only elements in a piece of `spec` get a gradient.

    Call it on every rank if there may be padding on one.
    """
    if is_lazy_device(parameter) and is_padded_on_some_rank(parameter):
        partition = get_partition(parameter)
        assert partition is not None
        return _MaskedGradient.apply(parameter, _kept(spec, partition.dim, parameter.device))
    if not spec.has_padding:
        return parameter
    return _ZeroPaddingGradient.apply(parameter, tuple(piece.local.slices for piece in spec.pieces))


@functools.cache
@torch.inference_mode(False)
def _kept(spec: ShardSpec, dim: int, device: torch.device) -> Tensor:
    """The mask of the indices along `dim`, the only padded dim, that are in a piece: bool, length 1 in other dims."""
    shape = [1] * len(spec.local_shape)
    shape[dim] = spec.local_shape[dim]
    kept = torch.zeros(shape, dtype=torch.bool)
    for piece in spec.pieces:
        kept.movedim(dim, 0)[piece.local.slices[dim]] = True
    return kept.to(device)
