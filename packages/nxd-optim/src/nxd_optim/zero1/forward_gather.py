"""Waiting for parameters where the next forward needs them, not where the step that sent them ends."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from nxd_optim.zero1.flat_bucket import FlatBucket


class ForwardGather:
    """Hooks on a model's modules: each waits, before its forward, for the buckets that hold its own parameters.

    Args:
        model: also waits for all buckets before its state is read or loaded.
        buckets: of the optimizer.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[FlatBucket]) -> None:
        self.model = model
        bucket_of = {id(parameter): bucket for bucket in buckets for parameter in bucket.parameters}
        self._hooks = [
            model.register_state_dict_pre_hook(partial(_wait, buckets)),
            model.register_load_state_dict_pre_hook(partial(_wait, buckets)),
        ]
        for module in model.modules():
            found = [bucket_of[id(p)] for p in module.parameters(recurse=False) if id(p) in bucket_of]
            if found:
                needed = list(dict.fromkeys(found))
                self._hooks.append(module.register_forward_pre_hook(partial(_wait, needed), prepend=True))

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()


def _wait(buckets: Sequence[FlatBucket], *_: Any) -> None:
    for bucket in buckets:
        bucket.wait_for_parameters()
