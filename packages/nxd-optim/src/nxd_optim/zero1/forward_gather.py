"""Waiting for parameters when the next forward reads them, not at the end of the step that sent them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from nxd_optim.zero1.buckets import Bucket


class ForwardGather:
    """Makes a model's modules wait for a parameter's bucket whenever the parameter is read as an attribute.

    The wait is on reading a parameter, not on calling its module: layers that share an input are computed by one
    function of their weights, and a loss takes the weight of the head. A module also waits for its own parameters
    before its forward, since some (`nn.LSTM`) keep them in a list besides.

    Args:
        model: also waits for all buckets before its state is read or loaded.
        buckets: of the optimizer.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        self.model = model
        bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters}
        self._hooks = [
            model.register_state_dict_pre_hook(partial(_wait, buckets)),
            model.register_load_state_dict_pre_hook(partial(_wait, buckets)),
        ]
        self._modules = [m for m in model.modules() if any(id(p) in bucket_of for p in m.parameters(recurse=False))]
        for module in self._modules:
            found = [bucket_of[id(p)] for p in module.parameters(recurse=False) if id(p) in bucket_of]
            needed = list(dict.fromkeys(found))
            self._hooks.append(module.register_forward_pre_hook(partial(_wait, needed), prepend=True))
            module._parameters = _ArrivingParameters(module._parameters, bucket_of)

    def close(self) -> None:
        """Make the modules ordinary ones again."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            module._parameters = dict(module._parameters)


class _ArrivingParameters(dict[str, nn.Parameter | None]):
    """A module's parameters by name, where `nn.Module` looks up its attributes; iterating over them does not wait."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], bucket_of: Mapping[int, Bucket]) -> None:
        super().__init__(parameters)
        self._bucket_of = bucket_of

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        bucket = self._bucket_of.get(id(parameter))
        if bucket is not None:
            bucket.wait_for_parameters()
        return parameter

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy of the module has parameters of its own, which no bucket holds


def _wait(buckets: Sequence[Bucket], *_: Any) -> None:
    for bucket in buckets:
        bucket.wait_for_parameters()
