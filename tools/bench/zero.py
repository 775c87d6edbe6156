"""Times and weighs a data-parallel training step at each ZeRO stage beside torch's own ways.

    python tools/bench/zero.py [--rounds 11] [--profile] [--without-memory]

Takes about eight minutes on two idle cores, needs 8 GB, and leaves nothing behind. Measured is a step of a plain Llama
with AdamW, on two replicas with one thread each, all in turn:

- the floor: two processes that compute at the same time and communicate nothing;
- ours at stage 1, without and with parameters that arrive during the next forward, at stage 2, and at stage 3 with
  parameters that are given up after each forward, or kept until the step;
- DistributedDataParallel with AdamW, with torch's ZeroRedundancyOptimizer, and FSDP2 (`fully_shard`), which also keeps
  parameters or gives them up.

The bytes that a rank of ours sends in a step are counted by the transport. Of torch's ways only time and memory are
measured; DDP sends twice the gradients, FSDP2 the parameters twice and the gradients once.

All start from the same weights, and the losses are checked to be equal. Times are medians over rounds in which each
variant has its turn; ratios are medians of each round's ratio. Memory is the highest resident set of fresh processes,
above what they had with the model alone built; and, for a model of 100 million parameters at DP 1, 2 and 4, what the
optimizer's states add to the memory of each process, beside theory.
"""

import argparse
import ctypes
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import nxd_optim
import torch
import torch.distributed as dist
from nxd_engine.models import LlamaConfig
from nxd_optim.zero import NeuronZero1Optimizer
from nxd_state import count_traffic, destroy_model_parallel, initialize_model_parallel
from processes.rank_processes import RankProcesses, in_turns
from processes.surroundings import print_surroundings
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training_step.plain_llama import PlainLlama
from training_step.sizes import LARGE

WARM_UP = 3
REPLICAS = 2
LEARNING_RATE = 1e-3
HUNDRED_MILLION = LlamaConfig(
    vocab_size=16000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=11,
    num_attention_heads=12,
    num_key_value_heads=12,
)


@dataclass(frozen=True)
class Trainee:
    """A model in training: what is called, what updates it, and the context of its backward."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[], AbstractContextManager[object]] = nullcontext


def build_alone(model: nn.Module) -> Trainee:
    return Trainee(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True))


def build_ddp(model: nn.Module) -> Trainee:
    return build_alone(DistributedDataParallel(model, gradient_as_bucket_view=True))


def build_ddp_zero(model: nn.Module) -> Trainee:
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE, fused=True
    )
    return Trainee(parallel, optimizer)


def build_fsdp(model: nn.Module, *, reshard: bool = True) -> Trainee:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    return build_alone(model)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [block for layer in model.modules() if isinstance(layer, nn.ModuleList) for block in layer]


def build_ours(model: nn.Module) -> Trainee:
    optimizer = NeuronZero1Optimizer(
        model.parameters(), torch.optim.AdamW, grad_clipping=False, lr=LEARNING_RATE, fused=True
    )
    return Trainee(model, optimizer, optimizer.overlap_backward)


def build_ours_with_sharded_gradients(model: nn.Module) -> Trainee:
    optimizer = NeuronZero1Optimizer(
        model.parameters(), torch.optim.AdamW, grad_clipping=False, shard_gradients=True, lr=LEARNING_RATE, fused=True
    )
    return Trainee(model, optimizer, partial(optimizer.each_backward, list(model.parameters())))


def build_ours_fully_sharded(model: nn.Module, *, reshard: bool = True) -> Trainee:
    nxd_optim.fully_shard([model], blocks_of(model), reshard_after_forward=reshard)
    return build_ours_with_sharded_gradients(model)


def build_ours_overlapping_forward(model: nn.Module) -> Trainee:
    trainee = build_ours(model)
    assert isinstance(trainee.optimizer, NeuronZero1Optimizer)
    trainee.optimizer.overlap_forward(model)
    return trainee


FLOOR = "compute alone"
VARIANTS: dict[str, Callable[[nn.Module], Trainee]] = {
    FLOOR: build_alone,
    "ours, ZeRO-1": build_ours,
    "ours, ZeRO-1, overlapping forward": build_ours_overlapping_forward,
    "ours, ZeRO-2": build_ours_with_sharded_gradients,
    "ours, ZeRO-3": build_ours_fully_sharded,
    "ours, ZeRO-3, kept until the step": partial(build_ours_fully_sharded, reshard=False),
    "DDP + AdamW": build_ddp,
    "DDP + torch's ZeroRedundancyOptimizer": build_ddp_zero,
    "FSDP2": build_fsdp,
    "FSDP2, kept until the step": partial(build_fsdp, reshard=False),
}
# Of ours and the way of torch that shards the same, the highest ratio of their times that is wanted.
TARGETS = (
    ("ours, ZeRO-1", "DDP + AdamW", 1.0),
    ("ours, ZeRO-1", "DDP + torch's ZeroRedundancyOptimizer", 1.0),
    ("ours, ZeRO-2", "DDP + torch's ZeroRedundancyOptimizer", 1.0),
    ("ours, ZeRO-3", "FSDP2", 1.0),
    ("ours, ZeRO-3, kept until the step", "FSDP2, kept until the step", 1.0),
    ("ours, ZeRO-3", "ours, ZeRO-1", 1.15),
)
OURS = [name for name in VARIANTS if name.startswith("ours")]
TORCHS = [name for name in VARIANTS if name not in (FLOOR, *OURS)]


@dataclass(frozen=True)
class Measurement:
    """One step on one rank: its loss, seconds by phase, and bytes that our transports sent."""

    loss: float
    forward: float
    backward: float
    optimizer: float
    sent: int = 0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.forward + self.backward + self.optimizer


def take_step(trainee: Trainee, tokens: tuple[Tensor, Tensor]) -> Measurement:
    with count_traffic() as traffic:
        start = time.perf_counter()
        loss = trainee.model(*tokens)
        after_forward = time.perf_counter()
        with trainee.backward():
            loss.backward()
        after_backward = time.perf_counter()
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()
        end = time.perf_counter()
    seconds = after_forward - start, after_backward - after_forward, end - after_backward
    return Measurement(loss.item(), *seconds, sent=sum(it.sent_bytes for it in traffic.values()))


def resident_bytes(field: str) -> int:
    """A field of this process's status: VmRSS (now), VmHWM (at most so far), RssAnon (its own)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory can be measured on Linux only")


