"""Memory and time of the head with its loss, over whole logits and in chunks of tokens, in one process.

    python tools/bench/chunked_loss.py [--vocab 32000] [--sequence 2048] [--hidden 1024] [--dtype float32] [--rounds 3]

Takes about two minutes on two idle cores, and leaves nothing behind. Measured is forward and backward of

- the head followed by `parallel_cross_entropy`: the whole logits at once;
- `linear_cross_entropy` with several chunk sizes: gradients made in the forward pass, nothing computed twice;
- the same chunks under activation checkpointing: logits computed again in the backward pass, the usual other way.

The memory is the largest sum of all tensors' bytes that lived at once, beyond input, weight and labels. Losses and
gradients of all variants are compared with the first one's. Times are CPU seconds, the best of the rounds.
"""

import argparse
import weakref
from collections.abc import Callable
from time import process_time
from typing import Any

import torch
from nxd_layers import ColumnParallelLinear, parallel_cross_entropy
from nxd_layers.chunked_loss import linear_cross_entropy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

LossOf = Callable[[Tensor], Tensor]


class PeakBytes(TorchDispatchMode):
    """Sums the bytes of all tensors made while it is on, for as long as each lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in tree_iter((args, kwargs)) if _is_tensor(tensor)}
        for tensor in tree_iter(result):
            if _is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known | self._seen:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0:
            return
        self._seen.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.now -= size


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    head = ColumnParallelLinear(options.hidden, options.vocab, bias=False, gather_output=False, dtype=dtype)
    hidden = torch.randn(options.sequence, options.hidden, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, options.vocab, (options.sequence,))
    sizes = f"vocabulary {options.vocab}, {options.sequence} tokens, hidden {options.hidden}, {options.dtype}"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {sizes}")
    print(f"{'':42}{'peak memory':>14}{'CPU time':>10}{'error':>10}")

    reference: list[Tensor] = []
    for name, loss_of in variants(head, labels):
        with PeakBytes() as memory:
            results = run(loss_of, hidden, head)
        seconds = min(timed(loss_of, hidden, head) for _ in range(options.rounds))
        reference = reference or results
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(results, reference, strict=True))
        print(f"{name:42}{memory.peak / 2**20:10.0f} MiB{seconds:8.2f} s{error:10.1e}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("vocab", 32000), ("sequence", 2048), ("hidden", 1024), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=size, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    return parser.parse_args()


def variants(head: ColumnParallelLinear, labels: Tensor) -> list[tuple[str, LossOf]]:
    """What is compared; the first one is the reference."""

    def whole(hidden: Tensor) -> Tensor:
        return parallel_cross_entropy(head(hidden), labels).mean()

    def chunked(chunk_size: int) -> LossOf:
        return lambda hidden: linear_cross_entropy(hidden, head, labels, chunk_size=chunk_size)

    def recomputed(chunk_size: int) -> LossOf:
        def loss_of_chunk(rows: Tensor, their_labels: Tensor) -> Tensor:
            return parallel_cross_entropy(head(rows), their_labels).sum()

        def loss_of(hidden: Tensor) -> Tensor:
            parts = zip(hidden.split(chunk_size), labels.split(chunk_size), strict=True)
            losses = [checkpoint(loss_of_chunk, *part, use_reentrant=False) for part in parts]
            return torch.stack(losses).sum() / labels.numel()

        return loss_of

    return [
        ("whole logits", whole),
        *((f"linear_cross_entropy, chunks of {size}", chunked(size)) for size in (128, 256, 512, 1024)),
        *((f"checkpointed chunks of {size}", recomputed(size)) for size in (256, 1024)),
    ]


def run(loss_of: LossOf, hidden: Tensor, head: ColumnParallelLinear) -> list[Tensor]:
    """Loss and gradients."""
    loss = loss_of(hidden)
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, head.weight])]


def timed(loss_of: LossOf, hidden: Tensor, head: ColumnParallelLinear) -> float:
    began = process_time()
    run(loss_of, hidden, head)
    return process_time() - began


if __name__ == "__main__":
    main()
