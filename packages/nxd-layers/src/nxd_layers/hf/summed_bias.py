"""Biases of modules that compute with a part of a weight and whose outputs are then summed over the ranks.

Each rank would add the whole bias. It adds its share instead, bias / tp, so that the sum has it once.
"""

from typing import Any

from nxd_state import active_group
from torch import nn

from nxd_layers.hf.shards import mark_partial_gradients


def share_bias(module: nn.Module, name: str) -> None:
    """Have the module's forward find the bias divided by the tensor-parallel degree; its gradient is then partial.

    Args:
        module: whose output is summed over the ranks.
        name: of its bias, whole on every rank.
    """
    mark_partial_gradients([module.get_parameter(name)])
    share = _Share(name)
    module.register_forward_pre_hook(share.begin)
    module.register_forward_hook(share.end, always_call=True)


class _Share:
    """The hooks. A property in place of the parameter would change its name or the module's class."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._whole: Any = None

    def begin(self, module: nn.Module, args: Any) -> None:
        self._whole = module._parameters[self._name]  # a plain tensor while a program is recorded
        module._parameters[self._name] = self._whole / active_group("tp").size

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._whole is not None:
            module._parameters[self._name], self._whole = self._whole, None
