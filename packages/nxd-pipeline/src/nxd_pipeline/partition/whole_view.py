"""The model that a rank cut its stages from, without the memory of the other stages."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from nxd_pipeline.partition.stand_ins import shallow_copy


def without_other_stages(model: nn.Module, own: Iterable[Tensor]) -> nn.Module:
    """The whole model for its methods and attributes; parameters and buffers of other ranks are on the meta device.

    What a method does to weights it does to those of this rank, and to nothing elsewhere. Modules whose tensors are all
    of this rank are the model's own; the model itself is not changed.

    Args:
        model: the model before it was cut.
        own: parameters and buffers of this rank's stages.

    Returns:
        The model, or a copy of it where tensors of other ranks were replaced.
    """
    kept = {id(tensor) for tensor in own}
    made: dict[int, Tensor] = {}  # tied tensors stay tied
    return _view(model, kept, made)


def _view(module: nn.Module, kept: set[int], made: dict[int, Tensor]) -> nn.Module:
    if all(id(tensor) in kept for tensor in _tensors(module)):
        return module
    copy = shallow_copy(module)
    _forget_calls(copy)
    for registry in (copy._parameters, copy._buffers):
        for name, tensor in registry.items():
            if tensor is not None and id(tensor) not in kept:
                registry[name] = made.setdefault(id(tensor), _on_meta(tensor))  # type: ignore[assignment]
    for name, child in module.named_children():
        copy._modules[name] = _view(child, kept, made)
    return copy


def _forget_calls(copy: nn.Module) -> None:
    """Drop hooks and a forward of its own: nothing calls the copy, and they may hold the modules of other stages."""
    copy.__dict__.pop("forward", None)
    for name, registry in vars(copy).items():
        if name.endswith("_hooks"):
            registry.clear()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _on_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    meta = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
    meta.__dict__.update(tensor.__dict__)  # what scripts mark parameters with
    return meta
