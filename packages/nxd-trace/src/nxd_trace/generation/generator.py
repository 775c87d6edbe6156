"""`compile_generator`, which compiles a language model for generation, and the `Generator` that runs it."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from nxd_trace.caching import TraceContent
from nxd_trace.generation.decoder import BuildCachedDecoder, Decoder
from nxd_trace.generation.engine import GenerationEngine, InnerModelWeights
from nxd_trace.generation.prompt_inputs import PromptInputs, PromptInputShapes
from nxd_trace.generation.sampling import SamplingSettings
from nxd_trace.generation.sequence import FinishReason, RunningSequence
from nxd_trace.model import TensorParallelModel
from nxd_trace.parallel_model import ModelBuilder
from nxd_trace.weights import Weights, as_source

OnToken = Callable[[int, int], None]


@dataclass(frozen=True)
class Completion:
    """The tokens generated after one prompt.

    Attributes:
        tokens: the new tokens, including the stop token that ended the text, if any.
        finish_reason: "stop" after a stop token, "length" after `max_new_tokens`.
    """

    tokens: list[int]
    finish_reason: FinishReason


class Generator:
    """Continues prompts with a model that was compiled for generation.

    Prompts of any number and lengths share the batch: one joins as soon as another finishes. Calls from several threads
    run one after the other. `close`, or leaving a `with` block, ends the workers.

    Example:
        with compile_generator(build, batch_size=4, max_length=256, tp_degree=2) as generator:
            first, second = generator.generate([[1, 2, 3], [4]], max_new_tokens=64)

    Args:
        model: the `model` of a generator from `compile_generator`, or that model loaded by `parallel_model_load`.
        draft: a smaller model with the same vocabulary and sizes. It proposes tokens, several of which the model
            verifies at once. Texts are the same as without it; only greedy ones (`temperature=0`) become faster.

    Attributes:
        engine: the batch.

    Raises:
        ValueError: a model was not compiled for generation, or the models do not match.
    """

    def __init__(self, model: TensorParallelModel, draft: TensorParallelModel | None = None) -> None:
        self.model = model
        self.draft = draft
        self.engine = GenerationEngine(model, draft)
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread that runs `generate`

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        inputs: Sequence[PromptInputs | None] | None = None,
        on_token: OnToken | None = None,
        **settings: Any,
    ) -> list[Completion]:
        """Continue each prompt.

        Args:
            prompts: token ids of each prompt, in lists, tensors or arrays; `unpad_prompts` makes them from padded ones.
            inputs: each prompt's inputs beside its token ids, for a model that was compiled with `input_shapes`.
            on_token: function called with the prompt's index and each token, as soon as it is chosen.
            **settings: fields of `SamplingSettings`. Prompt `i` is sampled with `seed + i`.

        Returns:
            One completion per prompt, in order.

        Raises:
            TypeError: a prompt is not a sequence of token ids.
            ValueError: a prompt is empty, too long for the new tokens, or has an id outside the vocabulary; or a
                setting is out of range.
            RuntimeError: `on_token` called this method.
            WorkerError: a worker failed, or the model is closed.
        """
        if self._caller == threading.get_ident():
            raise RuntimeError(
                "on_token called generate() of its own generator, which is still running; call it after on_token has "
                "returned"
            )
        sampling = SamplingSettings(**settings)
        inputs = [None] * len(prompts) if inputs is None else inputs
        checked = [
            (self.engine.check(prompt, sampling, given), given) for prompt, given in zip(prompts, inputs, strict=True)
        ]
        with self._lock:
            self._caller = threading.get_ident()
            try:
                return self._generate(checked, sampling, on_token)
            except BaseException:
                self.engine.clear()
                raise
            finally:
                self._caller = None

    def _generate(
        self,
        prompts: Sequence[tuple[list[int], PromptInputs | None]],
        sampling: SamplingSettings,
        on_token: OnToken | None,
    ) -> list[Completion]:
        waiting = deque(enumerate(prompts))
        numbers: dict[RunningSequence, int] = {}
        while waiting or not self.engine.is_idle:
            while waiting and self.engine.num_free:
                number, (prompt, inputs) = waiting.popleft()
                numbers[self.engine.add(prompt, sampling.for_prompt(number), inputs=inputs)] = number
            for sequence in self.engine.step():
                if sequence.failure is not None:
                    raise sequence.failure
                if on_token is not None:
                    for token in sequence.tokens[-sequence.num_new :]:
                        on_token(numbers[sequence], token)
        completions = []
        for sequence in numbers:  # in the order in which they joined
            assert sequence.finish_reason is not None
            completions.append(Completion(sequence.tokens, sequence.finish_reason))
        return completions

    def close(self) -> None:
        """End the worker processes."""
        self.model.close()
        if self.draft is not None:
            self.draft.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compile_generator(
    build: Callable[[], Decoder],
    *,
    batch_size: int,
    max_length: int,
    prefill_lengths: Sequence[int] = (),
    num_speculative_tokens: int = 0,
    input_shapes: PromptInputShapes | None = None,
    tp_degree: int = 1,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    weights: Weights | None = None,
    content: TraceContent | None = None,
    **settings: Any,
) -> Generator:
    """Trace and compile a language model's prefill and decode programs.

    Args:
        build: function called in each worker that returns the decoder: `HuggingFaceDecoder(parallelize(model))`, or
            your own.
        batch_size: maximum number of sequences at a time. There are programs for 1, 2, 4, 8, ... sequences, so a few do
            not cost as much as a full batch.
        max_length: maximum length of a prompt and its continuation; the cache has room for `batch_size` of this length.
        prefill_lengths: number of prompt tokens of each prefill program; a chunk of a prompt uses the smallest program
            that fits. By default a quarter of `max_length`, at most 128; also 16 if that is more than 32, and 64 if it
            is 128.
        num_speculative_tokens: number of a draft model's tokens verified at once per sequence; 1 for the draft itself.
        input_shapes: what the model takes beside token ids, as the decoder that `build` makes expects it. There is one
            more program then, for the chunks of a prompt with features.
        tp_degree: number of ranks per replica.
        context_parallel_size: number of replicas that process a prompt together, each an equal part of its tokens;
            every replica computes single tokens. There are `tp_degree * context_parallel_size` ranks, each with a
            complete cache of its heads.
        expert_parallel_size: number of ranks that split the experts of a mixture: ranks with equal shards if there are
            enough replicas, otherwise any ranks, which then hold whole experts. `build` splits them:
            `parallelize(model, expert_parallel=True)`.
        weights: weights for a model on the meta device, as for `parallel_model_trace`.
        content: description of the model that `build` makes. An earlier generator with equal content, sizes and
            settings is reused: only weights are read. Needs `weights`.
        **settings: arguments of `parallel_model_trace`: compiler, compiler_args, compiler_workdir, cache_dir,
            inline_weights_to_neff, max_parallel_compilations, progress.

    Raises:
        As `parallel_model_trace`; ValueError if the sizes are not positive or do not match.
    """
    if context_parallel_size < 1:
        raise ValueError(f"context_parallel_size={context_parallel_size} must be 1 or more")
    lengths = sorted(set(prefill_lengths) or _default_lengths(max_length, context_parallel_size))
    if num_speculative_tokens < 0:
        raise ValueError(f"num_speculative_tokens={num_speculative_tokens} must be 0 (no draft model) or more")
    if batch_size < 1 or max_length < 2 or lengths[0] < 2 or lengths[-1] > max_length:
        raise ValueError(
            f"batch_size={batch_size} must be 1 or more, max_length={max_length} 2 or more, and each of "
            f"prefill_lengths={list(prefill_lengths)} between 2 and max_length"
        )
    uneven = [length for length in lengths if length % context_parallel_size]
    if uneven:
        raise ValueError(
            f"prefill_lengths={lengths} must be multiples of context_parallel_size={context_parallel_size}, so that "
            f"each rank reads an equal part; {uneven[0]} is not"
        )
    # A divisor of max_length, so that the programs' shapes determine it.
    block_size = max(size for size in range(1, _MAX_BLOCK_SIZE + 1) if max_length % size == 0)
    table = max_length // block_size
    decoder = BuildCachedDecoder(build, 1 + batch_size * table, block_size, max_length)
    builder = ModelBuilder(
        decoder, tp_degree, replicas=context_parallel_size, expert_parallel_size=expert_parallel_size
    )
    for length in lengths:
        builder.trace(_example(1, length, table, input_shapes), tag=f"prefill_{length}")
    if input_shapes is not None:
        longest = input_shapes.longest_span or max_length
        length = max(lengths[-1], longest + -longest % context_parallel_size)
        builder.trace(_example(1, length, table, input_shapes, with_features=True), tag=f"features_{length}")
    rows = batch_size * (1 + num_speculative_tokens)
    for size in sorted({*(1 << power for power in range(rows.bit_length())), batch_size, rows}):
        builder.trace(_example(size, 1, table, input_shapes), tag=f"decode_{size}")
    if weights is None:
        return Generator(builder.compile(**settings))
    if content is not None:
        cache = {"num_blocks": decoder.num_blocks, "block_size": block_size, "max_length": max_length}
        content = replace(content, made_of={"decoder": content.made_of, "cache": cache})
    with as_source(weights) as source:
        return Generator(builder.compile(weights=InnerModelWeights(source), content=content, **settings))


_MAX_BLOCK_SIZE = 16  # tokens, as vLLM's default


def _default_lengths(max_length: int, context_parallel_size: int) -> set[int]:
    longest = min(128, max(2, max_length // 4))
    lengths = {longest, *(length for length, least in ((16, 33), (64, 128)) if longest >= least)}
    return {length + -length % context_parallel_size for length in lengths}


def _example(
    batch_size: int, length: int, table: int, shapes: PromptInputShapes | None, *, with_features: bool = False
) -> tuple[Any, ...]:
    positions = torch.arange(length).expand(batch_size, length).contiguous()
    inputs = {} if shapes is None else shapes.example(batch_size, length, with_features=with_features)
    tables = torch.zeros(batch_size, table, dtype=torch.long)
    return (torch.zeros_like(positions), positions, tables, *([inputs] if inputs else []))
