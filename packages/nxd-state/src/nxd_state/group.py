"""`Group`: the ranks that talk to each other along one axis of the mesh, as seen from this rank."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from nxd_state.shared_memory import Transport


@dataclass(frozen=True, eq=False)
class Group:
    """One group of ranks of an axis.

    Attributes:
        axis: mesh axis, or several joined by "+" ("tp", "dp+cp").
        ranks: global ranks of this group, in mesh order.
        rank: this process's index in `ranks`.
        replica_groups: the ranks of every group of this axis; one of them is `ranks`.
        process_group: the torch process group behind it; None where nobody else is in it.
        name: the process group's registered name, which compiled graphs refer to.
        shared_memory: what carries CPU tensors where all its ranks are on one host; None where they are not.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    replica_groups: tuple[tuple[int, ...], ...]
    process_group: dist.ProcessGroup | None = None
    name: str = ""
    shared_memory: "Transport | None" = None

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @classmethod
    def solo(cls, axis: str) -> "Group":
        """A group of this one process, for code that runs without an initialised mesh."""
        return cls(axis=axis, ranks=(0,), rank=0, replica_groups=((0,),))

    def __repr__(self) -> str:
        return f"Group(axis={self.axis!r}, rank={self.rank} of {list(self.ranks)})"
