"""Measures what nxd-parity costs: time and memory of recorded steps beside plain ones, and of a comparison.

    python tools/bench/parity.py [--only step|billion] [--rounds 3] [--folder FOLDER]

Takes about four minutes on two idle cores, 10 GB of memory, and 25 GB of a disk, which it frees at the end.

- step: an 80M-parameter Llama of transformers trains with AdamW, float32, as it is and recorded, in turns in one
  process; a ratio is the median of the rounds' ratios. All that a recording does counts, over the 3 steps that
  `nxd-parity run` records by default. Beside it is `safetensors.save_file` with as many bytes: what the disk takes.
- billion: a 1B-parameter Llama of random bfloat16 weights makes one step with SGD, on one process and on two ranks
  with FSDP2, both are recorded, and the recordings are compared.
"""

import argparse
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from nxd_parity import compare, record
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from training_step.report import print_row, print_target

T = TypeVar("T")
STEPS = 3  # what `nxd-parity run` records by default
SMALL = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 12, "vocab_size": 16000}
BILLION = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 17, "vocab_size": 32000}


@dataclass(frozen=True)
class Turn:
    """Steps without and with a recording.

    Attributes:
        plain: seconds of a step.
        recorded: seconds of a recorded step.
        bytes: what a recorded step writes.
        saving: seconds in which safetensors writes as much.
    """

    plain: float
    recorded: float
    bytes: float
    saving: float


def main() -> int:
    options = parse_arguments()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.only in (None, "step"):
            print_step(Path(folder), options.rounds)
        if options.only in (None, "billion"):
            print_billion(Path(folder))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("step", "billion"), help="one of the two parts; both by default")
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of plain and recorded steps (default: %(default)s)"
    )
    parser.add_argument("--folder", help="where recordings go for a while; by default the folder for temporary files")
    return parser.parse_args()


def print_step(folder: Path, rounds: int) -> None:
    """A step of a small model, plain and recorded."""
    turns, _ = in_new_process(take_turns, folder, rounds)
    _, plain_memory = in_new_process(train_small, None)
    _, recorded_memory = in_new_process(train_small, folder / "memory")
    shutil.rmtree(folder / "memory")
    print_row("\nan 80M-parameter Llama, AdamW", "plain", "recorded", "added", width=14)
    plain, recorded = median(it.plain for it in turns), median(it.recorded for it in turns)
    print_row("seconds of a step", f"{plain:.2f}", f"{recorded:.2f}", f"{recorded - plain:.2f}", width=14)
    print_row(
        "peak memory, MB",
        *(f"{it / 1e6:.0f}" for it in (plain_memory, recorded_memory, recorded_memory - plain_memory)),
        width=14,
    )
    print_row("MB written for a step", "", f"{median(it.bytes for it in turns) / 1e6:.0f}", width=14)
    print_row("seconds to save as much with safetensors", "", f"{median(it.saving for it in turns):.2f}", width=14)
    print_target("a recorded step / a plain one", median(it.recorded / it.plain for it in turns), at_most=2.0)


def take_turns(folder: Path, rounds: int) -> list[Turn]:
    """Train in turns without and with a recording."""
    step = small_training()
    step()
    return [turn(step, folder / f"round-{number}") for number in range(rounds)]


