"""The type that weights are to be converted to on their way."""

from typing import Any

import torch


def check_dtype(dtype: Any) -> None:
    """Raise ValueError unless it is a floating-point `torch.dtype`, or None, which leaves weights as they are."""
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    raise ValueError(f"dtype={dtype!r} is no floating-point type of torch; give one such as torch.bfloat16, or None")
