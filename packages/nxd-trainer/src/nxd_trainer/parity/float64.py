"""All of a model's arithmetic in float64, so that two layouts can be compared to the last digits.

transformers computes norms, softmax, rotary angles and losses in float32 whatever the model's type. Here every request
for float32 becomes one for float64, in both of the runs that are compared.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Inside, `x.float()`, `x.to(torch.float32)`, `softmax(x, dtype=torch.float32)` and their like give float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})

    def __enter__(self) -> "InFloat64":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