def turn(step: Callable[[], None], folder: Path) -> Turn:
    def steps(recording: Path | None) -> None:
        with nullcontext() if recording is None else record(recording):
            for _ in range(STEPS):
                step()

    plain, seconds = seconds_of(partial(steps, None)), seconds_of(partial(steps, folder))
    written = bytes_in(folder)
    shutil.rmtree(folder)
    part = torch.ones(64 * 2**20 // 4)
    parts = int(written / STEPS / part.nbytes)
    folder.mkdir()
    saving = seconds_of(lambda: [save_file({"part": part}, folder / f"{number}") for number in range(parts)])
    shutil.rmtree(folder)
    return Turn(plain / STEPS, seconds / STEPS, written / STEPS, saving)


def train_small(folder: Path | None) -> None:
    step = small_training()
    with nullcontext() if folder is None else record(folder):
        for _ in range(STEPS):
            step()


def small_training() -> Callable[[], None]:
    """Return what makes a training step of the small model."""
    model = llama(SMALL, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = tokens_of(2, 128, SMALL["vocab_size"])

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def print_billion(folder: Path) -> None:
    """A step of a model of a billion parameters, recorded on one process and on two ranks, and compared."""
    print_row("\na 1B-parameter Llama, bfloat16, SGD, one step", "seconds", "peak MB", "GB written", width=14)
    (plain, plain_memory) = in_new_process(train_billion, None)
    print_row("one process, not recorded", f"{plain:.1f}", f"{plain_memory / 1e6:.0f}", width=14)
    total = 0.0
    for name, ranks in (("reference", 1), ("candidate", 2)):
        found = on_ranks(ranks, train_billion, folder / name)
        seconds, memory = max(it for it, _ in found), max(it for _, it in found)
        written = f"{bytes_in(folder / name) / 1e9:.1f}"
        print_row(f"recorded, ranks: {ranks}", f"{seconds:.1f}", f"{memory / 1e6:.0f}", written, width=14)
        total += seconds
    (seconds, result), memory = in_new_process(compare_both, folder)
    print_row(f"compared: {result}", f"{seconds:.1f}", f"{memory / 1e6:.0f}", width=14)
    print_target("minutes of recording and comparing", (total + seconds) / 60, at_most=3.0)


def train_billion(folder: Path | None) -> float:
    """Make one step, on this rank's half of the batch; returns its seconds, with those of the recording."""
    model = llama(BILLION, torch.bfloat16)
    tokens = tokens_of(2, 16, BILLION["vocab_size"])
    if dist.is_initialized():
        tokens = tokens.chunk(2)[dist.get_rank()]
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    with nullcontext() if folder is None else record(folder):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return time.perf_counter() - began


def compare_both(folder: Path) -> tuple[float, str]:
    began = time.perf_counter()
    report = compare(folder / "reference", folder / "candidate")
    result = f"{sum(report.agree.values())} tensors agree" if report.agrees else str(report.first)
    return time.perf_counter() - began, result


def llama(sizes: dict[str, int], dtype: torch.dtype) -> Any:
    """Return a Llama of transformers with random weights, equal in each process."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    heads = sizes["hidden_size"] // 64
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads, use_cache=False, dtype=dtype)
    with default_dtype(dtype):
        return LlamaForCausalLM(config)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tokens_of(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))


def seconds_of(function: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def bytes_in(folder: Path) -> int:
    return sum(it.stat().st_size for it in folder.rglob("*") if it.is_file())


def in_new_process(function: Callable[..., T], *arguments: Any) -> tuple[T, int]:
    """Return what a function returns in a process of its own, and the peak of that process' memory in bytes."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_peak, partial(function, *arguments)).result()


def on_ranks(ranks: int, function: Callable[..., T], *arguments: Any) -> list[tuple[T, int]]:
    """Return the same for each rank; one rank has no process group."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as store, ProcessPoolExecutor(ranks, mp_context=spawn) as pool:
        calls = [
            pool.submit(_on_rank, rank, ranks, f"{store}/store", partial(function, *arguments)) for rank in range(ranks)
        ]
        return [call.result() for call in calls]


def _on_rank(rank: int, ranks: int, store: str, call: Callable[[], T]) -> tuple[T, int]:
    if ranks == 1:
        return _with_peak(call)
    torch.set_num_threads(max(torch.get_num_threads() // ranks, 1))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        return _with_peak(call)
    finally:
        dist.destroy_process_group()


def _with_peak(call: Callable[[], T]) -> tuple[T, int]:
    result = call()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return result, int(peak) * 1024


if __name__ == "__main__":
    sys.exit(main())
