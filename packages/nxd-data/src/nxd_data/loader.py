"""Batches of token ids for a data-parallel rank, in an order that does not depend on the layout.

All samples of a run form an endless stream: one shuffled epoch after another. A step takes the next
`global_batch_size` of them and splits them into microbatches, and each rank takes its slice of each microbatch. So
the position is a single number, the samples consumed, and a run can resume with other ranks or microbatches.

The shuffled order is a function of the position: a keyed permutation (a Feistel network with cycle walking) instead of
a shuffled array. It needs no memory, gives random access, and stays the same with every version of numpy and torch, so
that an old checkpoint resumes on the data it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nxd_data.image_processor import ImageProcessor
from nxd_data.sequences import NOT_LEARNED, SampleImage, Sequences

NUM_ROUNDS = 6  # of the shuffling network
MASK_64 = (1 << 64) - 1


class Batch(NamedTuple):
    """The tokens of one rank's microbatch; labels are the inputs shifted by one token.

    The mean loss over a step's tokens is the mean over all ranks' microbatches if each divides its sum of losses by
    the average number of learned tokens per microbatch: `normalizer[0] / normalizer[1]`.
    """

    input_ids: torch.Tensor  # [microbatch/dp, seq], int64
    labels: torch.Tensor  # [microbatch/dp, seq], int64; -100 for a token that is not learned
    position_ids: torch.Tensor  # [microbatch/dp, seq], int64; from 0 in each document that attends only to itself
    normalizer: torch.Tensor  # [2], int64: learned tokens of a step, and its microbatches over all ranks
    # Inputs for images by the model's names, absent if it has no images; types of tokens; and positions of several
    # dimensions. Of concatenated microbatches, all but the types of tokens are lists with a value per microbatch.
    images: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_token(self) -> torch.Tensor:
        """`[microbatch/dp, seq]`, bool: false for the padding after a row's documents, which has no labels."""
        document = (self.position_ids == 0).cumsum(1)
        is_last = document == document[:, -1:]
        has_learned = (is_last & (self.labels != -100)).any(dim=1, keepdim=True)
        return ~is_last | has_learned | (document <= 1)


