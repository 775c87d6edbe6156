"""Computes each pipeline rank's memory, by kind, from a profile of the model's parts and the schedule's order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nxd_pipeline import Schedule
from nxd_pipeline.schedules.verification import ActivationSize, peak_in_flight

from nxd_plan.layout import Layout
from nxd_plan.profile import Profile
from nxd_plan.stages import StageParts

FLOAT32_BYTES = 4
MOMENTS = 2  # AdamW's
MESSAGES_IN_FLIGHT = 2  # in flight per stage


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank: the maximum of each kind, and the peak of the total.

    Attributes:
        parameters: parameters of this rank's stages.
        gradients: gradients of all these parameters, in the dtype they are accumulated in.
        optimizer_state: both moments of AdamW, and master weights; with ZeRO-1 this replica's shard.
        buckets: buffers for gradients on their way to the other replicas, and for messages between stages.
        activations: activations kept from forward to backward, over all microbatches in flight, without the head's.
        logits: tensors kept by norm, head and loss, over all microbatches in flight.
        temporaries: further memory that forward or backward of one part of the model needs.
        peak: the maximum at any time. At most the sum of the others, whose maxima need not coincide.
    """

    parameters: int
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
        return self.parameters + self.gradients + self.optimizer_state + self.buckets


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
    kept = [_Kept.of(stage, profile) for stage in stages]
    in_flight = peak_in_flight(schedule, [ActivationSize(it.total, it.until_weights) for it in kept])
    logits_in_flight = peak_in_flight(schedule, [ActivationSize(it.head, it.head) for it in kept])
    memories = []
    for rank in range(schedule.num_ranks):
        own = schedule.stages_of(rank)
        memories.append(
            _rank_memory(
                layout,
                [stages[stage] for stage in own],
                [kept[stage] for stage in own],
                profile,
                in_flight[rank],
                logits_in_flight[rank],
                itemsize,
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
        total = before + layers + head
        return cls(before, layers, head, total, total + products)


def _rank_memory(
    layout: Layout,
    stages: Sequence[StageParts],
    kept: Sequence[_Kept],
    profile: Profile,
    in_flight: int,
    logits: int,
    itemsize: int,
) -> RankMemory:
    elements = sum(stage.elements for stage in stages)
    replicas = layout.degrees.replicas
    parameters = elements * itemsize
    wide = max(itemsize, FLOAT32_BYTES)
    gradient_itemsize = wide if layout.degrees.zero_stage else itemsize
    gradients = elements * gradient_itemsize
    if layout.degrees.zero_stage:
        experts = sum(stage.experts for stage in stages)
        of_others, of_experts = (
            (elements - experts) * wide // replicas,
            experts * wide // layout.degrees.expert_replicas,
        )
        own = of_others + of_experts
        masters = own if wide != itemsize else 0
        state = MOMENTS * own + masters
        buckets = (of_others if replicas > 1 else 0) + (of_experts if layout.degrees.expert_replicas > 1 else 0)
    else:
        state = MOMENTS * parameters
        buckets = 0  # the gradients themselves are in the buckets
    if layout.degrees.pp > 1:
        buckets += len(stages) * MESSAGES_IN_FLIGHT * profile.embedding.forward.kept
    # The first microbatch's gradients are allocated one by one while activations are freed, unless buffers exist.
    come_late = layout.num_microbatches == 1 and (layout.degrees.zero_stage or replicas == 1)
    peaks = [
        _above_states(stage, own, profile, gradient_itemsize if come_late else 0)
        for stage, own in zip(stages, kept, strict=True)
    ]
    current = max(peak - own.total for peak, own in zip(peaks, kept, strict=True)) - (gradients if come_late else 0)
    update = 2 * max(stage.largest for stage in stages) * wide
    states = parameters + gradients + state + buckets
    return RankMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=state,
        buckets=buckets,
        activations=in_flight - logits,
        logits=logits,
        temporaries=max(0, current),
        peak=states + max(in_flight + current, update),
    )


def _above_states(stage: StageParts, kept: _Kept, profile: Profile, late_gradient_itemsize: int) -> int:
    """Return the peak bytes of one microbatch on a stage that does nothing else.

    Args:
        stage: the stage that runs the microbatch.
        kept: the bytes that the microbatch keeps.
        profile: the profile of the model's parts.
        late_gradient_itemsize: bytes per gradient element allocated during backward; 0 if allocated before.
    """
    head, embedding = profile.head, profile.embedding
    layers = [profile.layers[kind] for kind in stage.layers]
    before = [kept.before_layers, *(kept.before_layers + sum_ for sum_ in accumulate(it.forward.kept for it in layers))]
    needs = [held + layer.forward.peak for held, layer in zip(before, layers, strict=False)]
    if stage.has_embedding:
        needs.append(embedding.forward.peak)
        made = stage.elements * late_gradient_itemsize
        needs.append(profile.hidden_bytes + embedding.backward.peak + made)
    if stage.has_head:
        needs.append(before[-1] + head.forward.peak)
        made = stage.head_elements * late_gradient_itemsize
        needs.append(kept.total + head.backward.peak + made)
    made = stage.head_elements * late_gradient_itemsize
    for held, layer, elements in zip(before[:0:-1], reversed(layers), reversed(stage.layer_elements), strict=True):
        made += elements * late_gradient_itemsize
        needs.append(held + layer.backward.peak + made)
    return max(needs)
