"""Parameters whose values are sharded over their replicas, and gathered only while they are used.

`nxd_optim.fully_shard` shards them. Whoever reads or writes values outside a forward or backward (checkpoints, exports,
adapters, tied weights) asks here: for the elements that this rank owns, or for a block in which parameters are whole.
Outside of these a sharded parameter has its shape, and its values read as NaN.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True, eq=False)
class OwnedRange:
    """The elements `start:stop`, in C order, that this rank owns of a sharded parameter.

    Attributes:
        start: first element.
        stop: one past the last element; `start` if this rank owns none.
        values: their values, 1-d; changing them changes the parameter once it is gathered the next time.
    """

    start: int
    stop: int
    values: Tensor


class ValueHolder(Protocol):
    """Holds the values of some parameters, which are sharded and gathered together."""

    def owned_range(self, parameter: Tensor) -> OwnedRange | None:
        """Return the elements of a parameter that this rank owns; None while it is held whole."""

    def publish(self) -> None:
        """Use the values of the owned ranges, which were changed, from now on."""

    def hold(self) -> None:
        """Start gathering the parameters, and keep them whole until `let_go`. Calls may be nested."""

    def wait(self) -> None:
        """Return when the parameters are whole."""

    def let_go(self) -> None:
        """Release the parameters if they were released at the first `hold`."""

    def keep_changes(self) -> None:
        """Take this rank's elements from the whole parameters, which were changed."""


_holders = WeakIdKeyDictionary()  # by parameter: weak references, since a holder keeps its parameters alive


def set_holder(parameter: Tensor, holder: ValueHolder | None) -> None:
    """Say who holds the values of a parameter, and is kept alive elsewhere; None for the parameter itself."""
    if holder is None:
        _holders.pop(parameter, None)
    else:
        _holders[parameter] = ref(holder)


def holder_of(parameter: Tensor) -> ValueHolder | None:
    """Return who holds the values of a parameter; None if it is not sharded over its replicas."""
    known: ref[ValueHolder] | None = _holders.get(parameter)
    return None if known is None else known()


def owned_range(parameter: Tensor) -> OwnedRange | None:
    """Return the elements of a sharded parameter that this rank owns.

    None for a parameter that is whole on every rank, as all are in a block of `whole_parameters`.
    """
    holder = holder_of(parameter)
    return None if holder is None else holder.owned_range(parameter)


def local_values(parameter: Tensor) -> Tensor:
    """Return the values of a parameter that this rank keeps: those that it owns, 1-d, or all, in its shape."""
    owned = owned_range(parameter)
    return parameter.detach() if owned is None else owned.values


def check_whole(parameters: Iterable[Tensor], call: str) -> None:
    """Raise a RuntimeError with the remedy if a call would read or write parameters that are not whole here."""
    if any(owned_range(parameter) is not None for parameter in parameters):
        raise RuntimeError(
            f"{call} of a model whose parameters are sharded over the replicas (ZeRO-3): save and load with "
            "save_checkpoint and load_checkpoint, or call it on all ranks in a block of "
            "nxd_state.whole_parameters(model.parameters()), with changed=True to load"
        )


def holders_of(parameters: Iterable[Tensor]) -> list[ValueHolder]:
    """Return who holds the values of these parameters, each once, in their order."""
    return list(dict.fromkeys(holder for it in parameters if (holder := holder_of(it)) is not None))


@contextmanager
def whole_parameters(parameters: Iterable[Tensor], *, changed: bool = False) -> Iterator[None]:
    """Inside the block these parameters are whole. Called by all ranks that share them; whole ones cost nothing.

    Tensors that share a parameter's memory must not be used after the block: copy what is to be kept.

    Args:
        parameters: the parameters.
        changed: whether the block changes values, alike on all ranks.
    """
    holders = holders_of(parameters)
    for holder in holders:
        holder.hold()
    for holder in holders:
        holder.wait()
    try:
        yield
    finally:
        for holder in holders:
            if changed:
                holder.keep_changes()
            holder.let_go()


def values_changed(parameters: Iterable[Tensor]) -> None:
    """Say that values of `owned_range` were changed. Called by all ranks that share the parameters."""
    for holder in holders_of(parameters):
        holder.publish()
