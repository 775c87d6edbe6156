"""The collectives of a candidate's ranks beside one another: where their orders part, and which sums ran over whom."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from nxd_parity.collectives import MESSAGES
from nxd_parity.events import CollectiveEvent
from nxd_parity.writer import RAISED, REACHED

Calls = Sequence[CollectiveEvent]
SAME_SHAPES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "reduce")
SUMS = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce")
GATHERS = ("all_gather", "all_gather_into_tensor")
BACK = (*SUMS, "all_to_all", "all_to_all_single")  # what ranks that send parts to each other may add up
MOST_SUMS = 2  # that are described


@dataclass(frozen=True)
class Parting:
    """Two ranks of a group call different collectives.

    Attributes:
        ranks: the two ranks.
        number: how many collectives of the group they have in common before, counted from 0.
        calls: what each calls then; None if a rank calls nothing more.
        ends: how the recordings of the two ranks ended.
        group: the ranks of the group.
    """

    ranks: tuple[int, int]
    number: int
    calls: tuple[CollectiveEvent | None, CollectiveEvent | None]
    ends: tuple[str, str]
    group: tuple[int, ...]

    @property
    def first(self) -> CollectiveEvent:
        """The call of the first rank that has one."""
        return next(it for it in self.calls if it is not None)

    def __str__(self) -> str:
        """Return both calls in a sentence."""
        group = f"ranks {', '.join(map(str, self.group))}"
        says = [
            f"rank {rank} calls {call or 'none, and ' + _ended(end)}"
            for rank, call, end in zip(self.ranks, self.calls, self.ends, strict=True)
        ]
        return f"collective {self.number + 1} of the group of {group}: {', '.join(says)}"


def _ended(end: str) -> str:
    return {REACHED: "ends", RAISED: "raised an error"}.get(end, "was killed")


def partings(collectives: Sequence[Calls], ends: Sequence[str]) -> Iterator[Parting]:
    """Yield for each group where the order of two of its ranks parts, the earliest step first.

    Args:
        collectives: the calls of each rank.
        ends: how the recording of each rank ended. Where one did not reach its end, the program may have hung: then a
            collective that another rank does not call counts as well.
    """
    of_group: dict[tuple[tuple[int, ...], str], dict[int, list[CollectiveEvent]]] = defaultdict(dict)
    for rank, calls in enumerate(collectives):
        for call in calls:
            if call.operation not in MESSAGES and len(call.ranks) > 1:
                of_group[call.ranks, call.group].setdefault(rank, []).append(call)
    found = []
    for (group, _), of_rank in of_group.items():
        members = [it for it in group if it < len(collectives)]
        for rank in members[1:]:
            pair = (members[0], rank)
            parting = _parting(group, pair, [of_rank.get(it, []) for it in pair], (ends[pair[0]], ends[rank]))
            if parting is not None:
                found.append(parting)
                break
    yield from sorted(found, key=lambda it: it.first.step)


def _parting(
    group: tuple[int, ...], ranks: tuple[int, int], calls: Sequence[Calls], ends: tuple[str, str]
) -> Parting | None:
    number = next(
        (at for at, pair in enumerate(zip(*calls, strict=False)) if _signature(pair[0]) != _signature(pair[1])), None
    )
    if number is None and len(calls[0]) != len(calls[1]) and set(ends) != {REACHED}:
        # One rank left out a collective: the modules tell which, if others of the same kind follow.
        places = ((at, {it.place for it in pair}) for at, pair in enumerate(zip(*calls, strict=False)))
        number = next((at for at, its in places if len(its) > 1), min(map(len, calls)))
    if number is None:
        return None
    first, second = (of_rank[number] if number < len(of_rank) else None for of_rank in calls)
    return Parting(ranks, number, (first, second), ends, group)


def _signature(call: CollectiveEvent) -> tuple[object, ...]:
    shape = call.shape if call.operation in SAME_SHAPES else ()
    return call.operation, shape, call.dtype, call.reduction


def about_sums(collectives: Sequence[Calls], step: int, shape: Sequence[int], ranks: Sequence[int]) -> str:
    """Say which sums a step makes of tensors of a size, and over which ranks, where they lack some.

    Args:
        collectives: the calls of each rank.
        step: the step.
        shape: shape of a rank's tensor that ranks have parts of a sum of.
        ranks: the ranks whose parts should be added up.
    """
    sums = [
        it
        for rank in ranks
        for it in collectives[rank]
        if it.step == step and it.operation in SUMS and it.reduction in ("SUM", "AVG")
    ]
    same = [it for it in sums if prod(it.shape) == prod(shape)]
    others = list(dict.fromkeys(it for it in same if not set(ranks) <= set(it.ranks)))
    if others:
        return f"it is to be added up over ranks {_listed(ranks)}; recorded is {others[0]}"
    if same:
        return ""
    larger = any(prod(it.shape) > prod(shape) and set(ranks) <= set(it.ranks) for it in sums)
    bucket = ", unless in a bucket with others" if larger else ""
    return f"no recorded collective adds up a tensor of {list(shape)} over ranks {_listed(ranks)}{bucket}"


def added_up_after_backward(calls: Calls, step: int, ranks: Sequence[int]) -> int:
    """Return how many elements a rank's sums over some ranks have in a step, outside the model and its backward."""
    return sum(
        prod(it.shape)
        for it in calls
        if it.step == step and it.operation in SUMS and not it.phase and set(ranks) == set(it.ranks)
    )


def sums_of(calls: Calls, step: int, shape: Sequence[int], modules: Sequence[str], size: int) -> str:
    """Say which sums over groups of some size a rank makes, in a step, of tensors of a size in some modules."""
    found = Counter(
        it
        for it in calls
        if it.step == step
        and it.operation in SUMS
        and len(it.ranks) == size
        and prod(it.shape) == prod(shape)
        and it.module in modules
    )
    return " and ".join(f"recorded {count} x {it}" for it, count in found.most_common(MOST_SUMS))


def gathered_without_sum(calls: Calls, step: int, modules: Sequence[str]) -> CollectiveEvent | None:
    """Return a gather in one of some modules whose backward adds nothing up; None if there is none."""
    of_step = [it for it in calls if it.step == step and it.operation not in MESSAGES]
    gathered = [it for it in of_step if it.phase == "forward" and it.operation in GATHERS and it.module in modules]
    for it in gathered:
        sums = [other for other in of_step if other.operation in BACK and other.phase == "backward"]
        if not any(other.ranks == it.ranks for other in sums):
            return it
    return None


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
