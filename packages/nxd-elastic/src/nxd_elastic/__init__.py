"""Training that survives when ranks are lost or join, with torchrun's agent and store.

`nxd train --elastic MIN:MAX` uses it; scripts call `run`. A lost rank costs the steps since the newest checkpoint and a
second or two: the other ranks keep their processes.

Names are imported on first use: the process that writes checkpoints in the background needs `peers` without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxd_elastic.loop import ChangeMembers, Membership, run

__all__ = ["run", "Membership", "ChangeMembers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}")
    from nxd_elastic import loop  # noqa: PLC0415

    return getattr(loop, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
