"""Times the optimizer's part of a data-parallel step with Muon beside AdamW and torch's Muon on every replica.

    python tools/bench/muon.py [--rounds 11]

Takes about two minutes, needs 3 GB, and leaves nothing behind. Timed is all that follows backward
(gradients averaged, update, weights gathered) of a plain Llama on two replicas with one thread each:

- AdamW and Muon with ZeRO-1, where each matrix is orthogonalized by one replica;
- AdamW, torch's Muon, and our Muon, each on every replica, after `GradientReducer` has averaged the gradients.

Times are medians over rounds in which each variant has its turn; ratios are medians of each round's ratio. The weights
after the first steps of the three kinds of Muon are checked to be equal.
"""

import argparse
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from nxd_engine.models import LlamaConfig
from nxd_optim import GradientReducer, Muon, NeuronZero1Optimizer, muon_parameter_groups
from nxd_state import destroy_model_parallel, initialize_model_parallel
from processes.rank_processes import RankProcesses, in_turns
from processes.surroundings import print_surroundings
from torch import nn
from training_step.plain_llama import PlainLlama
from training_step.sizes import Size

WARM_UP, REPLICAS, LEARNING_RATE = 2, 2, 1e-3
SIZE = Size(  # small, because products in bfloat16 are slow on most CPUs
    LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    ),
    batch=4,
    sequence=256,
)
Step = Callable[[], object]


def replicated(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Step:
    reducer = GradientReducer(model.parameters())

    def step() -> None:
        reducer.finish()
        for optimizer in optimizers:
            optimizer.step()
        reducer.zero_grad()

    return step


def adamw_zero1(model: nn.Module) -> Step:
    return NeuronZero1Optimizer(
        model.parameters(), torch.optim.AdamW, grad_clipping=False, lr=LEARNING_RATE, fused=True
    ).step


def muon_zero1(model: nn.Module) -> Step:
    groups = muon_parameter_groups(model)
    return NeuronZero1Optimizer(
        groups,
        Muon,
        grad_clipping=False,
        bucket_cap_mb_reduce_scatter=1,  # several buckets, as of a model of real size: each rank has a part of each
        lr=LEARNING_RATE,
        fused=True,
    ).step


def adamw_replicated(model: nn.Module) -> Step:
    return replicated(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True))


def muon_replicated(model: nn.Module) -> Step:
    return replicated(model, Muon(muon_parameter_groups(model), lr=LEARNING_RATE, fused=True))


def torch_muon_replicated(model: nn.Module) -> Step:
    matrices, *others = muon_parameter_groups(model)
    return replicated(
        model,
        torch.optim.Muon(matrices["params"], lr=LEARNING_RATE, weight_decay=matrices["weight_decay"]),
        torch.optim.AdamW(others, lr=LEARNING_RATE, fused=True),
    )


OURS, TORCHS, ADAMW = "Muon, ZeRO-1", "torch's Muon, replicated", "AdamW, ZeRO-1"
VARIANTS: dict[str, Callable[[nn.Module], Step]] = {
    ADAMW: adamw_zero1,
    OURS: muon_zero1,
    "AdamW, replicated": adamw_replicated,
    "Muon, replicated": muon_replicated,
    TORCHS: torch_muon_replicated,
}
MUONS = [OURS, "Muon, replicated", TORCHS]


class Team(RankProcesses):
    """Two processes that update the model by one variant, each waiting at a pipe until it is told to take steps."""

    def __init__(self, variant: str) -> None:
        super().__init__(REPLICAS, _serve, variant)
        self._variant = variant

    def steps(self, count: int) -> list[float]:
        """Seconds of some steps, each of its slower rank."""
        return [max(of_ranks) for of_ranks in zip(*self._ask(count), strict=True)]

    def weights(self) -> float:
        """The sum of the absolute weights."""
        value: float = self._ask(0)[0]
        return value

    def _ask(self, count: int) -> list[Any]:
        return self.request(count, f"at {self._variant!r}")


def _serve(variant: str, rank: int, store: Path, connection: Connection) -> None:
    """Take the steps that the parent asks for, until it hangs up; for none, send the sum of the weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=REPLICAS)
    initialize_model_parallel()
    torch.manual_seed(0)
    model = PlainLlama(SIZE.config)
    step = VARIANTS[variant](model)
    generator = torch.Generator().manual_seed(rank)
    while True:
        try:
            count = connection.recv()
        except EOFError:
            break
        times = []
        for _ in range(count):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            dist.barrier()
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        connection.send(times or sum(p.detach().double().abs().sum().item() for p in model.parameters()))
    destroy_model_parallel()
    dist.destroy_process_group()


def compare_times(rounds: int) -> None:
    """Steps of all variants in turn, as a table."""
    teams = {name: Team(name) for name in VARIANTS}
    try:
        for team in teams.values():
            team.steps(WARM_UP)
        check_weights({name: teams[name].weights() for name in MUONS})
        times: dict[str, list[float]] = {name: [] for name in teams}
        for name in in_turns(list(teams), rounds):
            times[name] += teams[name].steps(1)
    finally:
        for team in teams.values():
            team.__exit__(None, None, None)
    print(f"\nLlama: {SIZE}; updated on {REPLICAS} replicas")
    print_row("ms after backward", "median", "fastest", "/ AdamW, ZeRO-1", "/ torch's Muon")
    for name, found in times.items():
        numbers = (f"{median(found) * 1e3:.1f}", f"{min(found) * 1e3:.1f}")
        print_row(name, *numbers, f"{ratio(found, times[ADAMW]):.3f}", f"{ratio(found, times[TORCHS]):.3f}")
    value = ratio(times[OURS], times[TORCHS])
    print(f"{OURS} by {TORCHS}: {value:.3f}, target at most 1.0: {'met' if value <= 1.0 else 'missed'}")


def check_weights(sums: dict[str, float]) -> None:
    """Raise a RuntimeError unless all kinds of Muon have made the same weights."""
    expected = sums[TORCHS]
    if any(abs(value - expected) > 1e-6 * expected for value in sums.values()):
        raise RuntimeError(f"the sums of the weights differ: {sums}")


def ratio(times: list[float], others: list[float]) -> float:
    """Median over the rounds of one's time by the other's: both had the machine at the same moment."""
    return median(a / b for a, b in zip(times, others, strict=True))


def print_row(label: str, *cells: str) -> None:
    print(f"{label:28}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="turns of each variant (default: %(default)s)")
    options = parser.parse_args()
    print_surroundings(options.rounds)
    compare_times(options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
