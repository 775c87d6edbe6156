"""Work whose failure on one rank is an error on every rank, so that no rank waits for one that has raised."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nxd_state.collectives import all_gather_object
from nxd_state.group import Group
from nxd_state.store_messages import PeerError

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """The outcome of the same work on the ranks of a group.

    Attributes:
        results: the result on this rank; empty if it raised.
        error: the error on this rank.
        failures: the texts of the errors, by global rank; the same on every rank.
    """

    results: tuple[T, ...]
    error: Exception | None
    failures: dict[int, str]


def attempt_on_every_rank(act: Callable[[], T], group: Group) -> Attempt[T]:
    """Call `act`, and wait until all ranks of the group have tried; does not raise what `act` raises.

    Args:
        act: must not communicate: a rank that raises in it would not take part.
        group: its ranks all call this.
    """
    results: tuple[T, ...] = ()
    error: Exception | None = None
    try:
        results = (act(),)
    except Exception as raised:  # any error: the other ranks must learn of it instead of waiting
        error = raised
    texts = all_gather_object(None if error is None else f"{type(error).__name__}: {error}", group)
    failures = {rank: text for rank, text in zip(group.ranks, texts, strict=True) if text is not None}
    try:
        return Attempt(results, error, failures)
    finally:
        del error, act  # the error's traceback holds this frame, and with it what `act` has


def on_every_rank(doing: str, act: Callable[[], T], group: Group) -> T:
    """Call `act`; return its result here once it has returned on every rank of the group.

    Args:
        doing: the activity, for the message, such as "writing /tmp/adapter".
        act: see `attempt_on_every_rank`.
        group: its ranks all call this.

    Raises:
        RuntimeError: `act` raised on some rank; on every rank, with one text. A `PeerError` where it did not raise.
    """
    attempt = attempt_on_every_rank(act, group)
    if attempt.failures:
        lines = "\n  ".join(f"rank {rank}: {text}" for rank, text in attempt.failures.items())
        error_type = PeerError if attempt.error is None else RuntimeError
        raise error_type(
            f"{doing} failed on {len(attempt.failures)} of {group.size} ranks\n  {lines}"
        ) from attempt.error
    return attempt.results[0]
