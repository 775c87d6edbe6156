"""Continuous batching: sequences join and leave the batch while others continue.

A step processes the next chunks of new prompts, up to a number of tokens, and one token of every other sequence. So
several short prompts join at once, and a long one delays the others by at most one chunk. Prompts reuse cached blocks
of equal prefixes. With a draft model, greedy sequences verify several proposed tokens per step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nxd_trace.generation.cache import BlockPool
from nxd_trace.generation.model_runner import DecodeRow, Drafter, ModelRunner
from nxd_trace.generation.prompt_inputs import PromptInputs
from nxd_trace.generation.sampling import SamplingSettings
from nxd_trace.generation.sequence import RunningSequence, read_prompt
from nxd_trace.model import TensorParallelModel
from nxd_trace.weights import LogicalTensor, WeightSource

_CHUNKS_PER_STEP = 2  # of the largest prefill; more of smaller ones, up to the same number of tokens


@dataclass(frozen=True)
class InnerModelWeights:
    """Weights of a decoder's model under their names in the traced module."""

    source: WeightSource
    prefix: str = "decoder.model."

    @property
    def tensors(self) -> Mapping[str, LogicalTensor]:
        """The logical tensors, by name."""
        return {self.prefix + name: tensor for name, tensor in self.source.tensors.items()}

    def read_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box of this shape at `offsets`."""
        return self.source.read_box(name.removeprefix(self.prefix), offsets, shape)


class GenerationEngine:
    """Steps a batch of sequences. Not thread-safe.

    Args:
        model: a model from `compile_generator`, or one loaded again.
        draft: a smaller model with the same vocabulary, compiled with the same sizes, which proposes tokens.

    Attributes:
        batch_size: maximum number of running sequences.
        max_length: maximum length of a prompt and its continuation.
        vocab_size: size of the vocabulary.

    Raises:
        ValueError: a model was not compiled for generation, or the draft does not match the model.
    """

    def __init__(self, model: TensorParallelModel, draft: TensorParallelModel | None = None) -> None:
        self._runner = ModelRunner(model)
        self._drafter = None if draft is None else Drafter(ModelRunner(draft), self._runner)
        self._models = [model] if draft is None else [model, draft]
        self.batch_size = self._runner.batch_size
        self.max_length = self._runner.max_length
        self.vocab_size = self._runner.vocab_size
        self._block_size = self._runner.block_size
        self._forget_all()

    @property
    def num_free(self) -> int:
        """Number of sequences that can join."""
        return self.batch_size - len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is running."""
        return not self._running

    @property
    def num_draft_tokens(self) -> tuple[int, int]:
        """Numbers of tokens that the draft model has proposed, and that the model has accepted."""
        return (0, 0) if self._drafter is None else (self._drafter.num_proposed, self._drafter.num_accepted)

    def check(self, prompt: Any, settings: SamplingSettings, inputs: PromptInputs | None = None) -> list[int]:
        """Return the prompt's token ids, which may be passed as any sequence, tensor or array.

        Args:
            prompt: token ids.
            settings: sampling settings.
            inputs: the prompt's inputs beside its token ids, for a model that was compiled with `input_shapes`.

        Raises:
            TypeError: the prompt is not a sequence of integers.
            ValueError: the prompt is empty or too long for the new tokens, or the prompt or `logit_bias` has a token
                outside the vocabulary; or the model does not take the inputs.
        """
        ids = read_prompt(prompt, self.vocab_size)
        if len(ids) + settings.max_new_tokens > self.max_length:
            raise ValueError(
                f"{len(ids)} prompt tokens and max_new_tokens={settings.max_new_tokens} are more than the "
                f"max_length={self.max_length} that the model was compiled with; request "
                f"{max(0, self.max_length - len(ids))} or fewer, or compile it with a larger max_length"
            )
        outside = [token for token, _ in settings.logit_bias if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"logit_bias is for token {outside[0]}, outside the vocabulary 0..{self.vocab_size - 1}")
        if inputs is not None:
            self._runner.check_inputs(inputs, len(ids))
            if settings.prompt_logprobs:
                raise ValueError("a prompt with features cannot be scored; leave out prompt_logprobs")
        return ids

    def add(
        self,
        prompt: Any,
        settings: SamplingSettings,
        cache_salt: bytes = b"",
        inputs: PromptInputs | None = None,
    ) -> RunningSequence:
        """Add a prompt to the batch.

        Args:
            prompt: token ids.
            settings: sampling settings.
            cache_salt: prompts share cached prefixes only under the same salt.
            inputs: as for `check`.

        Raises:
            TypeError: as `check`.
            ValueError: as `check`; or the batch is full.
        """
        ids = self.check(prompt, settings, inputs)
        if not self.num_free:
            raise ValueError(f"all {self.batch_size} rows of the batch are taken; step until one is free")
        sequence = RunningSequence(settings, ids, self._block_size, cache_salt, inputs)
        self._running.append(sequence)
        return sequence

    def remove(self, sequence: RunningSequence) -> None:
        """Remove a sequence, if it is still running."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._pool.free(sequence.blocks)

    def step(self) -> list[RunningSequence]:
        """Process chunks of prompts and tokens of all other sequences. Finished and failed sequences leave the batch.

        Returns:
            The sequences that got tokens or failed; not those whose prompt continues in the next step.

        Raises:
            WorkerError: a worker failed; call `clear` before the next step.
            FloatingPointError: the logits, and so the cache, contain NaNs; call `clear` before the next step.
        """
        decoding = [sequence for sequence in self._running if sequence.is_decoding]
        prefilling = [sequence for sequence in self._running if not sequence.is_decoding]
        for sequence in self._running:
            sequence.num_new = 0
        return self._prefill(prefilling) + (self._decode(decoding) if decoding else [])

    def _allocate_blocks(self, sequence: RunningSequence) -> None:
        """Allocate all blocks that the sequence may need, starting with cached blocks of its prefix."""
        if sequence.blocks:
            return
        if not sequence.settings.prompt_logprobs:
            # The prompt's last token is always processed, for the logits after it.
            sequence.blocks = self._pool.get_cached(sequence.block_hashes.up_to(len(sequence.prompt) - 1))
        num_cached = len(sequence.blocks) * self._block_size
        sequence.num_computed = sequence.num_draft_computed = sequence.num_cached = num_cached
        needed = -(-(len(sequence.prompt) + sequence.settings.max_new_tokens) // self._block_size)
        sequence.blocks += self._pool.allocate(needed - len(sequence.blocks))

    def _prefill(self, sequences: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Process chunks of prompts, each to its end before the next one, which may share its blocks."""
        extended = []
        room = _CHUNKS_PER_STEP * self._runner.prefill_lengths[-1]
        for sequence in sequences:
            while room > 0 and not sequence.is_decoding:
                self._allocate_blocks(sequence)
                start, pending = sequence.num_computed, sequence.pending
                room -= self._runner.prefill_length(len(pending), start, sequence.inputs)
                number, logits = self._runner.prefill(pending, start, sequence.blocks, sequence.inputs)
                if self._drafter is not None:
                    self._drafter.prefill(pending[:number], start, sequence.blocks)
                sequence.num_computed += number
                sequence.num_draft_computed = sequence.num_computed
                if self._take_logits(sequence, logits):
                    extended.append(sequence)
        return extended

    def _decode(self, sequences: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Process the next token of each sequence, and the tokens that the draft model proposes after it."""
        for sequence in sequences:
            self._allocate_blocks(sequence)
        proposals: list[list[int]] = [[] for _ in sequences]
        if self._drafter is not None:
            proposals = self._drafter.propose(sequences)
        rows: list[DecodeRow] = []
        starts = []
        for sequence, proposed in zip(sequences, proposals, strict=True):
            starts.append(len(rows))
            tokens = [sequence.pending[0], *proposed]
            rows += [
                DecodeRow(token, position, sequence.blocks, sequence.rotary_offset)
                for position, token in enumerate(tokens, sequence.num_computed)
            ]
        logits = self._runner.decode(rows)
        extended = []
        for sequence, proposed, start in zip(sequences, proposals, starts, strict=True):
            sequence.num_computed += 1
            is_extended = self._take_logits(sequence, logits[start])
            number = 0
            while number < len(proposed) and sequence in self._running and sequence.tokens[-1] == proposed[number]:
                number += 1
                sequence.num_computed += 1
                self._take_logits(sequence, logits[start + number])
            if self._drafter is not None:
                self._drafter.accept(sequence, proposed, number)
            extended += [sequence] if is_extended else []
        return extended

    def _take_logits(self, sequence: RunningSequence, logits: Tensor) -> bool:
        """Pass a sequence its logits; returns whether it got a token or failed."""
        try:
            is_extended = sequence.take_logits(logits)
        except FloatingPointError:
            raise
        except Exception as error:
            sequence.failure = error
            is_extended = True
        hashes = sequence.block_hashes.up_to(sequence.num_computed)
        for index in range(sequence.num_cached_blocks, len(hashes)):
            self._pool.cache_full(sequence.blocks[index], hashes[index])
        sequence.num_cached_blocks = len(hashes)
        if sequence.finish_reason is not None or sequence.failure is not None:
            self.remove(sequence)
        return is_extended

    def clear(self) -> None:
        """Drop all sequences and empty the cache, to start over after an error."""
        self._forget_all()
        for model in self._models:
            if model.worker_pids:
                model.reset_state()

    def check_replaceable(self) -> None:
        """Raise ValueError if the model's weights cannot be replaced, because they are part of its programs."""
        self._models[0].check_replaceable()

    def replace_weights(self, weights: WeightSource) -> None:
        """Replace the model's weights and empty the cache, while no sequence is running. A draft model keeps its own.

        Raises:
            ValueError: sequences are running, or the weights do not match; the model keeps its weights.
            WorkerError: a worker failed; `restart` starts workers with the weights from before.
            OSError: a disk is full; as after a `WorkerError`.
        """
        if self._running:
            raise ValueError(f"{len(self._running)} sequences are running; step until none is, or clear() first")
        self._models[0].replace_weights(InnerModelWeights(weights))
        self._forget_all()

    def check_workers(self) -> None:
        """Check that the workers are alive, while there is nothing to step.

        Raises:
            WorkerError: a worker has exited or is stopped.
        """
        for model in self._models:
            model.check_workers()

    def restart(self) -> None:
        """Drop all sequences, and start new workers from the model's folder.

        Raises:
            ModelFolderError: the folder has changed or is gone.
            WorkerError: a worker could not load its shard.
        """
        self._forget_all()
        for model in self._models:
            model.restart()

    def _forget_all(self) -> None:
        self._running: list[RunningSequence] = []
        self._pool = BlockPool(self._runner.num_blocks)
