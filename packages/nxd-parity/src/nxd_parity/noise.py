"""Rounding noise on purpose: how far a program's numbers move when each module's outputs are rounded differently.

The spread of such runs says what a difference means: one that lies within it is rounding, one beyond it is a mistake.
The method is that of stochastic arithmetic: J. Vignes, "A stochastic arithmetic for reliable scientific computation",
1993.
"""

from typing import Any

import torch
from torch import Tensor


class Noise:
    """Changes outputs of modules by up to a unit in their last place, with random numbers of its own."""

    def __init__(self, seed: int) -> None:
        """Start the random numbers."""
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def added_to(self, output: Any) -> Any:
        """Return an output of a module with noise in its tensors; other types than tensors and tuples stay."""
        if isinstance(output, Tensor):
            return self._added(output)
        if type(output) is tuple:
            return tuple(self.added_to(it) for it in output)
        if type(output) is dict:
            return {name: self.added_to(it) for name, it in output.items()}
        return output

    def _added(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return tensor
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._seed)
        wide = torch.float64 if tensor.dtype in (torch.float64, torch.float32) else torch.float32
        signs = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=wide) * 2 - 1
        return _Rounded.apply(tensor, signs * torch.finfo(tensor.dtype).eps, generator)


class _Rounded(torch.autograd.Function):
    """Multiplies by 1 + noise, and the gradient as well, with other noise."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, noise: Tensor, generator: torch.Generator) -> Tensor:
        context.generator = generator
        return (tensor.to(noise.dtype) * (1 + noise)).to(tensor.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        wide = torch.float64 if gradient.dtype in (torch.float64, torch.float32) else torch.float32
        shape, device = gradient.shape, gradient.device
        signs = torch.rand(shape, generator=context.generator, device=device, dtype=wide) * 2 - 1
        noise = signs * torch.finfo(gradient.dtype).eps
        return (gradient.to(wide) * (1 + noise)).to(gradient.dtype), None, None
