"""Arithmetic of padding: how many heads, and how many rows for them."""

from enum import Enum

import torch

from nxd_layers.upstream_arguments import takes_names_too


def divide(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, which must be whole.

    Raises:
        ValueError: it is not, or the denominator is not positive.
    """
    if denominator < 1 or numerator % denominator:
        raise ValueError(f"{numerator} cannot be divided by {denominator} without a remainder")
    return numerator // denominator


@takes_names_too(n_head="n_heads")
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
    """Which query heads of a rank are the model's, where padding stands behind the heads of each key and value head.

    Args:
        num_heads: query heads of the model.
        num_heads_with_pad: query heads with padding.
        num_kv_heads: key and value heads of the model.
        tp_degree: tensor-parallel ranks.
        tp_rank: whose heads.
        hardware_type: a member of the enum `hardware` of scripts for NeuronX Distributed. On "TRN1" copies of a key
            and value head are spread over the ranks; on others, and if None, they are neighbours.

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
    """The length that a split dim gets when the model's heads become more: it grows as they do.

    Args:
        length: of the dim, made for `num_heads`. Dims of fewer (key and value) heads, or of no heads at all, grow by
            the same ratio.
        num_heads: attention heads of the model.
        padded_num_heads: attention heads after padding.
        num_parts: number of equal parts that the dim is cut into.

    Raises:
        ValueError: the new length is not whole, or cannot be cut into the parts.
    """
    padded, rest = divmod(length * padded_num_heads, num_heads)
    if rest or padded % num_parts:
        raise ValueError(
            f"a split dim of length {length} cannot be padded as {num_heads} heads are to {padded_num_heads}: "
            f"{length} * {padded_num_heads} / {num_heads} must be a multiple of {num_parts}; leave the layer's class "
            "out of wrapped_classes, or use a degree for which the key and value heads grow to a whole number too"
        )
    return padded
