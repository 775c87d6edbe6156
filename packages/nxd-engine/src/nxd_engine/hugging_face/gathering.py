"""The tensors of all ranks as one source on rank 0, which requests boxes from the others as it needs them.

No rank ever holds the whole model. The others wait in `serve` until rank 0 finishes or fails. Rank 0 leads: each round
begins with a gather in which it says what comes next, and in which any rank can report a failure, which ends the round
on all ranks. Nothing is sent before every rank has confirmed that its tensors are ready, so a failing rank leaves no
other waiting.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from nxd_ckpt import Shard, TensorInfo
from nxd_ckpt.boxes import Box, subtract
from nxd_ckpt.sharded_tensor import ShardedTensor
from nxd_state import Group, PeerError, all_gather_object, broadcast, recv, send, transport_device

from nxd_engine.rank_sync import run_or_raise_peer_error


class _BoxRequest(NamedTuple):
    """A box of a tensor that a rank must send."""

    rank: int
    name: str
    box: Box


class _Held(NamedTuple):
    info: TensorInfo
    boxes: Sequence[Box]


class _Shared(NamedTuple):
    """Whole tensors that rank 0 sends to all ranks next, in this order."""

    infos: Mapping[str, TensorInfo]


@dataclass
class GatheredTensors:
    """A `TensorSource` of all ranks' tensors, for rank 0."""

    group: Group
    state: Mapping[str, ShardedTensor]
    held: Sequence[Mapping[str, _Held]]
    objects: Any = None
    is_mapped: bool = field(default=False, init=False)
    _fetched: dict[tuple[str, Box], Sequence[Shard]] = field(default_factory=dict, init=False)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and shape of every tensor that any rank holds."""
        return {name: found.info for on_rank in self.held for name, found in on_rank.items()}

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        """All elements of the box that any rank holds, each once."""
        if (name, box) not in self._fetched:
            self.fetch([(name, box)])
        return self._fetched.pop((name, box))

    def fetch(self, wanted: Sequence[tuple[str, Box]]) -> None:
        """Get boxes of tensors in one round, and keep them until `shards` returns them."""
        requests = {(name, box): self._requests(name, box) for name, box in wanted}
        together = [request for of_box in requests.values() for request in of_box]
        is_all_own = all(request.rank == self.group.rank for request in together)
        own = (_values(self.state, request) for request in together)
        values = own if is_all_own else self._received(together)
        shards = (Shard(it.cpu(), request.box.offsets) for it, request in zip(values, together, strict=True))
        self._fetched |= {key: [next(shards) for _ in of_box] for key, of_box in requests.items()}

    def share(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send whole tensors to all ranks, which get them from `serve`."""
        infos = {name: TensorInfo(it.dtype, tuple(it.shape)) for name, it in tensors.items()}
        _next_round(_Shared(infos), self.group)
        device = transport_device(self.group)
        for tensor in _allocated(infos, lambda name, _: tensors[name].to(device), self.group).values():
            broadcast(tensor, self.group)

    def _received(self, requests: Sequence[_BoxRequest]) -> Iterator[torch.Tensor]:
        _next_round(requests, self.group)
        device = transport_device(self.group)

        def own_values_or_empty(request: _BoxRequest) -> torch.Tensor:
            if request.rank == self.group.rank:
                return _values(self.state, request)
            return torch.empty(request.box.shape, dtype=self.tensors[request.name].dtype, device=device)

        ready = _ready(requests, own_values_or_empty, self.group)
        for request, values in zip(requests, ready, strict=True):
            yield values if request.rank == self.group.rank else recv(values, self.group, source=request.rank)

    def _requests(self, name: str, box: Box) -> list[_BoxRequest]:
        missing, requests = [box], []
        for rank, on_rank in enumerate(self.held):
            for held in on_rank[name].boxes if name in on_rank else ():
                taken = [common for hole in missing if (common := hole.intersect(held)) is not None]
                requests += [_BoxRequest(rank, name, part) for part in taken]
                missing = [rest for hole in missing for rest in subtract(hole, held)]
        return requests


@contextmanager
def gathered(
    state: Mapping[str, ShardedTensor], group: Group, doing: str = "writing the model"
) -> Iterator[GatheredTensors | None]:
    """Give rank 0 the tensors of all ranks; the others serve its requests here, and get None once it is done.

    Args:
        state: this rank's tensors.
        group: the ranks.
        doing: what rank 0 does with them, for messages.

    Raises:
        PeerError: another rank failed meanwhile; the message has its error.
    """
    if group.rank != 0:
        for _ in serve(state, group, doing):
            raise AssertionError("nothing is shared with the other ranks here")
        yield None
        return
    with leading(state, group, doing) as everything:
        yield everything


