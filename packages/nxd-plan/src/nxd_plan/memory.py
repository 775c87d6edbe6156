"""Computes each pipeline rank's memory, by kind, from a profile of the model's parts and the schedule's order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nxd_pipeline import ActionKind, Schedule
from nxd_pipeline.schedules.verification import ActivationSize, peak_in_flight

from nxd_plan.layout import Layout
from nxd_plan.profile import Profile
from nxd_plan.sharding import MOST_ROUNDS, Held, Sharding, gathered_bytes, gradient_bytes
from nxd_plan.stages import StageParts

FLOAT32_BYTES = 4
MOMENTS = 2  # AdamW's
MESSAGES_IN_FLIGHT = 2  # in flight per stage


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank: the maximum of each kind, and the peak of the total.

    Attributes:
        parameters: parameters of this rank's stages; with ZeRO-3 this replica's part.
        gathered: with ZeRO-3 the parameters that are whole at a time, beside that part.
        gradients: gradients of whole parameters, in the dtype they are accumulated in: of all, or with ZeRO-2 and
            ZeRO-3, or where a step has one microbatch, those that are not yet sent.
        optimizer_state: both moments of AdamW, and master weights; with ZeRO this replica's part.
        buckets: buffers for this replica's part of the mean gradients, and for messages between stages.
        activations: activations kept from forward to backward, over all microbatches in flight, without the head's.
        logits: tensors kept by norm, head and loss, over all microbatches in flight.
        temporaries: further memory that forward or backward of one part of the model needs.
        peak: the maximum at any time. At most the sum of the others, whose maxima need not coincide.
    """

    parameters: int
    gathered: int
    gradients: int
    optimizer_state: int
    buckets: int
    activations: int
    logits: int
    temporaries: int
    peak: int

    @property
    def states(self) -> int:
        """The bytes that do not depend on the batch."""
        return self.parameters + self.gathered + self.gradients + self.optimizer_state + self.buckets


def rank_memories(
    layout: Layout, stages: Sequence[StageParts], profile: Profile, schedule: Schedule, itemsize: int
) -> list[RankMemory]:
    """Return the memory of every pipeline rank.

    Args:
        layout: the layout to plan.
        stages: the pipeline's stages.
        profile: the profile of one microbatch on one rank.
        schedule: the schedule of the layout's microbatches, or of fewer if more would not raise the number in flight.
        itemsize: bytes per element of the weights.
    """
    sharding = _sharding(layout, schedule, itemsize)
    kept = [_Kept.of(stage, profile) for stage in stages]
    in_flight = peak_in_flight(schedule, [ActivationSize(it.total, it.until_weights) for it in kept])
    logits_in_flight = peak_in_flight(schedule, [ActivationSize(it.head, it.head) for it in kept])
    memories = []
    for rank in range(schedule.num_ranks):
        own = schedule.stages_of(rank)
        memories.append(
            _rank_memory(
                layout,
                sharding,
                tuple(stages[stage] for stage in own),
                [kept[stage] for stage in own],
                profile,
                in_flight[rank],
                logits_in_flight[rank],
            )
        )
    return memories


@dataclass(frozen=True)
class _Kept:
    """Bytes that one microbatch keeps on a stage between forward and backward.

    Attributes:
        before_layers: tensors of the embedding, or the tensors received.
        layers: tensors of all layers.
        head: tensors of norm, head and loss.
        total: the sum of these three.
        until_weights: the total plus the gradients that a separate, later backward of the weights needs.
    """

    before_layers: int
    layers: int
    head: int
    total: int
    until_weights: int

    @classmethod
    def of(cls, stage: StageParts, profile: Profile) -> "_Kept":
        # Later stages receive the outputs of the embedding part: hidden states and rotary tables. A stage keeps the
        # tensors that it sends until their gradients come back.
        before = profile.embedding.forward.kept
        layers = sum(profile.layers[kind].forward.kept for kind in stage.layers)
        head = profile.head.forward.kept if stage.has_head else 0
        products = sum(profile.layers[kind].forward.product_bytes for kind in stage.layers)
        products += profile.head.forward.product_bytes if stage.has_head else 0
        if stage.has_embedding:  # without inputs that need gradients, the backward is one
            products = 0
        total = before + layers + head
        return cls(before, layers, head, total, total + products)


def _sharding(layout: Layout, schedule: Schedule, itemsize: int) -> Sharding:
    zero_stage = layout.degrees.zero_stage
    return Sharding(
        stage=zero_stage,
        parts=layout.sharing_ranks,
        reshard_after_forward=layout.reshard_after_forward,
        itemsize=itemsize,
        gradient_itemsize=max(itemsize, FLOAT32_BYTES) if zero_stage else itemsize,
        rounds=min(MOST_ROUNDS, layout.num_microbatches),
        is_split=any(it.kind is ActionKind.BACKWARD_WEIGHT for it in schedule.actions[0]),
        in_turn=schedule.num_ranks > 1,
    )


