"""Parameters in one flat buffer, of which each rank owns an equal part.

With ZeRO-1 and ZeRO-2 every rank keeps the whole buffer. With ZeRO-3 a rank keeps its own part, and the buffer has
memory only while its parameters are used: each then is a view of it, and otherwise a tensor of the same shape that
reads as NaN and takes no memory.
"""

import math
from collections.abc import Callable, Sequence

import torch
from nxd_state import Group, Pending, all_gather_, is_cpu
from nxd_state.sharded_values import OwnedRange, set_holder
from torch import Tensor

from nxd_optim.zero.host_memory import beside_computation, copy_on_host, record_copies

ALIGNMENT_BYTES = 64  # a cache line, and more than any kernel requires


class FlatParameters:
    """Parameters of one dtype and device as views of one buffer; a `nxd_state.sharded_values.ValueHolder`.

    Args:
        parameters: the parameters; they are moved into the buffer.
        group: the ranks that each own a part.
        is_released: whether only the own part is kept while the parameters are not used (ZeRO-3).
        near: the ranks that share what remains after a forward, some of `group`: each keeps an equal part of the buffer
            until the backward. None to keep only the own part then, too.
        offload: whether the own part of a released buffer is kept in host memory.

    Attributes:
        shard: this rank's part, 1-d; a part of the buffer itself unless the buffer is released.
        device: device of the parameters, and of the buffer.
        is_on_host: whether `shard` is in host memory, and not on the device.
        is_kept: whether the parameters stay whole until `publish`, once they are.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group: Group,
        *,
        is_released: bool = False,
        near: Group | None = None,
        offload: bool = False,
    ) -> None:
        first = parameters[0]
        self.parameters = list(parameters)
        self.group, self.is_released, self.device = group, is_released, first.device
        self._near = near
        self._near_part: Tensor | None = None
        self._starts, length = _lay_out(parameters, group.size)
        self._buffer = torch.zeros(length, dtype=first.dtype, device=first.device)
        self._places = self.views_of(self._buffer)
        for parameter in self.parameters:
            self._places[id(parameter)].copy_(parameter.detach())
            parameter.data = self._places[id(parameter)]
        self._own = self._buffer.chunk(group.size)[group.rank]
        self.is_on_host = offload and is_released and not is_cpu(first)
        self.shard = self._own
        if is_released:
            self.shard = copy_on_host(self._own, self._own.dtype) if self.is_on_host else self._own.clone()
        self._gathering: Pending[Tensor] | None = None
        self._arriving: torch.Event | None = None  # of this rank's part from the host
        self._reading: torch.Event | None = None  # the same, until the host has waited for it
        self._is_whole, self.is_kept = True, False
        self._holds, self._was_whole = 0, True  # blocks that keep it whole, and whether it was before the first
        self._bytes = self._buffer.nbytes
        self._owned = {id(it): tuple(place) for it, *place in self.own_ranges()}
        empty = torch.full((), math.nan if first.is_floating_point() else 0, dtype=first.dtype, device=first.device)
        self._empty = {id(it): empty.expand(it.shape) for it in self.parameters}
        self._versions: tuple[int, ...] = ()  # of the parameters while they are whole
        if is_released:
            for parameter in self.parameters:
                set_holder(parameter, self)
            self.release()

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, with padding."""
        return self._buffer.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer when it has memory, with padding."""
        return self._bytes

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are whole on this rank, or on their way."""
        return self._is_whole

    def views_of(self, flat: Tensor) -> dict[int, Tensor]:
        """Return the places of the parameters, by id, in a tensor of the buffer's length."""
        places = zip(self.parameters, self._starts, strict=True)
        return {id(it): flat[start : start + it.numel()].view(it.shape) for it, start in places}

    def own_ranges(self) -> list[tuple[Tensor, int, int, int]]:
        """Return each parameter of which this rank owns elements: it, their start and stop, their offset in `shard`."""
        part = self.numel // self.group.size
        part_start = self.group.rank * part
        ranges = []
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            first = max(start, part_start)
            last = min(start + parameter.numel(), part_start + part)
            if first < last:
                ranges.append((parameter, first - start, last - start, first - part_start))
        return ranges

    def owned_range(self, parameter: Tensor) -> OwnedRange | None:
        """Return the elements of a parameter that this rank owns; None while it is held whole."""
        if self._holds:
            return None
        self.finish_reading()
        start, stop, offset = self._owned.get(id(parameter), (0, 0, 0))
        return OwnedRange(start, stop, self.shard[offset : offset + stop - start])

    def finish_reading(self) -> None:
        """Return when the device has read `shard` from the host, which may then change it."""
        if self._reading is not None:
            self._reading.synchronize()
            self._reading = None

    def follow_unit(self, done: Callable[[], None]) -> bool:
        """Have `done` called when backward has left the unit of the parameters; returns whether it will be called."""
        return False

    @torch.no_grad()
    def publish(self) -> None:
        """Make changes of `shard` known: start gathering the parts, or forget the gathered parameters."""
        if self.is_released:
            self.is_kept = False
            self.release()
            self._near_part = None
        else:
            self._gathering = all_gather_(self._buffer, self.group, async_op=True)

    @torch.no_grad()
    def gather(self) -> None:
        """Start gathering the parts of a released buffer."""
        if self._is_whole:
            return
        self.check_places()
        self._buffer.untyped_storage().resize_(self._bytes)
        part, group, own = self.shard, self.group, self._own
        if self._near_part is not None and self._near is not None:
            part, group, self._near_part = self._near_part, self._near, None
            own = self._buffer.chunk(group.size)[group.rank]
        if part.device == self.device:
            own.copy_(part)
            self._gathering = all_gather_(self._buffer, group, async_op=True)
        else:
            with beside_computation(self.device):
                own.copy_(part, non_blocking=True)
                self._gathering = all_gather_(self._buffer, group, async_op=True)
                self._arriving = self._reading = record_copies(self.device)
        self._is_whole = True
        for parameter in self.parameters:
            parameter.data = self._places[id(parameter)]

    def wait(self) -> None:
        """Return when the parameters are whole; gathers them if they are released."""
        self.gather()
        if self._arriving is not None:
            self._arriving.wait(torch.accelerator.current_stream(self.device))
            self._arriving = None
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self.is_released:
                _set_versions(self.parameters, self._versions)

    @torch.no_grad()
    def release(self, *, until_backward: bool = False) -> None:
        """Give the buffer's memory back, where that is wanted.

        Args:
            until_backward: whether to keep the part of the near ranks, which the next `gather` then uses.
        """
        if not self.is_released or not self._is_whole or self._holds or self.is_kept:
            return
        self.wait()  # for a gather under way, in which other ranks take part
        if until_backward and self._near is not None:
            self._near_part = self._buffer.chunk(self._near.size)[self._near.rank].clone()
        # A backward that reads what is given up here fails as if the parameter had been changed.
        self._versions = tuple(it._version for it in self.parameters)
        _set_versions(self.parameters, [it + 1 for it in self._versions])
        for parameter in self.parameters:
            parameter.data = self._empty[id(parameter)]
        self._buffer.untyped_storage().resize_(0)
        self._is_whole = False

    def hold(self) -> None:
        """Start gathering, and keep the buffer until `let_go`. Calls may be nested."""
        if not self._holds:
            self._was_whole = self._is_whole
        self.gather()
        self._holds += 1

    def let_go(self) -> None:
        """Release the buffer if it was released at the first `hold`."""
        self._holds -= 1
        if not self._holds and not self._was_whole:
            self.release()

    @torch.no_grad()
    def keep_changes(self) -> None:
        """Take this rank's part from the whole parameters, which were changed."""
        self.wait()
        if self.shard is not self._own:
            self.shard.copy_(self._own)

    def check_places(self) -> None:
        """Raise a RuntimeError if a parameter is no longer in the buffer."""
        for parameter in self.parameters:
            place = self._places if self._is_whole else self._empty
            is_here = parameter.untyped_storage()._cdata == place[id(parameter)].untyped_storage()._cdata
            if not is_here or parameter.storage_offset() != place[id(parameter)].storage_offset():
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} was moved or converted after fully_shard, which "
                    "keeps its values elsewhere; move, convert or assign parameters before that"
                    if self.is_released
                    else f"a parameter of shape {tuple(parameter.shape)} was moved after the optimizer was created, so "
                    "updates would not reach it; move, convert or assign parameters before that, or pass lazy_init=True"
                    " and call init_zero() afterwards"
                )

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor is a part of the buffer."""
        return (
            tensor.layout is torch.strided and tensor.untyped_storage()._cdata == self._buffer.untyped_storage()._cdata
        )


def _set_versions(parameters: Sequence[Tensor], versions: Sequence[int]) -> None:
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), tuple(versions))


def _lay_out(parameters: Sequence[Tensor], parts: int) -> tuple[list[int], int]:
    """Return where each parameter starts, and the buffer's length, which `parts` divides.

    A parameter starts at a multiple of `ALIGNMENT_BYTES` if the gap before it is less than 1% of its size.
    """
    starts, end = [], 0
    for parameter in parameters:
        if parameter.nbytes > 100 * ALIGNMENT_BYTES:
            elements = ALIGNMENT_BYTES // parameter.element_size()
            end = -(-end // elements) * elements
        starts.append(end)
        end += parameter.numel()
    return starts, -(-max(end, 1) // parts) * parts
