"""The tensors of all ranks as one source on rank 0, which requests each box from the others when it is written.

So the model is never in one memory, and only rank 0 needs the disk. The others wait in `_serve` until rank 0 is done,
or has failed. Nothing is sent before every rank has confirmed that it has the requested tensors, so that a single
failing rank leaves no other waiting.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from nxd_ckpt import Shard, TensorInfo
from nxd_ckpt.boxes import Box, subtract
from nxd_ckpt.sharded_tensor import ShardedTensor
from nxd_state import Group, all_gather_object, recv, send, transport_device

from nxd_engine.rank_sync import together


class _Errand(NamedTuple):
    """A rank's part of a request."""

    rank: int
    name: str
    box: Box


class _Held(NamedTuple):
    info: TensorInfo
    boxes: Sequence[Box]


@dataclass
class GatheredTensors:
    """A `TensorSource` of all ranks' tensors; only rank 0 asks it."""

    group: Group
    state: Mapping[str, ShardedTensor]
    held: Sequence[Mapping[str, _Held]]
    objects: Any = None
    is_mapped: bool = field(default=False, init=False)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type and shape of every tensor that any rank holds."""
        return {name: found.info for on_rank in self.held for name, found in on_rank.items()}

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """All elements of the box that any rank holds, each once.

        Raises:
            RuntimeError: another rank could not give its part.
        """
        errands = self._errands(name, box)
        if all(errand.rank == self.group.rank for errand in errands):
            return [Shard(_values(self.state, errand).cpu(), errand.box.offsets) for errand in errands]
        all_gather_object(errands, self.group)
        dtype, device = self.tensors[name].dtype, transport_device(self.group)

        def own_values_or_room(errand: _Errand) -> torch.Tensor:
            if errand.rank == self.group.rank:
                return _values(self.state, errand)
            return torch.empty(errand.box.shape, dtype=dtype, device=device)

        found = []
        for errand, values in zip(errands, _ready(errands, own_values_or_room, self.group), strict=True):
            received = values if errand.rank == self.group.rank else recv(values, self.group, source=errand.rank)
            found.append(Shard(received.cpu(), errand.box.offsets))
        return found

    def _errands(self, name: str, box: Box) -> list[_Errand]:
        missing, errands = [box], []
        for rank, on_rank in enumerate(self.held):
            for held in on_rank[name].boxes if name in on_rank else ():
                taken = [common for hole in missing if (common := hole.intersect(held)) is not None]
                errands += [_Errand(rank, name, part) for part in taken]
                missing = [rest for hole in missing for rest in subtract(hole, held)]
        return errands


@contextmanager
def gathered(state: Mapping[str, ShardedTensor], group: Group) -> Iterator[GatheredTensors | None]:
    """On rank 0 the tensors of all; the others answer its questions here, and get None when it has no more.

    Args:
        state: this rank's state.
        group: all ranks, each of which calls this.

    Raises:
        RuntimeError: another rank failed in between; with its error's text.
    """
    own = {
        name: _Held(TensorInfo(it.dtype, it.global_shape), [shard.box for shard in it.shards])
        for name, it in state.items()
    }
    held = all_gather_object(own, group)
    if group.rank != 0:
        _serve(state, group)
        yield None
        return
    failure = ""
    try:
        yield GatheredTensors(group, state, held)
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        all_gather_object(failure, group)


def _serve(state: Mapping[str, ShardedTensor], group: Group) -> None:
    own_failure: Exception | None = None
    while True:
        asked = all_gather_object(None, group)[0]
        if isinstance(asked, str):
            if asked:
                raise own_failure or RuntimeError(f"rank 0 could not write the model: {asked}")
            return
        own = [errand for errand in asked if errand.rank == group.rank]
        try:
            ready = _ready(own, lambda errand: _values(state, errand).to(transport_device(group)), group)
        except _NotReadyError:
            continue  # rank 0 knows, and ends this at its next question
        except Exception as error:
            own_failure = error
            continue
        for values in ready:
            send(values, group, destination=0)


class _NotReadyError(RuntimeError):
    """Another rank has not got what it was asked for."""


def _ready(errands: Sequence[_Errand], make: Callable[[_Errand], torch.Tensor], group: Group) -> Sequence[torch.Tensor]:
    """What is made for the errands, when all ranks have made theirs. Called by all ranks.

    Raises:
        Exception: of `make`, on its rank.
        _NotReadyError: another rank's `make` raised.
    """
    return together(
        "give its part of the model",
        lambda: [make(errand) for errand in errands],
        group=group,
        error_type=_NotReadyError,
    )


def _values(state: Mapping[str, ShardedTensor], errand: _Errand) -> torch.Tensor:
    """A box of one tensor, contiguous; it is in one shard, since errands are cut along the shards' boxes."""
    shard = next(it for it in state[errand.name].shards if it.box.contains(errand.box))
    return shard.tensor[errand.box.relative_to(shard.box).slices()].detach().contiguous()