def _rank_memory(
    layout: Layout,
    sharding: Sharding,
    stages: tuple[StageParts, ...],
    kept: Sequence[_Kept],
    profile: Profile,
    in_flight: int,
    logits: int,
) -> RankMemory:
    itemsize, elements = sharding.itemsize, sum(stage.elements for stage in stages)
    experts = sum(stage.experts for stage in stages)
    wide = max(itemsize, FLOAT32_BYTES)
    trained = elements - sum(stage.frozen for stage in stages)
    parameters = elements * itemsize
    comes_and_goes = gradient_bytes(stages, sharding)
    whole_gradients = trained * sharding.gradient_itemsize
    # Buckets of gradients exist from the first microbatch on; without them, and with one microbatch, they come late.
    come_late = sharding.rounds == 1 and (sharding.stage > 0 or layout.degrees.replicas == 1)
    is_lasting = not come_late and not sharding.sends_each
    if sharding.stage:
        own = sharding.own((trained - experts) * wide, experts * wide)
        masters = own if wide != itemsize else 0
        state = MOMENTS * own + masters
        buckets = sum(
            size // parts
            for size, parts in zip(((trained - experts) * wide, experts * wide), sharding.parts, strict=True)
            if parts > 1 or (sharding.sends_each and not come_late)
        )
        if sharding.stage == 3:
            parameters = sharding.own((elements - experts) * itemsize, experts * itemsize)
    else:
        state = MOMENTS * trained * itemsize
        buckets = 0  # the gradients themselves are in the buckets
    if layout.degrees.pp > 1:
        buckets += len(stages) * MESSAGES_IN_FLIGHT * profile.embedding.forward.kept
    gathered = [gathered_bytes(stages, index, sharding) for index in range(len(stages))]
    nothing_late = tuple(Held((0,) * len(it.forward), (0,) * len(it.backward)) for it in gathered)
    late = nothing_late if is_lasting else comes_and_goes
    peaks = [_above_states(*them, profile) for them in zip(stages, kept, gathered, late, strict=True)]
    current = max(peak - own.total for peak, own in zip(peaks, kept, strict=True))
    update = 2 * max(stage.largest for stage in stages) * wide
    alone = [
        _above_states(stage, own, nothing, nothing, profile) - own.total
        for stage, own, nothing in zip(stages, kept, nothing_late, strict=True)
    ]
    most_late = max(it.most for it in late)
    lasting = parameters + state + buckets + (whole_gradients if is_lasting else 0)
    return RankMemory(
        parameters=parameters,
        gathered=max(it.most for it in gathered),
        gradients=whole_gradients if is_lasting else most_late,
        optimizer_state=state,
        buckets=buckets,
        activations=in_flight - logits,
        logits=logits,
        temporaries=max(0, *alone),
        peak=lasting + max(in_flight + current, update + most_late * come_late),
    )


def _above_states(stage: StageParts, kept: _Kept, gathered: Held, late: Held, profile: Profile) -> int:
    """Return the peak bytes of one microbatch on a stage that does nothing else.

    Args:
        stage: the stage that runs the microbatch.
        kept: the bytes that the microbatch keeps.
        gathered: the bytes of gathered parameters.
        late: the bytes of gradients that are allocated during backward.
        profile: the profile of the model's parts.
    """
    head, embedding = profile.head, profile.embedding
    layers = [profile.layers[kind] for kind in stage.layers]
    before = [kept.before_layers, *(kept.before_layers + sum_ for sum_ in accumulate(it.forward.kept for it in layers))]
    forward = [
        gathered_here + late_here for gathered_here, late_here in zip(gathered.forward, late.forward, strict=True)
    ]
    backward = [
        gathered_here + late_here for gathered_here, late_here in zip(gathered.backward, late.backward, strict=True)
    ]
    needs = [held + layer.forward.peak + extra for held, layer, extra in zip(before, layers, forward[1:], strict=False)]
    if stage.has_embedding:
        needs.append(embedding.forward.peak + forward[0])
        needs.append(profile.hidden_bytes + embedding.backward.peak + backward[0])
    if stage.has_head:
        needs.append(before[-1] + head.forward.peak + forward[-1])
        needs.append(kept.total + head.backward.peak + backward[-1])
    for held, layer, extra in zip(before[1:], layers, backward[1:-1], strict=True):
        needs.append(held + layer.backward.peak + extra)
    return max(needs)
