"""Runs all of a model's arithmetic in float64, so that two layouts can be compared to the last digits.

transformers computes norms, softmax, rotary angles and losses in float32 whatever the model's dtype. Here every request
for float32 becomes one for float64, in both of the compared runs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

_Root = Tensor | GradientEdge
_Roots = _Root | Sequence[_Root]


class InFloat64(TorchFunctionMode):
    """Inside, `x.float()`, `x.to(torch.float32)`, `softmax(x, dtype=torch.float32)` and the like give float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        if func is Tensor.backward:  # same signature as in torch
            names = ("gradient", "retain_graph", "create_graph", "inputs")
            given = dict(zip(names, args[1:], strict=False)) | (kwargs or {})
            with self._again():  # as torch does, so that what wraps `torch.autograd.backward` sees it
                return torch.autograd.backward(args[0], given.pop("gradient", None), **given)
        if func is torch.autograd.backward:
            return self._backward(*args, **(kwargs or {}))
        if func is torch.autograd.grad and not (kwargs or {}).get("is_grads_batched"):
            return self._grad(*args, **(kwargs or {}))
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})

    def __enter__(self) -> "InFloat64":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Be in the mode, which torch leaves for functions."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _backward(
        self,
        tensors: _Roots,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *,
        inputs: Any = None,
    ) -> None:
        leaves = () if inputs is None else _several(inputs)
        self._run(_several(tensors), grad_tensors, retain_graph, create_graph, leaves, accumulate=True)

    def _grad(
        self,
        outputs: _Roots,
        inputs: _Roots,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_unused: bool | None = None,
        materialize_grads: bool = False,
        **_: Any,
    ) -> tuple[Tensor | None, ...]:
        leaves = _several(inputs)
        found = self._run(
            _several(outputs),
            grad_outputs,
            retain_graph,
            create_graph,
            leaves,
            accumulate=False,
            allow_unused=bool(allow_unused) or materialize_grads,
        )
        if not materialize_grads:
            return found
        return tuple(_filled(leaf, 0) if it is None else it for leaf, it in zip(leaves, found, strict=True))

    def _run(
        self,
        roots: Sequence[_Root],
        given: Any,
        retain_graph: bool | None,
        create_graph: bool,
        leaves: Sequence[_Root],
        *,
        accumulate: bool,
        allow_unused: bool = True,
    ) -> tuple[Tensor | None, ...]:
        """Run backward inside the mode: it may recompute activations."""
        gradients = given if isinstance(given, Sequence) else (given,) * len(roots)
        for root, grad in zip(roots, gradients, strict=True):
            shape = _like(root).shape
            if grad is None and shape.numel() > 1:
                raise RuntimeError(f"a tensor of shape {tuple(shape)} needs a gradient; pass one")
            if grad is not None and grad.shape != shape:
                raise RuntimeError(f"a gradient has shape {tuple(grad.shape)}, but its tensor has {tuple(shape)}")
        grads = tuple(_filled(root, 1) if it is None else it for root, it in zip(roots, gradients, strict=True))
        keeps = create_graph if retain_graph is None else retain_graph
        with self._again():
            found: tuple[Tensor | None, ...] = torch.autograd.Variable._execution_engine.run_backward(
                tuple(roots), grads, keeps, create_graph, tuple(leaves), allow_unused, accumulate_grad=accumulate
            )
        return found


def _several(given: _Roots) -> tuple[_Root, ...]:
    """Make a tuple; a `GradientEdge` is itself a tuple."""
    return (given,) if isinstance(given, Tensor | GradientEdge) else tuple(given)


def _like(root: _Root) -> Tensor:
    """Return a tensor with the shape and dtype of a root; on the meta device if the root is a graph edge."""
    if isinstance(root, Tensor):
        return root
    entry = root.node._input_metadata[root.output_nr]
    return torch.empty(torch.Size(entry.shape), dtype=entry.dtype, device="meta")


def _filled(root: _Root, value: float) -> Tensor:
    device = root.device if isinstance(root, Tensor) else root.node._input_metadata[root.output_nr].device
    return torch.full_like(_like(root), value, device=device)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
