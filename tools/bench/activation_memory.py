"""Counts the memory that a Llama's activations take with each form of activation checkpointing.

    python tools/bench/activation_memory.py

Takes about a minute on two cores, and leaves nothing behind. Nothing is timed: the bytes of all tensors that a
forward and backward makes are counted as they come and go, on rank 0, parameters left out; so the numbers are the
same everywhere. "kept" is what lives between forward and backward, "peak" the most that lives at any time, gradients
of parameters included, and "collectives" is how many the step makes.
"""

import sys
from dataclasses import dataclass

import torch
from layer_bench.collective_traffic import CollectiveTraffic
from layer_bench.ranks import on_ranks
from layer_bench.tensor_bytes import TensorBytes
from nxd_engine.models import LlamaForCausalLM
from nxd_layers.activation_checkpoint import CheckpointConfig, Keep, apply_activation_checkpointing, matmul_outputs
from nxd_state import active_group
from processes.over_gloo import over_gloo
from torch import nn
from training_step.report import print_row
from training_step.sizes import LARGE, Size

MODES: dict[str, tuple[CheckpointConfig, Keep | None]] = {
    "none": (None, None),
    "CoreAttention": ("CoreAttention", None),
    "full, matmul outputs kept": ("full", matmul_outputs),
    "full": ("full", None),
}


@dataclass(frozen=True)
class ActivationMemory:
    """Of one forward and backward, on one rank."""

    kept: int
    peak: int
    collectives: int


def measure(size: Size, sequence_parallel: bool) -> dict[str, ActivationMemory]:
    """Bytes by form of checkpointing; of those forms that the model has modules for."""
    model = LlamaForCausalLM(size.config, sequence_parallel=sequence_parallel)
    return {name: measure_mode(model, size, name) for name in MODES if has_modules_for(model, name)}


def has_modules_for(model: nn.Module, mode: str) -> bool:
    config, _ = MODES[mode]
    return config in (None, "full") or any(type(module).__name__ == config for module in model.modules())


def measure_mode(model: nn.Module, size: Size, mode: str) -> ActivationMemory:
    config, keep = MODES[mode]
    apply_activation_checkpointing(model, config, keep=keep)
    model.zero_grad()
    input_ids, labels = size.tokens()
    with over_gloo(), CollectiveTraffic(active_group("tp").size) as traffic, TensorBytes() as memory:
        loss = model(input_ids, labels)
        kept = memory.now
        loss.backward()
    return ActivationMemory(kept, memory.peak, traffic.number.total())


def main() -> int:
    print(f"torch {torch.__version__}, Llama: {LARGE}")
    for tensor_parallel, sequence_parallel in [(1, False), (2, False), (2, True)]:
        found, *_ = on_ranks(tensor_parallel, measure, LARGE, sequence_parallel)
        print_row(
            f"\nTP {tensor_parallel}{', sequence parallel' if sequence_parallel else ''}",
            "kept MB",
            "of none",
            "peak MB",
            "of none",
            "collectives",
            width=12,
        )
        for mode, of_mode in found.items():
            print_row(
                mode,
                f"{of_mode.kept / 1e6:.1f}",
                f"{of_mode.kept / found['none'].kept:.2f}",
                f"{of_mode.peak / 1e6:.1f}",
                f"{of_mode.peak / found['none'].peak:.2f}",
                f"{of_mode.collectives}",
                width=12,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