@contextmanager
def leading(state: Mapping[str, ShardedTensor], group: Group, doing: str) -> Iterator[GatheredTensors]:
    """Give rank 0 the tensors of all ranks, while the others are in `serve`.

    Raises:
        PeerError: another rank failed meanwhile; the message has its error.
    """
    everything = GatheredTensors(group, state, all_gather_object(_held(state), group))
    try:
        yield everything
    except _EndedError as ended:
        raise PeerError(f"{doing} {ended}") from None
    except BaseException as error:
        all_gather_object(_description(error), group)
        raise
    try:
        _next_round("", group)
    except _EndedError as ended:
        raise PeerError(f"{doing} {ended}") from None


def serve(state: Mapping[str, ShardedTensor], group: Group, doing: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Answer the requests of rank 0 until it is done, on another rank; yield the whole tensors that it shares.

    Raises:
        PeerError: another rank failed meanwhile; the message has its error.
    """
    all_gather_object(_held(state), group)
    own_failure: Exception | None = None
    while True:
        try:
            asked = _next_round(None, group)
        except _EndedError as ended:
            raise own_failure or PeerError(f"{doing} {ended}") from None
        if isinstance(asked, str):
            return
        try:
            if isinstance(asked, _Shared):
                shared = _received_from_rank_0(asked, group)
            else:
                _send_own(state, asked, group)
                continue
        except _NotReadyError:
            continue  # rank 0 knows, and ends this with its next request
        except Exception as error:
            own_failure = error
            continue
        try:
            while shared:
                yield next(iter(shared)), shared.pop(next(iter(shared)))
        except BaseException as error:
            all_gather_object(_description(error), group)
            raise


def _received_from_rank_0(asked: _Shared, group: Group) -> dict[str, torch.Tensor]:
    device = transport_device(group)

    def empty(_: str, info: TensorInfo) -> torch.Tensor:
        return torch.empty(info.global_shape, dtype=info.dtype, device=device)

    ready = _allocated(asked.infos, empty, group)
    return {name: broadcast(tensor, group).cpu() for name, tensor in ready.items()}


def _send_own(state: Mapping[str, ShardedTensor], asked: Sequence[_BoxRequest], group: Group) -> None:
    own = [request for request in asked if request.rank == group.rank]
    for values in _ready(own, lambda request: _values(state, request).to(transport_device(group)), group):
        send(values, group, destination=0)


def _next_round(command: Any, group: Group) -> Any:
    """Return what rank 0 wants next; `command` is None on the others. Called by all ranks.

    Raises:
        _EndedError: a rank has failed, and all ranks know.
    """
    of_ranks = all_gather_object(command, group)
    for rank, said in enumerate(of_ranks):
        if isinstance(said, str) and said:
            raise _EndedError(f"failed on rank {rank}: {said}")
    return of_ranks[0]


def _held(state: Mapping[str, ShardedTensor]) -> dict[str, _Held]:
    return {
        name: _Held(TensorInfo(it.dtype, it.global_shape), [shard.box for shard in it.shards])
        for name, it in state.items()
    }


def _description(error: BaseException) -> str:
    if isinstance(error, GeneratorExit):
        return "the loop over the tensors ended early"
    return f"{type(error).__name__}: {error}"


class _EndedError(RuntimeError):
    """A rank has reported its failure to all; nobody waits any more."""


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


def _allocated(
    infos: Mapping[str, TensorInfo], make: Callable[[str, TensorInfo], torch.Tensor], group: Group
) -> dict[str, torch.Tensor]:
    """As `_ready`, for whole tensors by name."""
    doing = "making room for whole tensors"
    return run_or_raise_peer_error(
        doing,
        lambda: {name: make(name, info) for name, info in infos.items()},
        group=group,
        error_type=_NotReadyError,
    )


def _values(state: Mapping[str, ShardedTensor], request: _BoxRequest) -> torch.Tensor:
    """A requested box, contiguous. It lies in one shard, since requests are split along the shards' boxes."""
    shard = next(it for it in state[request.name].shards if it.box.contains(request.box))
    return shard.tensor[request.box.relative_to(shard.box).slices].detach().contiguous()
