"""Activation checkpointing: parts of a model keep only their inputs, and recompute the rest for backward.

The parts are chosen here, by class, class name or structure; `forward` is their new forward. A part's `forward` is
replaced in place, so parameter names, shard metadata, tied weights and the model's structure do not change.
(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; the selective forms are from Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models".)
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches

from torch import nn

from nxd_layers.activation_checkpoint.forward import CheckpointedForward, Keep, TiledForward, matmul_outputs
from nxd_layers.linear import ColumnParallelLinear

__all__ = [
    "apply_activation_checkpointing",
    "remove_activation_checkpointing",
    "matmul_outputs",
    "tile_modules",
    "CheckpointConfig",
    "ModuleClass",
    "named_modules_of",
    "named_transformer_layers",
    "Keep",
]

ModuleClass = type[nn.Module] | str
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
        return _named_modules_accepted_by(config, model)
    return named_modules_of(model, config)


def named_modules_of(model: nn.Module, classes: ModuleClass | Sequence[ModuleClass]) -> dict[str, nn.Module]:
    """The model's modules of some classes, or of classes derived from them, by name."""
    wanted = [classes] if isinstance(classes, str | type) else list(classes)
    if not wanted:
        raise ValueError("no module class is given; name at least one, or pass None to checkpoint nothing")
    found: dict[str, nn.Module] = {}
    for cls in wanted:
        matches = {name: module for name, module in model.named_modules() if _is_of(module, cls)}
        if not matches:
            raise ValueError(_no_such_module(model, cls))
        found |= matches
    return found


def _named_modules_accepted_by(accepts: Callable[[nn.Module], bool], model: nn.Module) -> dict[str, nn.Module]:
    """The model's modules that a function accepts, by name."""
    found = {name: module for name, module in model.named_modules() if accepts(module)}
    if not found:
        present = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"the function {getattr(accepts, '__name__', accepts)!r} accepts no module of {type(model).__name__}; it "
            f"is called with each one, of the classes {', '.join(present)}"
        )
    return found


def named_transformer_layers(
    model: nn.Module, layer_classes: ModuleClass | Sequence[ModuleClass] | None = None
) -> dict[str, nn.Module]:
    """The model's repeated blocks, by name.

    Args:
        model: searched.
        layer_classes: classes of blocks. By default the classes that the model names in `_no_split_modules`, as Hugging
            Face's do; else the elements of each outermost `nn.ModuleList` whose elements are of one class and have
            submodules.
    """
    if layer_classes is not None:
        return named_modules_of(model, layer_classes)
    declared = set(getattr(model, "_no_split_modules", None) or ())
    present = [name for name in sorted(declared) if any(_is_of(module, name) for module in model.modules())]
    if present:  # a model may also name blocks of a part that it was built without
        return named_modules_of(model, present)
    layers: dict[str, nn.Module] = {}
    for name, modules in _outermost_lists(model).items():
        if _is_stack_of_blocks(modules):
            layers |= {f"{name}.{index}".lstrip("."): block for index, block in enumerate(modules)}
    if not layers:
        raise ValueError(
            f"found no transformer layers in {type(model).__name__}: it has no nn.ModuleList of blocks of one class; "
            "pass their class as transformer_layer_cls"
        )
    return layers


def _outermost_lists(module: nn.Module, name: str = "") -> dict[str, nn.ModuleList]:
    if isinstance(module, nn.ModuleList):
        return {name: module}
    found: dict[str, nn.ModuleList] = {}
    for child_name, child in module.named_children():
        found |= _outermost_lists(child, f"{name}.{child_name}".lstrip("."))
    return found


def _is_stack_of_blocks(modules: nn.ModuleList) -> bool:
    classes = {type(module) for module in modules}
    return len(classes) == 1 and all(any(True for _ in module.children()) for module in modules)


def _is_of(module: nn.Module, cls: ModuleClass) -> bool:
    if isinstance(cls, str):
        return any(base.__name__ == cls for base in type(module).__mro__)
    return isinstance(module, cls)


def _no_such_module(model: nn.Module, cls: object) -> str:
    if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        return f'{cls!r} is neither a module class nor the name of one; expected "full", None, a class or several'
    name = cls if isinstance(cls, str) else cls.__name__
    present = sorted({type(module).__name__ for module in model.modules()})
    nearest = get_close_matches(name, present, cutoff=0.5)
    if name in present:
        return f"{type(model).__name__} has modules of another class named {name}, none of {cls}; pass its class"
    return f"{type(model).__name__} has no module of class {name!r}; " + (
        f"did you mean {' or '.join(nearest)}?" if nearest else f"it has {', '.join(present)}"
    )
