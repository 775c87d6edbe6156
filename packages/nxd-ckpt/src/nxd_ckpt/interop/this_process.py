"""Saving and loading by one process alone, even where torch.distributed has more."""

from typing import Any


class ThisProcess:
    """The only rank there is, as `process_group` of `save` and `load`."""

    rank = 0
    world_size = 1

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        return [value]