class Slicer:
    """Slices a global batch into this rank's microbatches."""

    def __init__(
        self,
        global_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_size: int,
        image_processor: ImageProcessor | None = None,
    ):
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank={dp_rank} is not one of the {dp_size} data-parallel ranks")
        if global_batch_size < 1 or global_batch_size % (gradient_accumulation_steps * dp_size):
            raise ValueError(
                f"global_batch_size={global_batch_size} is not a multiple of gradient_accumulation_steps="
                f"{gradient_accumulation_steps} x data-parallel size {dp_size}"
            )
        self.global_batch_size = global_batch_size
        self._parts = gradient_accumulation_steps * dp_size
        self._shape = (gradient_accumulation_steps, dp_size, -1)
        self._dp_rank = dp_rank
        self._image_processor = image_processor

    def microbatches(
        self, sequences: Sequences, samples: NDArray[np.int64], averaged: NDArray[np.int64]
    ) -> list[Batch]:
        """Return this rank's part of samples `[global_batch_size]`, one batch per microbatch.

        The loss averages over the samples `averaged`: one or more global batches.
        """
        num_learned, _ = sequences.count(averaged)
        normalizer = torch.tensor([num_learned, len(averaged) // len(samples) * self._parts])
        batches = []
        for rank_samples in samples.reshape(self._shape)[:, self._dp_rank]:  # [microbatch/dp]
            rows = sequences.rows(rank_samples)
            images = self._images(sequences, rank_samples, *rows)
            inputs, labels, positions = map(torch.tensor, rows)
            batches.append(Batch(inputs, labels, positions, normalizer, images))
        return batches

    def _images(
        self,
        sequences: Sequences,
        samples: NDArray[np.int64],
        inputs: NDArray[np.int64],
        labels: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> dict[str, torch.Tensor]:
        """Open the images of samples `[count]`, and return `Batch.images`."""
        of_rows = sequences.images(samples)
        if self._image_processor is None:
            if any(of_rows):
                raise ValueError(
                    "the data have images, but the model takes none; use a vision-language model, with model.towers "
                    "other than left_out"
                )
            return {}
        found = self._image_processor.token_types(inputs, labels != NOT_LEARNED)
        found |= self._image_processor.image_inputs([_Opened(of_row) for of_row in of_rows], inputs)
        starts = [[image.start for image in of_row] for of_row in of_rows]
        return found | self._image_processor.positions(inputs, positions, starts, found)


class _Opened(Sequence[Any]):
    """Images that are decoded each time they are taken."""

    def __init__(self, images: Sequence[SampleImage]) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: Any) -> Any:
        return self._images[index].open()


class TrainLoader:
    """The endless training batches of one rank, step by step.

    Args:
        sequences: sequences to train on.
        global_batch_size: samples per step, over all ranks and microbatches.
        gradient_accumulation_steps: microbatches per step.
        dp_rank: this data-parallel rank.
        dp_size: number of data-parallel ranks.
        seed: seed of the order.
        image_processor: the processor of a model that takes images.

    Attributes:
        samples_consumed: samples of all steps taken so far, over all ranks and epochs.
        tokens_learned: labels among these that the loss has counted.
        tokens_seen: tokens read, without padding.

    Raises:
        ValueError: the batch is not divisible, or there are no sequences.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        global_batch_size: int,
        gradient_accumulation_steps: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        image_processor: ImageProcessor | None = None,
    ):
        if not len(sequences):
            raise ValueError("there are no sequences to train on; add text or lower data.held_out_fraction")
        self._slicer = Slicer(global_batch_size, gradient_accumulation_steps, dp_rank, dp_size, image_processor)
        self._sequences = sequences
        self._seed = seed
        self.samples_consumed = self.tokens_learned = self.tokens_seen = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self.samples_consumed // len(self._sequences)

    def next_step(self) -> list[Batch]:
        """Return this rank's microbatches of the next optimizer step, and advance by a global batch."""
        batches = next(self.steps_from(self.samples_consumed))
        self.pass_step()
        return batches

    def steps_from(self, position: int) -> Iterator[list[Batch]]:
        """Yield this rank's microbatches step by step from a position on, without changing the loader's own."""
        while True:
            samples = self._step_at(position)
            yield self._slicer.microbatches(self._sequences, samples, samples)
            position += len(samples)

    def pass_step(self) -> None:
        """Advance by a step whose batches were taken from `steps_from`."""
        learned, seen = self._sequences.count(self._step_at(self.samples_consumed))
        self.tokens_learned += learned
        self.tokens_seen += seen
        self.samples_consumed += self._slicer.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain numbers; the same on every rank."""
        return {
            "samples_consumed": self.samples_consumed,
            "tokens_learned": self.tokens_learned,
            "tokens_seen": self.tokens_seen,
            "seed": self._seed,
            "num_samples": len(self._sequences),
            "sequence_length": self._sequences.sequence_length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the samples that `state` has consumed, with this loader's layout.

        Raises:
            ValueError: the state has another order: other data, sequence length or seed.
        """
        keys = {"num_samples": "data", "sequence_length": "data.sequence_length", "seed": "train.seed"}
        check_position(self.state_dict(), state, keys)
        self.samples_consumed = state["samples_consumed"]
        all_tokens = self.samples_consumed * self._sequences.sequence_length  # for old checkpoints without these counts
        self.tokens_learned = state.get("tokens_learned", all_tokens)
        self.tokens_seen = state.get("tokens_seen", all_tokens)

    def _step_at(self, position: int) -> NDArray[np.int64]:
        """Return the samples of the step that starts at a position, `[global_batch_size]`."""
        return self._samples_at(np.arange(position, position + self._slicer.global_batch_size))

    def _samples_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at positions `[count]` of the endless stream."""
        num_samples = len(self._sequences)
        epochs, offsets = np.divmod(positions, num_samples)
        samples = np.empty_like(offsets)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            samples[here] = shuffled(offsets[here], num_samples, seed=self._seed, epoch=epoch)
        return samples


def check_position(own: Mapping[str, Any], stored: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Raise ValueError unless a loader's state and a checkpoint's have the same values, by name and recipe key."""
    differences = [
        f"{name}={own[name]}, but the checkpoint has {stored.get(name)} (from {key})"
        for name, key in keys.items()
        if stored.get(name) != own[name]
    ]
    if differences:
        raise ValueError(
            f"the run cannot resume its position in the data: {'; '.join(differences)}; restore these values, or start "
            "over in another output folder"
        )


class HeldOutLoader:
    """The same held-out batches at every evaluation, sliced like a training step.

    The samples are spread evenly over the held-out part and do not depend on the layout. If that part is smaller than
    `num_batches` global batches, fewer are used; if it is smaller than one, samples repeat; if it is empty, there are
    no batches.

    Args:
        sequences: held-out sequences.
        num_batches: global batches per evaluation.
        global_batch_size, gradient_accumulation_steps, dp_rank, dp_size, image_processor: as for `TrainLoader`.

    Raises:
        ValueError: the batch is not divisible.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        num_batches: int,
        global_batch_size: int,
        gradient_accumulation_steps: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        image_processor: ImageProcessor | None = None,
    ):
        self._slicer = Slicer(global_batch_size, gradient_accumulation_steps, dp_rank, dp_size, image_processor)
        self._sequences = sequences
        available = min(num_batches, max(1, len(sequences) // global_batch_size)) if len(sequences) else 0
        count = available * global_batch_size
        self._samples = np.arange(count) * len(sequences) // max(1, count)  # [available * global batch]
        self._accumulation = gradient_accumulation_steps

    def __len__(self) -> int:
        """Return the number of batches per iteration, the same on every rank."""
        return len(self._samples) // self._slicer.global_batch_size * self._accumulation

    def __iter__(self) -> Iterator[Batch]:
        for samples in self._samples.reshape(-1, self._slicer.global_batch_size):
            yield from self._slicer.microbatches(self._sequences, samples, self._samples)


def shuffled(positions: NDArray[np.int64], num_samples: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the samples `[count]` at positions `[count]` of a shuffled epoch of `num_samples`.

    Over all positions 0 .. num_samples - 1 each sample occurs exactly once; seed and epoch choose the order.
    """
    # Numbers are split into two halves of equal width, at least three bits each: narrower ones would mix badly.
    half_bits = max(3, ((num_samples - 1).bit_length() + 1) // 2)
    keys = [_mix(_mix(_mix(seed) ^ epoch) + round_number) for round_number in range(NUM_ROUNDS)]
    samples = _permute(positions.astype(np.uint64), half_bits, keys)
    while (outside := samples >= num_samples).any():
        samples[outside] = _permute(samples[outside], half_bits, keys)
    return samples.astype(np.int64)


def _permute(numbers: NDArray[np.uint64], half_bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """Permute 0 .. 4**half_bits - 1: each round changes one half by a function of the other."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix_array(right ^ np.uint64(key)) & mask)
    return (left << bits) | right


def _mix(number: int) -> int:
    """SplitMix64: a 64-bit hash in which every output bit depends on every input bit."""
    number = (number + 0x9E3779B97F4A7C15) & MASK_64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK_64
    return number ^ (number >> 31)


def _mix_array(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the last steps of `_mix` to each element; unsigned arrays wrap around on overflow."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
