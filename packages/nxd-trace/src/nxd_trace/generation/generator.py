"""`Generator`: prompts in, tokens out; and `compile_generator`, which makes the programs that it runs."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from nxd_trace.caching import TraceContent
from nxd_trace.generation.decoder import BuildCachedDecoder, Decoder
from nxd_trace.generation.engine import GenerationEngine
from nxd_trace.generation.sampling import SamplingSettings
from nxd_trace.generation.sequence import FinishReason, RunningSequence
from nxd_trace.model import TensorParallelModel
from nxd_trace.parallel_model import ModelBuilder
from nxd_trace.weights import LogicalTensor, Weights, WeightSource, as_source

OnToken = Callable[[int, int], None]


@dataclass(frozen=True)
class Completion:
    """The tokens generated after one prompt.

    Attributes:
        tokens: the new ones; a stop token, if one ended it, is the last.
        finish_reason: "stop" after a stop token, "length" after the most tokens asked for.
    """

    tokens: list[int]
    finish_reason: FinishReason


class Generator:
    """Continues prompts with a model that was compiled for generation.

    Prompts of any number and lengths share the batch: one joins as soon as another is done. Calls of several threads
    run one after the other. `close`, or leaving a `with` block, ends the workers.

    Example:
        with compile_generator(build, batch_size=4, max_length=256, tp_degree=2) as generator:
            first, second = generator.generate([[1, 2, 3], [4]], max_new_tokens=64)

    Args:
        model: made by `compile_generator`, whose `model` can be saved, or loaded by `parallel_model_load`.
        draft: another, of a smaller model of the same vocabulary with the same sizes. It guesses tokens, several of
            which the model then checks at a time. Texts are the same as without it; only those of the likeliest tokens
            (`temperature=0`) are written faster.

    Attributes:
        model: the programs, with the weights and the cache.
        draft: the programs of the draft model.
        engine: the batch.

    Raises:
        ValueError: a model was not made for generation, or they do not fit each other.
    """

    def __init__(self, model: TensorParallelModel, draft: TensorParallelModel | None = None) -> None:
        self.model = model
        self.draft = draft
        self.engine = GenerationEngine(model, draft)
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread in `generate`

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        on_token: OnToken | None = None,
        **settings: Any,
    ) -> list[Completion]:
        """Continue each prompt.

        Args:
            prompts: token ids of each, at least one, in lists, tensors or arrays; from padded ones by `unpad_prompts`.
            on_token: called with the prompt's number and each token, as soon as it is chosen.
            **settings: as for `SamplingSettings`. Prompt `i` draws with `seed + i`.

        Returns:
            One per prompt, in their order.

        Raises:
            TypeError: prompts that are no sequences of token ids.
            ValueError: an empty prompt, one without room for the new tokens, an id outside the vocabulary, or a setting
                outside its range.
            RuntimeError: `on_token` calls this.
            WorkerError: a worker failed, or the model is closed.
        """
        if self._caller == threading.get_ident():
            raise RuntimeError(
                "on_token called generate() of its own generator, which is still running; call it after on_token has "
                "returned"
            )
        sampling = SamplingSettings(**settings)
        checked = [self.engine.check(prompt, sampling) for prompt in prompts]
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
        self, prompts: Sequence[list[int]], sampling: SamplingSettings, on_token: OnToken | None
    ) -> list[Completion]:
        waiting = deque(enumerate(prompts))
        numbers: dict[RunningSequence, int] = {}
        while waiting or not self.engine.is_idle:
            while waiting and self.engine.num_free:
                number, prompt = waiting.popleft()
                numbers[self.engine.add(prompt, sampling.of_prompt(number))] = number
            for sequence in self.engine.step():
                if sequence.failure is not None:
                    raise sequence.failure
                if on_token is not None:
                    for token in sequence.tokens[-sequence.num_new :]:
                        on_token(numbers[sequence], token)
        return [_completion(sequence) for sequence in numbers]  # in the order they joined

    def close(self) -> None:
        """End the worker processes."""
        self.model.close()
        if self.draft is not None:
            self.draft.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def compile_generator(
    build: Callable[[], Decoder],
    *,
    batch_size: int,
    max_length: int,
    prefill_lengths: Sequence[int] = (),
    num_speculative_tokens: int = 0,
    tp_degree: int = 1,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    weights: Weights | None = None,
    content: TraceContent | None = None,
    **settings: Any,
) -> Generator:
    """Trace and compile the programs that feed prompts and single tokens to a model.

    Args:
        build: called in each worker, gives the decoder: `HuggingFaceDecoder(parallelize(model))`, or your own.
        batch_size: sequences at a time. There is a program for 1, 2, 4, 8, ... of them, so that few do not cost as much
            as many.
        max_length: maximum length of a prompt and what is written after it, in tokens; the cache has room for
            `batch_size` such.
        prefill_lengths: prompt tokens at a time, one program each; a part of a prompt takes the smallest that holds it.
            If empty a quarter of `max_length`, at most 128, and 16 where that is more than 32, and 64 where it is 128.
        num_speculative_tokens: guesses of a draft model that are checked at a time, for each sequence; for the draft
            model itself 1.
        tp_degree: ranks of each replica.
        context_parallel_size: replicas that read a prompt together, each an equal part of its tokens; single tokens are
            computed by all of them. There are `tp_degree * context_parallel_size` ranks, each with a whole cache of its
            heads.
        expert_parallel_size: ranks that the experts of a mixture are divided among: equal parts of the replicas, if
            they are enough, and otherwise any of the ranks, which then have whole experts. `build` splits them:
            `parallelize(model, expert_parallel=True)`.
        weights: for a model on the meta device, by the unsharded model's names, as for `parallel_model_trace`.
        content: description of the model that `build` makes. A generator of equal content, sizes and settings made
            before on this machine is used again: only the weights are read. Needs `weights`.
        **settings: as for `parallel_model_trace`: compiler, compiler_args, compiler_workdir, cache_dir,
            inline_weights_to_neff, max_parallel_compilations, progress.

    Raises:
        As `parallel_model_trace`; ValueError for sizes that are not positive or do not fit each other.
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
    # So that the shapes of the programs tell the length.
    block_size = max(size for size in range(1, _LARGEST_BLOCK + 1) if max_length % size == 0)
    table = max_length // block_size
    decoder = BuildCachedDecoder(build, 1 + batch_size * table, block_size, max_length)
    builder = ModelBuilder(
        decoder, tp_degree, replicas=context_parallel_size, expert_parallel_size=expert_parallel_size
    )
    for length in lengths:
        builder.trace(_example(1, length, table), tag=f"prefill_{length}")
    rows = batch_size * (1 + num_speculative_tokens)
    for size in sorted({*(1 << power for power in range(rows.bit_length())), batch_size, rows}):
        builder.trace(_example(size, 1, table), tag=f"decode_{size}")
    if weights is None:
        return Generator(builder.compile(**settings))
    if content is not None:
        cache = {"num_blocks": decoder.num_blocks, "block_size": block_size, "max_length": max_length}
        content = replace(content, made_of={"decoder": content.made_of, "cache": cache})
    with as_source(weights) as source:
        return Generator(builder.compile(weights=_OfInnerModel(source), content=content, **settings))


_LARGEST_BLOCK = 16  # tokens; the size of vLLM's


def _default_lengths(max_length: int, context_parallel_size: int) -> set[int]:
    longest = min(128, max(2, max_length // 4))
    lengths = {longest, *(length for length, least in ((16, 33), (64, 128)) if longest >= least)}
    return {length + -length % context_parallel_size for length in lengths}


@dataclass(frozen=True)
class _OfInnerModel:
    """Weights under the names that they have in the traced module, which holds the model that they are of."""

    source: WeightSource
    prefix: str = "decoder.model."

    @property
    def tensors(self) -> Mapping[str, LogicalTensor]:
        return {self.prefix + name: tensor for name, tensor in self.source.tensors.items()}

    def read_box(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        return self.source.read_box(name.removeprefix(self.prefix), offsets, shape)


def _example(batch_size: int, length: int, table: int) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.arange(length).expand(batch_size, length).contiguous()
    return torch.zeros_like(positions), positions, torch.zeros(batch_size, table, dtype=torch.long)


def _completion(sequence: RunningSequence) -> Completion:
    assert sequence.finish_reason is not None
    return Completion(sequence.tokens, sequence.finish_reason)
