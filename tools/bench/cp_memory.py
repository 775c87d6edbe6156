"""Measures the memory that a long sequence takes on each context-parallel rank, forward and backward.

    python tools/bench/cp_memory.py [--lengths 8192 16384 32768 65536] [--ranks 1 2 4]
    python tools/bench/cp_memory.py --lengths 65536 262144 1048576 --ranks 4 --recompute --document 8192

One sequence goes through a small Llama in float32. "kept" are the bytes between forward and backward, "peak" the most
that live at any time, both without parameters, on rank 0, counted as tensors come and go: they are the same on every
machine. With `--recompute` layers keep their inputs only and MLPs go tile by tile, as one would train such sequences;
the loss is made from some tokens' logits at a time anyhow. The work of attention grows with the square of the length,
or of that of the documents that are packed in it.
"""

import argparse
import sys
import time
from dataclasses import dataclass

import torch
from layer_bench.ranks import on_ranks
from layer_bench.tensor_bytes import TensorBytes
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_layers import linear_cross_entropy
from nxd_layers.activation_checkpoint import apply_activation_checkpointing, tile_modules
from nxd_state import get_group
from torch import Tensor
from training_step.report import print_row

MEBI = 1 << 20
POSITIONS_OF_A_TILE = 2048


@dataclass(frozen=True)
class Sequence:
    """What is measured.

    Attributes:
        length: positions.
        document: positions of each document in it; 0 for one only.
        recompute: layers keep their inputs only, and MLPs are tiled.
        hidden: size of the model.
        layers: of the model.
    """

    length: int
    document: int
    recompute: bool
    hidden: int
    layers: int

    @property
    def config(self) -> LlamaConfig:
        """Of the model."""
        return LlamaConfig(
            vocab_size=4096,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            num_key_value_heads=1,
            max_position_embeddings=self.length,
        )

    def document_ids(self) -> Tensor | None:
        """`[1, length]`."""
        return torch.arange(self.length).div(self.document, rounding_mode="floor")[None] if self.document else None


@dataclass(frozen=True)
class Measured:
    """Of one rank: bytes, and seconds of forward and backward."""

    kept: int
    peak: int
    seconds: float
    loss: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536], help="positions")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="context-parallel degrees")
    parser.add_argument("--document", type=int, default=0, help="positions of each packed document (default: one)")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing and tiled MLPs")
    parser.add_argument("--hidden", type=int, default=128, help="size of hidden states (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    options = parser.parse_args()
    title = f"torch {torch.__version__}, hidden {options.hidden}, {options.layers} layers, float32"
    print_row(title, "CP", "kept MiB", "of CP 1", "peak MiB", "of CP 1", "B/position", "loss", "seconds")
    for length in options.lengths:
        sequence = Sequence(length, options.document, options.recompute, options.hidden, options.layers)
        of_one: Measured | None = None
        for ranks in options.ranks:
            found = on_ranks(1, measure, sequence, context_parallel=ranks)[0]
            of_one = found if ranks == 1 else of_one
            print_row(
                f"{length} positions",
                str(ranks),
                f"{found.kept / MEBI:.1f}",
                share(found.kept, of_one.kept if of_one else None, ranks),
                f"{found.peak / MEBI:.1f}",
                share(found.peak, of_one.peak if of_one else None, ranks),
                f"{found.peak * ranks / length:.0f}",
                f"{found.loss:.5f}",
                f"{found.seconds:.1f}",
            )
    return 0


def share(found: int, of_one: int | None, ranks: int) -> str:
    """How many times a rank's share of what one rank alone has."""
    return "" if of_one is None else f"{ranks * found / of_one:.2f}/{ranks}"


def measure(sequence: Sequence) -> Measured:
    """A forward and backward of one sequence on this rank."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(sequence.config)
    if sequence.recompute:
        tile_modules(model, "LlamaMLP", num_tiles=max(1, sequence.length // POSITIONS_OF_A_TILE), sequence_dim=0)
        apply_activation_checkpointing(model)
    tokens = torch.randint(4096, (1, sequence.length + 1), generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    with TensorBytes() as memory:
        loss = loss_of(model, tokens[:, :-1], tokens[:, 1:], sequence.document_ids())
        kept = memory.now
        loss.backward()
    return Measured(kept, memory.peak, time.perf_counter() - start, loss.item())


def loss_of(model: LlamaForCausalLM, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None) -> Tensor:
    """In chunks of tokens on one rank, too, so that there is the same to compare."""
    if get_group("cp").size > 1:
        loss: Tensor = model(input_ids, labels, document_ids=document_ids)
        return loss
    return linear_cross_entropy(model.model(input_ids, None, document_ids), model.lm_head, labels.t())


if __name__ == "__main__":
    sys.exit(main())
