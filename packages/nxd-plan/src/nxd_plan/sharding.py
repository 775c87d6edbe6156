"""What a rank holds of whole parameters and gradients while a microbatch passes, where ZeRO shards these.

It follows nxd_optim: which parameters share a bucket, when a bucket's gradients are allocated and sent, and which units
are gathered. All bytes are by place in a stage, as `StageParameter` counts places.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from nxd_optim.bucket_sender import DEFAULT_BUCKET_BYTES
from nxd_optim.zero.gradients import MAX_MESSAGES

from nxd_plan.stages import StageParts

MOST_ROUNDS = 3


@dataclass(frozen=True)
class Sharding:
    """How a job shards what a rank has of the parameters.

    Attributes:
        stage: the stage of ZeRO.
        parts: number of ranks that share a parameter of dense layers, and of experts.
        reshard_after_forward: see `nxd_optim.fully_shard`.
        itemsize: bytes per element of the weights.
        gradient_itemsize: bytes per element of their gradients.
        rounds: number of microbatches in a step, at most 3: the second finds what the first has left, and its own
            messages are received beside the sum.
        is_split: whether the backward of weights is separate.
        in_turn: whether a stage may run several forwards before a backward.
    """

    stage: int
    parts: tuple[int, int]
    reshard_after_forward: bool | int
    itemsize: int
    gradient_itemsize: int
    rounds: int
    is_split: bool = False
    in_turn: bool = False

    @property
    def sends_each(self) -> bool:
        """Whether a microbatch's gradients are sent while its backward runs."""
        return self.stage >= 2 or (self.stage == 1 and self.rounds == 1)

    def own(self, dense: int, experts: int) -> int:
        """Return this rank's part of so many elements, or bytes."""
        return dense // self.parts[0] + experts // self.parts[1]


