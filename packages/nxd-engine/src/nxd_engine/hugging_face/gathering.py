"""The tensors of all ranks as one source on rank 0, which requests each box from the others as it is written.

No rank ever holds the whole model, and only rank 0 needs the disk. The others wait in `_serve` until rank 0 finishes or
fails. Nothing is sent before every rank has confirmed that its tensors are ready, so a failing rank leaves no other
waiting.
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

from nxd_engine.rank_sync import run_or_raise_peer_error


class _BoxRequest(NamedTuple):
    """A box of a tensor that a rank must send."""

    rank: int
    name: str
    box: Box


class _Held(NamedTuple):
    info: TensorInfo
    boxes: Sequence[Box]


@dataclass
class GatheredTensors:
    """A `TensorSource` of all ranks' tensors, for rank 0."""

    group: Group
    state: Mapping[str, ShardedTensor]
    held: Sequence[Mapping[str, _Held]]
    objects: Any = None
    is_mapped: bool = field(default=False, init=False)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of every tensor that any rank holds."""
        return {name: found.info for on_rank in self.held for name, found in on_rank.items()}

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """All elements of the box that any rank holds, each once."""
        requests = self._requests(name, box)
        if all(request.rank == self.group.rank for request in requests):
            return [Shard(_values(self.state, request).cpu(), request.box.offsets) for request in requests]
        all_gather_object(requests, self.group)
        dtype, device = self.tensors[name].dtype, transport_device(self.group)

        def own_values_or_empty(request: _BoxRequest) -> torch.Tensor:
            if request.rank == self.group.rank:
                return _values(self.state, request)
            return torch.empty(request.box.shape, dtype=dtype, device=device)

        found = []
        for request, values in zip(requests, _ready(requests, own_values_or_empty, self.group), strict=True):
            received = values if request.rank == self.group.rank else recv(values, self.group, source=request.rank)
            found.append(Shard(received.cpu(), request.box.offsets))
        return found

    def _requests(self, name: str, box: Box) -> list[_BoxRequest]:
        missing, requests = [box], []
        for rank, on_rank in enumerate(self.held):
            for held in on_rank[name].boxes if name in on_rank else ():
                taken = [common for hole in missing if (common := hole.intersect(held)) is not None]
                requests += [_BoxRequest(rank, name, part) for part in taken]
                missing = [rest for hole in missing for rest in subtract(hole, held)]
        return requests


@contextmanager
def gathered(state: Mapping[str, ShardedTensor], group: Group) -> Iterator[GatheredTensors | None]:
    """Give rank 0 the tensors of all ranks; the others serve its requests here, and get None once it is done.

    Raises:
        RuntimeError: another rank failed meanwhile; the message has its error.
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
                raise own_failure or RuntimeError(f"writing the model failed on rank 0: {asked}")
            return
        own = [request for request in asked if request.rank == group.rank]
        try:
            ready = _ready(own, lambda request: _values(state, request).to(transport_device(group)), group)
        except _NotReadyError:
            continue  # rank 0 knows, and ends this with its next request
        except Exception as error:
            own_failure = error
            continue
        for values in ready:
            send(values, group, destination=0)


class _NotReadyError(RuntimeError):
    """Another rank could not read a requested box."""


def _ready(
    requests: Sequence[_BoxRequest], make: Callable[[_BoxRequest], torch.Tensor], group: Group
) -> Sequence[torch.Tensor]:
    """Return the results of `make` once all ranks have theirs. Called by all ranks.

    Raises:
        Exception: the exception of `make`, on its rank.
        _NotReadyError: `make` raised on another rank.
    """
    doing = "reading a part of the model"
    return run_or_raise_peer_error(doing, lambda: [make(it) for it in requests], group=group, error_type=_NotReadyError)


def _values(state: Mapping[str, ShardedTensor], request: _BoxRequest) -> torch.Tensor:
    """A requested box, contiguous. It lies in one shard, since requests are split along the shards' boxes."""
    shard = next(it for it in state[request.name].shards if it.box.contains(request.box))
    return shard.tensor[request.box.relative_to(shard.box).slices].detach().contiguous()
