"""Modules that treat every position alone, such as an MLP, computed for some positions after the others.

Inside such a module activations are wider than what comes in: with tiles, and each computed again for backward, they
are there for one tile only, so that their memory does not grow with the sequence (Bekman et al. 2025, "Arctic Long
Sequence Training").
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nxd_layers.activation_checkpoint.find import ModuleClass, named_modules_of
from nxd_layers.activation_checkpoint.forward import CheckpointedForward


def tile_modules(
    model: nn.Module, classes: ModuleClass | Sequence[ModuleClass], *, num_tiles: int, sequence_dim: int = 1
) -> list[str]:
    """Have modules compute their positions tile by tile. Call it alike on all ranks.

    Outputs are those without tiles, and gradients the same sums in another order.

    Args:
        model: changed in place.
        classes: classes of modules with one tensor in and one out, of the same positions; classes or their names, such
            as "LlamaMLP".
        num_tiles: number of tiles of a sequence; fewer if it has fewer positions.
        sequence_dim: sequence dim of that tensor: 1 for `[batch, seq, hidden]`.

    Returns:
        Names of the modules.

    Raises:
        ValueError: `num_tiles` is not positive, or the model has no module of a class.
    """
    if num_tiles < 1:
        raise ValueError(f"num_tiles={num_tiles} must be at least 1")
    found = named_modules_of(model, classes)
    for module in found.values():
        module.forward = TiledForward(module, num_tiles, sequence_dim)
    return list(found)


class TiledForward:
    """A module's `forward`, tile by tile.

    Args:
        module: which is to compute tile by tile.
        num_tiles: number of tiles of a sequence.
        sequence_dim: sequence dim of the tensor.
    """

    def __init__(self, module: nn.Module, num_tiles: int, sequence_dim: int) -> None:
        self._forward = CheckpointedForward(module, None)
        self._num_tiles = num_tiles
        self._dim = sequence_dim

    def __call__(self, hidden: Tensor) -> Tensor:
        """The module's output."""
        tiles = hidden.tensor_split(max(1, min(self._num_tiles, hidden.shape[self._dim])), self._dim)
        return torch.cat([self._forward(tile) for tile in tiles], self._dim)
