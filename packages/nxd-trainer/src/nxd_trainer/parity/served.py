"""Compares a model as it is served with its plain forward: traced programs, caches and batches against one pass.

`nxd generate --compiled` and `nxd serve` run the same engine, on a model that nxd-trace has traced. It continues a few
prompts greedily; the log-probabilities of its tokens are compared with those that the model, run as it is and without
a cache, gives after the same texts.
"""

import shutil
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from nxd_engine.checkpoints.model_description import BYTES
from nxd_engine.hugging_face import text_config
from nxd_parity import Report, events, record
from nxd_parity import compare as compare_recordings
from nxd_state import get_device
from nxd_trace.generation import Generator, RunningSequence, SamplingSettings
from torch import Tensor, nn

from nxd_trainer.compiled_generation import open_for_compilation
from nxd_trainer.generate import load_opened
from nxd_trainer.opened_model import open_model

TOLERANCE = 1e-4  # in float32
MOST_TOKENS = 4096  # whose log-probabilities are compared: the most likely ones
BATCH_SIZE, MAX_LENGTH, NEW_TOKENS = 2, 64, 8


def compare_served(
    folder: Path | str, *, tp_degree: int = 1, rtol: float | None = None, compiler: str | None = None
) -> Report:
    """Continue prompts by the model as it is served, and compare each token with the model's plain forward, in float32.

    A step of the report is a token after the prompts, from 1: the first is computed from the prompts, the others from
    the cache. There are three prompts for two places in the batch, and the shorter ones begin like the longest.

    Args:
        folder: a Hugging Face folder, or that of a run or its checkpoints.
        tp_degree: workers that share the weights.
        rtol: tolerance, relative to a token's largest log-probability; 1e-4 by default.
        compiler: "inductor" or "export"; by default the one available here.

    Raises:
        ValueError: the model cannot be compiled, or not for this many workers.
        nxd_ckpt.CheckpointError: the checkpoint is damaged.
        nxd_trace.WorkerError: a worker failed.
    """
    checkpoint = replace(open_for_compilation(folder, tokenizer=BYTES), dtype=torch.float32)  # prompts are no text
    length = min(MAX_LENGTH, checkpoint.max_positions)
    if length <= 2 * NEW_TOKENS:
        raise ValueError(f"the model has {checkpoint.max_positions} positions; {2 * NEW_TOKENS + 1} are needed")
    vocabulary = text_config(checkpoint.description.config)["vocab_size"]
    drawn = torch.randint(vocabulary, (length - NEW_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    with checkpoint.compile(
        batch_size=BATCH_SIZE, max_length=length, tp_degree=tp_degree, compiler=compiler, progress=False
    ) as generator:
        texts = _continued(generator, [drawn[:1], drawn[: len(drawn) // 2], drawn])
    plain = load_opened(replace(open_model(folder), dtype=torch.float32))
    expected = [_plain(plain, it) for it in texts]
    found = [[_by_token(it.top) for it in text.logprobs] for text in texts]
    path = Path(tempfile.mkdtemp(prefix="nxd-parity-"))
    try:
        _record(path / "plain", [_values_at(*it) for it in zip(expected, found, strict=True)])
        _record(path / "served", [torch.tensor([list(it.values()) for it in text]) for text in found])
        report = compare_recordings(path / "plain", path / "served", rtol=TOLERANCE if rtol is None else rtol)
    finally:
        shutil.rmtree(path, ignore_errors=True)
    report.reference = f"its plain forward (float32, tolerance {TOLERANCE if rtol is None else rtol:g})"
    report.candidate, report.ranks = f"{folder} as it is served", tp_degree
    report.notes.append(
        f"step N is the N-th token after {len(texts)} prompts; compared are the log-probabilities of the "
        f"{len(found[0][0])} most likely tokens, since modules of traced programs cannot be seen"
    )
    return report


def _continued(generator: Generator, prompts: Sequence[list[int]]) -> list[RunningSequence]:
    """Continue prompts greedily, in one batch as far as there are places."""
    settings = SamplingSettings(max_new_tokens=NEW_TOKENS, num_logprobs=MOST_TOKENS)
    engine, waiting, texts = generator.engine, deque(prompts), []
    while waiting or not engine.is_idle:
        while waiting and engine.num_free:
            texts.append(engine.add(waiting.popleft(), settings))
        for text in engine.step():
            if text.failure is not None:
                raise text.failure
    return texts


@torch.no_grad()
def _plain(model: nn.Module, text: RunningSequence) -> Tensor:
    """Return the log-probabilities after a prompt and each token behind it but the last, `[tokens, vocab]`."""
    read = torch.tensor([text.all_tokens[:-1]], device=get_device())
    output = model(read)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits[0, len(text.prompt) - 1 :].cpu().double().log_softmax(-1)


def _by_token(top: Sequence[tuple[int, float]]) -> dict[int, float]:
    return dict(sorted(top))


def _values_at(logprobs: Tensor, tokens: Sequence[dict[int, float]]) -> Tensor:
    """Return the log-probabilities, `[tokens, vocab]`, of the tokens that another model found most likely."""
    return torch.stack([row[list(of_row)] for row, of_row in zip(logprobs, tokens, strict=True)])


def _record(folder: Path, of_texts: Sequence[Tensor]) -> None:
    """Record log-probabilities of texts, `[tokens, most likely]` each, as what a model returns in each step."""
    with record(folder, by_hand=True, alone=True) as recorder:
        for row in torch.stack([it.double() for it in of_texts], dim=1):
            recorder.tensor(events.ACTIVATION, "", row)
            recorder.end_step()
