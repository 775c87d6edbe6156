"""Making a model whose parameters take no memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def parameters_on_meta(*, include_buffers: bool) -> Iterator[None]:
    """Modules made inside have their parameters on the "meta" device, with ties and attributes.

    Args:
        include_buffers: put buffers there as well, and every other tensor that is made. Otherwise buffers have their
            values, and each parameter takes memory only until its module has it.
    """
    if include_buffers:
        with torch.device("meta"):
            yield
        return
    register = nn.Module.register_parameter
    on_meta = WeakIdKeyDictionary()  # a parameter that two modules are given stays one

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.is_meta:
            return
        if param not in on_meta:
            made = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            made.__dict__.update(param.__dict__)
            on_meta[param] = made
        module._parameters[name] = on_meta[param]

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
