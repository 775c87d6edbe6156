"""Chooses the layers that end the stages: given by name, or so that layers are spread evenly."""

from collections.abc import Sequence

from torch import nn

LayerClasses = type[nn.Module] | Sequence[type[nn.Module]]


def layer_names(module: nn.Module, transformer_layer_cls: LayerClasses) -> list[str]:
    """The names of the model's layers of this class (or these classes), in the order of the model.

    Raises:
        ValueError: the model has none.
    """
    classes = (transformer_layer_cls,) if isinstance(transformer_layer_cls, type) else tuple(transformer_layer_cls)
    names = [name for name, submodule in module.named_modules() if isinstance(submodule, classes)]
    if not names:
        wanted = ", ".join(it.__name__ for it in classes)
        raise ValueError(f"{type(module).__name__} has no layers of class {wanted}; give the class of its layers")
    return names


def even_cuts(layers: Sequence[str], num_stages: int) -> list[str]:
    """The last layer of each stage but the last, with equally many layers per stage and the remainder to later stages.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    check_layer_count(len(layers), num_stages)
    per_stage, remainder = divmod(len(layers), num_stages)
    cuts, end = [], 0
    for stage in range(num_stages - 1):
        end += per_stage + (stage >= num_stages - remainder)
        cuts.append(layers[end - 1])
    return cuts


def check_layer_count(num_layers: int, num_stages: int) -> None:
    """Check that there are enough layers for all stages.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot fill {num_stages} stages; use at most {num_layers} stages "
            "(pipeline_model_parallel_size times virtual_pipeline_size)"
        )


def check_cuts(module: nn.Module, cuts: Sequence[str], num_stages: int) -> None:
    """Check names against the model and their number against the stages.

    Raises:
        ValueError: another number than `num_stages - 1`, a name twice, or a name that the model does not have.
    """
    if len(cuts) != num_stages - 1:
        raise ValueError(
            f"pipeline_cuts names {len(cuts)} layers, {list(cuts)}; {num_stages} stages need {num_stages - 1}: "
            "the last layer of each stage but the last"
        )
    if len(set(cuts)) < len(cuts):
        raise ValueError(f"pipeline_cuts={list(cuts)} names a layer twice; name each once")
    names = {name for name, _ in module.named_modules()}
    for cut in cuts:
        if cut not in names:
            similar = [name for name in names if name.rpartition(".")[2] == cut.rpartition(".")[2]]
            hint = f"; did you mean {sorted(similar)[0]!r}?" if similar else "; see model.named_modules()"
            raise ValueError(f"pipeline_cuts names {cut!r}, which {type(module).__name__} does not have{hint}")
