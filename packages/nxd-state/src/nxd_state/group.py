"""`Group`: the ranks that talk to each other along one axis of the mesh, as seen from this rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from nxd_state.shared_memory import SharedMemoryTransport

_given_ranks: ContextVar[dict["Group", Tensor]] = ContextVar("_given_ranks", default={})  # noqa: B039 - never changed


@dataclass(frozen=True, eq=False)
class Group:
    """One group of ranks of an axis.

    Attributes:
        axis: mesh axis, or several joined by "+" ("tp", "dp+cp").
        ranks: global ranks of this group, in mesh order.
        rank: this process's index in `ranks`.
        replica_groups: the ranks of every group of this axis; one of them is `ranks`.
        process_group: the torch process group behind it; None if this rank is its only member.
        name: the process group's registered name, which compiled graphs refer to.
        shared_memory: the transport of CPU tensors if all its ranks are on one host; else None.
        crosses_stages: whether it has ranks of several pipeline stages, which compute different things.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    replica_groups: tuple[tuple[int, ...], ...]
    process_group: dist.ProcessGroup | None = None
    name: str = ""
    shared_memory: "SharedMemoryTransport | None" = None
    crosses_stages: bool = False
    _rank_tensors: dict[torch.device, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.size > 1:  # made now, so that code under torch.compile finds it and has no number in its graph
            self._rank_tensors[torch.device("cpu")] = _vector(self.rank, torch.device("cpu"))

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def rank_tensor(self, like: Tensor) -> Tensor:
        """`rank` as data, for computations whose graph must be the same on every rank.

        A Python number would be a constant of the graph, so each rank would record and compile a different one.

        Args:
            like: a tensor that it is used with; gives the device.

        Returns:
            0-d int64.
        """
        if type(like) not in (Tensor, nn.Parameter):  # it belongs to a tracer or simulator, so ours must do so too
            given = _given_ranks.get().get(self)
            return torch.tensor(self.rank, device=like.device) if given is None else given.view(())
        if torch.compiler.is_exporting():  # strictly: torch 2.9 refuses tensors from elsewhere, and makes data of this
            return torch.tensor(self.rank, device=like.device)
        held = self._rank_tensors.get(like.device)
        if held is None and torch.compiler.is_compiling():
            held = self._rank_tensors[torch.device("cpu")].to(like.device)
        elif held is None:
            held = self._rank_tensors[like.device] = _vector(self.rank, like.device)
        return held.view(())

    @contextmanager
    def rank_given_by(self, tensor: Tensor) -> Iterator[None]:
        """Inside the block, `rank_tensor` returns this tensor while torch.export records: the rank is then an input.

        Args:
            tensor: `[1]` int64, an input of the recorded function.
        """
        token = _given_ranks.set({**_given_ranks.get(), self: tensor})
        try:
            yield
        finally:
            _given_ranks.reset(token)

    @classmethod
    def solo(cls, axis: str) -> "Group":
        """A group of this one process, for code that runs without an initialized mesh."""
        return cls(axis=axis, ranks=(0,), rank=0, replica_groups=((0,),))

    def __deepcopy__(self, memo: dict[int, object]) -> "Group":
        """The same object: copies of a layer compute on the group that it was given."""
        return self

    def __repr__(self) -> str:
        return f"Group(axis={self.axis!r}, rank={self.rank} of {list(self.ranks)})"


@torch.inference_mode(False)
def _vector(rank: int, device: torch.device) -> Tensor:
    """`[1]`: torch-xla makes constants of the scalars 0 and 1."""
    return torch.tensor([rank], device=device)