class Team(RankProcesses):
    """Two processes that train one variant, each waiting at a pipe until it is told to take steps."""

    def __init__(self, variant: str) -> None:
        super().__init__(REPLICAS, _serve, variant)
        self._variant = variant

    def steps(self, count: int) -> list[Measurement]:
        """Some steps: each with the times of its slowest rank and the mean loss."""
        slowest = []
        for of_ranks in zip(*self._call(count), strict=True):
            loss = sum(step.loss for step in of_ranks) / REPLICAS
            slowest.append(replace(max(of_ranks, key=lambda step: step.total), loss=loss))
        return slowest

    def memory(self) -> int:
        """The highest resident set so far, above that of the process with the model alone, of the larger rank."""
        return max(self._call(None))

    def _call(self, request: int | None) -> list[Any]:
        """The answers of all ranks: to a number, as many steps; to None, bytes."""
        return self.request(request, f"at {self._variant!r}")


def _serve(variant: str, rank: int, store: Path, connection: Connection) -> None:
    """Train a variant as the parent says, until it hangs up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=REPLICAS)
    initialize_model_parallel()
    torch.manual_seed(0)
    model = PlainLlama(LARGE.config)
    input_ids, labels = LARGE.tokens()
    mine = slice(rank, None, REPLICAS)
    gc.collect()
    baseline = resident_bytes("VmRSS")
    trainee = VARIANTS[variant](model)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            break
        if request is None:
            connection.send(resident_bytes("VmHWM") - baseline)
        else:
            connection.send([take_step(trainee, (input_ids[mine], labels[mine])) for _ in range(request)])
    destroy_model_parallel()
    dist.destroy_process_group()


def compare_times(rounds: int, *, with_profile: bool) -> None:
    """Steps of all variants in turn, as a table."""
    teams = {name: Team(name) for name in VARIANTS}
    try:
        first_steps = {name: team.steps(WARM_UP) for name, team in teams.items()}
        check_losses(first_steps)
        times: dict[str, list[Measurement]] = {name: [] for name in teams}
        for name in in_turns(list(teams), rounds):
            times[name] += teams[name].steps(1)
    finally:
        for team in teams.values():
            team.__exit__(None, None, None)
    best = min(TORCHS, key=lambda name: median(step.total for step in times[name]))
    print(f"\nLlama: {LARGE}, of which each of {REPLICAS} replicas has a part")
    print_row("ms per step", "median", "fastest", "/ floor", "/ torch's best", "MB sent")
    for name, steps in times.items():
        totals = [step.total for step in steps]
        print_row(
            name,
            f"{median(totals) * 1e3:.1f}",
            f"{min(totals) * 1e3:.1f}",
            f"{ratio(steps, times[FLOOR]):.3f}",
            f"{ratio(steps, times[best]):.3f}",
            f"{steps[-1].sent / 1e6:.1f}" if name in OURS else "",
        )
    for name, peer, most in TARGETS:
        value = ratio(times[name], times[peer])
        print(f"{name} by {peer}: {value:.3f}, target at most {most}: {'met' if value <= most else 'missed'}")
    if with_profile:
        print()
        print_row("ms per phase, medians", "forward", "backward", "optimizer")
        for name, steps in times.items():
            phases = zip(*([step.forward, step.backward, step.optimizer] for step in steps), strict=True)
            print_row(name, *(f"{median(phase) * 1e3:.1f}" for phase in phases))


def ratio(steps: list[Measurement], others: list[Measurement]) -> float:
    """Median over the rounds of one's time by the other's: both had the machine at the same moment."""
    return median(a.total / b.total for a, b in zip(steps, others, strict=True))


def check_losses(steps: dict[str, list[Measurement]]) -> None:
    """Raise a RuntimeError unless all variants that communicate have computed the same."""
    expected = [step.loss for step in steps[OURS[0]]]
    for name in (*OURS, *TORCHS):
        found = [step.loss for step in steps[name]]
        if any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(found, expected, strict=True)):
            raise RuntimeError(f"losses of {name!r} {found} differ from ours {expected}")


def compare_memory() -> None:
    """Highest memory of each variant in fresh processes, as a table."""
    print()
    print_row("MB above the model's, highest so far", "of a rank")
    peaks = {}
    for name in (*OURS, *TORCHS):
        with Team(name) as team:
            team.steps(WARM_UP)
            peaks[name] = team.memory()
        print_row(name, f"{peaks[name] / 1e6:.0f}")
    for name, peer, _ in TARGETS[:-1]:
        value = peaks[name] / peaks[peer]
        print(f"{name} by {peer}: {value:.3f}, target at most 1.0: {'met' if value <= 1.0 else 'missed'}")


def compare_state() -> None:
    """Optimizer state of a rank with 100 million parameters, as its process's memory shows it, beside theory."""
    print()
    print_row("MB of AdamW state, 100M parameters", "of a rank", "theory", "ratio")
    spawn = multiprocessing.get_context("spawn")
    for replicas in (1, 2, 4):
        with TemporaryDirectory() as folder:
            answers: multiprocessing.SimpleQueue[tuple[int, int]] = spawn.SimpleQueue()
            store = Path(folder) / "store"
            processes = [
                spawn.Process(target=_measure_state, args=(rank, replicas, store, answers)) for rank in range(replicas)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                raise RuntimeError("a rank failed; see its traceback above")
            measured, theory = max(answers.get() for _ in processes)
        ratio = measured / theory
        met = "met" if abs(ratio - 1) <= 0.02 else "missed"
        print_row(f"DP {replicas}", f"{measured / 1e6:.1f}", f"{theory / 1e6:.1f}", f"{ratio:.4f}")
        print(f"DP {replicas}: {ratio:.4f} of theory, target within 2%: {met}")


def _measure_state(
    rank: int, replicas: int, store: Path, answers: "multiprocessing.SimpleQueue[tuple[int, int]]"
) -> None:
    """Bytes that the first step adds for good, and what they should be."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=replicas)
    initialize_model_parallel()
    torch.manual_seed(0)
    model = PlainLlama(HUNDRED_MILLION)
    optimizer = build_ours(model).optimizer
    optimizer.step()  # of no gradients: connects the ranks
    before = trimmed_bytes()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    elements = sum(parameter.numel() for parameter in model.parameters())
    answers.put((trimmed_bytes() - before, 2 * 4 * elements // replicas))
    destroy_model_parallel()
    dist.destroy_process_group()


def trimmed_bytes() -> int:
    """Memory of this process, after what is free has gone back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_bytes("RssAnon")


def print_row(label: str, *cells: str) -> None:
    print(f"{label:42}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="also say where the time goes")
    parser.add_argument("--without-memory", action="store_true", help="times only")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    print_surroundings(options.rounds)
    compare_times(options.rounds, with_profile=options.profile)
    if not options.without_memory:
        compare_memory()
        compare_state()
    return 0


if __name__ == "__main__":
    sys.exit(main())
