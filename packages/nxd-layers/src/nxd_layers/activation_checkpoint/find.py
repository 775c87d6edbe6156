"""Finding the modules of a model to checkpoint: by class, by class name, or by structure."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches

from torch import nn

ModuleClass = type[nn.Module] | str


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


def named_modules_accepted_by(accepts: Callable[[nn.Module], bool], model: nn.Module) -> dict[str, nn.Module]:
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
