"""All of a model's arithmetic in float64, so that two layouts can be compared to the last digits.

transformers computes norms, softmax, rotary angles and losses in float32 whatever the model's type. Here every request
for float32 becomes one for float64, in both of the runs that are compared.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Inside, `x.float()`, `x.to(torch.float32)`, `softmax(x, dtype=torch.float32)` and their like give float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        if func is Tensor.backward:  # as torch has it
            names = ("gradient", "retain_graph", "create_graph", "inputs")
            given = dict(zip(names, args[1:], strict=False)) | (kwargs or {})
            return self._backward(args[0], given.pop("gradient", None), **given)
        if func is torch.autograd.backward:
            return self._backward(*args, **(kwargs or {}))
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})

    def __enter__(self) -> "InFloat64":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def _backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *,
        inputs: Any = None,
    ) -> None:
        """`torch.autograd.backward` in the mode, which torch leaves for a function: it computes activations again."""
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = grad_tensors if isinstance(grad_tensors, Sequence) else (grad_tensors,) * len(roots)
        for root, grad in zip(roots, given, strict=True):
            if grad is None and root.numel() > 1:
                raise RuntimeError(f"a gradient is needed for a tensor of shape {tuple(root.shape)}; give one")
            if grad is not None and grad.shape != root.shape:
                raise RuntimeError(f"a gradient has shape {tuple(grad.shape)}, its tensor {tuple(root.shape)}")
        grads = tuple(torch.ones_like(root) if it is None else it for root, it in zip(roots, given, strict=True))
        leaves = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        keeps = create_graph if retain_graph is None else retain_graph
        super().__enter__()
        try:
            torch.autograd.Variable._execution_engine.run_backward(
                roots, grads, keeps, create_graph, leaves, allow_unreachable=True, accumulate_grad=True
            )
        finally:
            super().__exit__(None, None, None)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