@dataclass(frozen=True)
class Held:
    """Bytes at each place of a stage, in forward and in backward."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def most(self) -> int:
        """The maximum."""
        return max(*self.forward, *self.backward)


@cache
def gathered_bytes(stages: tuple[StageParts, ...], index: int, sharding: Sharding) -> Held:
    """Return the bytes of the parameters that are whole with ZeRO-3, while a microbatch passes a stage.

    Args:
        stages: the stages of a rank.
        index: index of the stage.
        sharding: how parameters are sharded.
    """
    places = _bytes_by_place(stages[index], sharding.itemsize)
    if sharding.stage < 3:
        return Held((0,) * len(places), (0,) * len(places))
    if sharding.reshard_after_forward is False:
        whole = sum(it.elements for it in stages) * sharding.itemsize
        return Held((whole,) * len(places), (whole,) * len(places))
    units = places[1:-1]
    elsewhere = sum(_kept_whole(it, sharding.itemsize) for at, it in enumerate(stages) if at != index)
    outside = places[0] + places[-1] + elsewhere
    last = len(units)
    forward, backward = [], []
    for place in range(len(places)):
        here = _whole_units(units, place, place + 1)
        if sharding.in_turn and last not in (place, place + 1):  # whole since the forward before
            here += sum(units[-1:])
        forward.append(outside + here + _near_bytes(units, sharding, len(units) if sharding.in_turn else place - 1))
        here = sum(units) if sharding.is_split else _whole_units(units, place - 1, place)
        backward.append(outside + here + _near_bytes(units, sharding, place - 2))
    return Held(tuple(forward), tuple(backward))


def _whole_units(units: Sequence[int], *places: int) -> int:
    return sum(units[place - 1] for place in places if 0 < place <= len(units))


def _near_bytes(units: Sequence[int], sharding: Sharding, number: int) -> int:
    """Return what is kept of the first units between forward and backward where near ranks share them."""
    if isinstance(sharding.reshard_after_forward, bool):
        return 0
    return sum(units[: max(0, number)]) // sharding.reshard_after_forward


def _kept_whole(stage: StageParts, itemsize: int) -> int:
    """Return the bytes that stay whole from a forward to its backward: the last unit, and what is outside the units."""
    places = _bytes_by_place(stage, itemsize)
    return places[0] + places[-1] + sum(places[1:-1][-1:])


@cache
def _bytes_by_place(stage: StageParts, itemsize: int) -> tuple[int, ...]:
    places = [0] * (len(stage.layers) + 2)
    for parameter in stage.parameters:
        places[parameter.place] += parameter.elements * itemsize
    return tuple(places)


_Place = tuple[int, int]  # a parameter: the index of its stage, and its own there


@dataclass(eq=False)
class _Bucket:
    """Parameters whose gradients are sent together.

    Attributes:
        parameters: the parameters.
        bytes: bytes of their gradients.
        parts: number of ranks that share their mean.
        is_sent: whether it is sent at each backward, and not when the step ends.
    """

    parameters: list[_Place]
    bytes: int
    parts: int
    is_sent: bool

    def bytes_under_way(self, *, has_sum: bool) -> int:
        """Return the bytes held until its message has arrived, without the sum of this rank's part."""
        if self.parts == 1:  # nothing is sent, and the first becomes the sum
            return self.bytes if has_sum else 0
        return self.bytes + (self.bytes // self.parts if has_sum else 0)


@cache
def gradient_bytes(stages: tuple[StageParts, ...], sharding: Sharding) -> tuple[Held, ...]:
    """Return the bytes of whole gradients that come and go while a microbatch passes each of a rank's stages.

    Gradients that exist all the time count nothing here: those of several microbatches that are not sent one by one.

    Args:
        stages: the stages of a rank.
        sharding: how they are sharded.
    """
    if sharding.rounds > 1 and not sharding.sends_each:
        return tuple(Held(nothing, nothing) for nothing in ((0,) * (len(it.layers) + 2) for it in stages))
    buckets = _buckets(stages, sharding)
    bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
    between = 0  # bytes while no backward runs
    most = [[0] * (len(it.layers) + 2) for it in stages]
    held: dict[_Bucket, int] = {}  # the bytes of gradients that are being filled
    under_way: deque[int] = deque(maxlen=MAX_MESSAGES)
    for number in range(sharding.rounds):
        missing = {bucket: len(bucket.parameters) for bucket in buckets}
        waiting = deque(bucket for bucket in buckets if bucket.is_sent)
        for at in reversed(range(len(stages))):
            for position, parameter in reversed([*enumerate(stages[at].parameters)]):
                if not parameter.is_trained:
                    continue
                bucket = bucket_of[at, position]
                held[bucket] = bucket.bytes
                found = sum(held.values()) + sum(under_way)
                most[at][parameter.place] = max(most[at][parameter.place], found)
                missing[bucket] -= 1
                while waiting and not missing[waiting[0]]:
                    sent = waiting.popleft()
                    del held[sent]
                    under_way.append(sent.bytes_under_way(has_sum=number > 0))
        between = max(between, sum(held.values()) + sum(under_way))
    if sharding.rounds == 1:
        between = 0
    return tuple(
        Held((between,) * len(places), tuple(max(it, between) for it in _until_changed(places))) for places in most
    )


def _until_changed(places: Sequence[int]) -> list[int]:
    """Return the bytes of each place of a backward, where a place without parameters has those of the place before."""
    found: list[int] = []
    for it in reversed(places):
        found.append(it or (found[-1] if found else 0))
    return found[::-1]


def _buckets(stages: Sequence[StageParts], sharding: Sharding) -> list[_Bucket]:
    """Return the buckets of a rank's gradients, in the order in which they are sent."""
    all_there_are = [
        (at, position)
        for at, stage in enumerate(stages)
        for position, parameter in enumerate(stage.parameters)
        if parameter.is_trained
    ]
    if not sharding.stage:
        return [_bucket(stages, [it], sharding) for it in all_there_are]
    if sharding.stage == 3:
        return [_bucket(stages, it, sharding) for it in _units(stages, all_there_are)]
    matrices = [(at, position) for at, position in all_there_are if stages[at].parameters[position].is_matrix]
    others = sorted(set(all_there_are) - set(matrices))
    batches = [batch for them in (matrices, others) for batch in _batches(stages, them, sharding.itemsize)]
    return [_bucket(stages, it, sharding) for it in batches]


def _bucket(stages: Sequence[StageParts], places: list[_Place], sharding: Sharding) -> _Bucket:
    them = [stages[at].parameters[position] for at, position in places]
    size = sum(it.elements for it in them) * sharding.gradient_itemsize
    # A backward sends what only its own stage has.
    is_sent = sharding.stage > 0 and len({at for at, _ in places}) == 1 and not any(it.is_tied for it in them)
    parts = sharding.parts[them[0].is_expert]
    if parts == 1 and sharding.rounds == 1:  # what would be sent is the mean itself
        is_sent = False
    return _Bucket(places, size, parts, is_sent)


def _units(stages: Sequence[StageParts], places: Sequence[_Place]) -> list[list[_Place]]:
    """Return the parameters of each unit, in the reverse order of forwards, and then those outside the units."""
    found: dict[tuple[bool, int, int, bool], list[_Place]] = {}
    for at, position in places:
        it = stages[at].parameters[position]
        is_outside = it.place in (0, len(stages[at].layers) + 1)
        unit = (is_outside, at, 0) if is_outside else (is_outside, -at, -it.place)
        found.setdefault((*unit, it.is_expert), []).append((at, position))
    return [found[key] for key in sorted(found)]


def _batches(stages: Sequence[StageParts], places: Sequence[_Place], itemsize: int) -> list[list[_Place]]:
    """Return the parameters that travel together, as `nxd_optim.bucket_sender.batch_parameters` does."""
    batches: dict[bool, list[list[_Place]]] = {}
    sizes: dict[bool, int] = {}
    for at, position in reversed(places):
        it = stages[at].parameters[position]
        of_kind = batches.setdefault(it.is_expert, [])
        size = it.elements * itemsize
        if not of_kind or sizes[it.is_expert] + size > DEFAULT_BUCKET_BYTES:
            of_kind.append([])
            sizes[it.is_expert] = 0
        of_kind[-1].append((at, position))
        sizes[it.is_expert] += size
    return sorted((it for of_kind in batches.values() for it in of_kind), key=lambda it: it[-1], reverse=True)
