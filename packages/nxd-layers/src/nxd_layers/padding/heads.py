"""Arithmetic of padding: how many heads, and how many rows for them."""


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
