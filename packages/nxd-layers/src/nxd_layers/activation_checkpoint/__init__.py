"""Activation checkpointing: parts of a model keep only their inputs, and recompute the rest for backward.

The caller chooses the parts here; `find` finds them, and `forward` is their new forward. A part's `forward` is
replaced in place, so parameter names, shard metadata, tied weights and the model's structure do not change.
(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; the selective forms are from Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models".)
"""

from collections.abc import Callable, Sequence

from torch import nn

from nxd_layers.activation_checkpoint.find import (
    ModuleClass,
    named_modules_accepted_by,
    named_modules_of,
    named_transformer_layers,
)
from nxd_layers.activation_checkpoint.forward import CheckpointedForward, Keep, TiledForward, matmul_outputs
from nxd_layers.linear import ColumnParallelLinear

__all__ = [
    "apply_activation_checkpointing",
    "remove_activation_checkpointing",
    "matmul_outputs",
    "tile_modules",
    "CheckpointConfig",
    "ModuleClass",
    "Keep",
]

CheckpointConfig = ModuleClass | Sequence[ModuleClass] | Callable[[nn.Module], bool] | None


def apply_activation_checkpointing(
    model: nn.Module,
    config: CheckpointConfig = "full",
    *,
    transformer_layer_cls: ModuleClass | Sequence[ModuleClass] | None = None,
    keep: Keep | None = None,
    offload: bool = False,
) -> list[str]:
    """Make parts of a model recompute their activations in backward instead of keeping them.

    Loss, gradients and buffers (such as running statistics) are bitwise those without it, dropout in the streams of
    `nxd_state.rng_stream` included. Other state that a forward changes, it changes a second time. The collectives of a
    part run again as well, on all ranks alike, up to the last one whose result backward needs. The settings of an
    earlier call are replaced. Call it alike on all ranks, after the model is cut into pipeline stages.

    Args:
        model: changed in place.
        config: "full" for every transformer layer; a module class, or its name, or several of them for these modules;
            a function that says of a module whether it is one; None for no module.
        transformer_layer_cls: class of transformer layers, for "full". By default the model's `_no_split_modules`
            (Hugging Face's models have it), else the elements of its `nn.ModuleList`s of one class.
        keep: which operations' outputs to keep inside these modules, as `matmul_outputs` does, so that they are not
            computed again. None keeps nothing.
        offload: keep what these modules are given by position, such as hidden states, in the host's memory until
            backward needs it (Ren et al. 2021, "ZeRO-Offload"): memory of the device then does not grow with the number
            of layers, but each forward and backward copies. Without effect where the host computes; refused on XLA and
            under torch.compile.

    Returns:
        Names of the modules that are checkpointed now.

    Raises:
        ValueError: a class of which the model has no module, `ColumnParallelLinear`, a function that accepts no
            module, or no transformer layers are found.
    """
    chosen = _choose(model, config, transformer_layer_cls)
    _check_computed_inside(chosen)
    remove_activation_checkpointing(model)
    for module in chosen.values():
        # An attribute of the instance hides the method of its class, and `del` brings that back.
        module.forward = CheckpointedForward(module, keep, offload=offload)
    return list(chosen)


def remove_activation_checkpointing(model: nn.Module) -> None:
    """Undo `apply_activation_checkpointing`."""
    for module in model.modules():
        checkpointed = module.__dict__.get("forward")
        if isinstance(checkpointed, CheckpointedForward):
            del module.forward
            if module.forward != checkpointed.forward:  # the module had one of its own, not its class's
                module.forward = checkpointed.forward


def tile_modules(
    model: nn.Module, classes: ModuleClass | Sequence[ModuleClass], *, num_tiles: int, sequence_dim: int = 1
) -> list[str]:
    """Make modules compute their positions tile by tile. Call it the same way on all ranks.

    Outputs are unchanged; gradients are the same sums in another order.

    Args:
        model: the model, changed in place.
        classes: classes, or their names, such as "LlamaMLP", of modules with one input and one output tensor of the
            same positions.
        num_tiles: number of tiles of a sequence; fewer if it has fewer positions.
        sequence_dim: sequence dim of that tensor: 1 for `[batch, seq, hidden]`.

    Returns:
        The names of the modules.

    Raises:
        ValueError: `num_tiles` is not positive, or the model has no module of a class.
    """
    if num_tiles < 1:
        raise ValueError(f"num_tiles={num_tiles} must be at least 1")
    found = named_modules_of(model, classes)
    for module in found.values():
        module.forward = TiledForward(module, num_tiles, sequence_dim)
    return list(found)


def _check_computed_inside(chosen: dict[str, nn.Module]) -> None:
    for name, module in chosen.items():
        if isinstance(module, ColumnParallelLinear):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, whose product column_parallel_linears and "
                "linear_cross_entropy compute outside of its forward; checkpoint the module around it, such as the "
                "attention's or the feed-forward's class"
            )


def _choose(
    model: nn.Module, config: CheckpointConfig, transformer_layer_cls: ModuleClass | Sequence[ModuleClass] | None
) -> dict[str, nn.Module]:
    if config is None:
        return {}
    if config == "full":
        return named_transformer_layers(model, transformer_layer_cls)
    if callable(config) and not isinstance(config, type):
        return named_modules_accepted_by(config, model)
    return named_modules_of(model, config)
