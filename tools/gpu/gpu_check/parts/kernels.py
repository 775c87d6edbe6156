"""The kernels that a device chooses, forward and backward, beside the same sums written out on the CPU in float64."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from nxd_layers.context.attention_kernels import Scores, kernel_for
from nxd_layers.context.block_attention import attend_block, attend_block_backward
from nxd_layers.experts.linear import grouped_product
from nxd_state.device import has_grouped_product
from torch import Tensor

from gpu_check.rows import Row, check

BOUNDS = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-3}  # relative, in the norm of a tensor
BATCH, HEADS, KV_HEADS, LENGTH, HEAD = 2, 8, 2, 257, 64
TOKENS_OF_EXPERTS = [100, 0, 37, 375]
WIDTH, INNER = 128, 192


@dataclass(frozen=True)
class Block:
    """A block of attention: which queries read which keys, and the cap of its scores."""

    name: str
    causal: bool = False
    masked: bool = False
    softcap: float | None = None


BLOCKS = [Block("whole"), Block("causal", causal=True), Block("masked", masked=True), Block("capped", softcap=20.0)]


def rows(device: str) -> Iterator[Row]:
    """One row for each block of attention and dtype, and one for each dtype of grouped products."""
    for dtype, bound in BOUNDS.items():
        name = str(dtype).removeprefix("torch.")
        for block in BLOCKS:
            yield _attention(torch.device(device), block, dtype, name, bound)
        if has_grouped_product(dtype, device):
            yield check("kernels", f"grouped product {name}", _grouped_error(torch.device(device), dtype), bound)
        else:
            yield Row(
                "kernels", f"grouped product {name}", "skipped", "this torch has none for it: a loop over experts"
            )


def _attention(device: torch.device, block: Block, dtype: torch.dtype, name: str, bound: float) -> Row:
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(BATCH, heads, LENGTH, HEAD, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    mask = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=generator) < 0.5 if block.masked else None
    scores = Scores(HEAD**-0.5, softcap=block.softcap)

    inputs = query.to(device), key.to(device), value.to(device)
    placed = None if mask is None else mask.to(device)
    output, log_sum = attend_block(*inputs, scores, mask=placed, causal=block.causal)
    grads = attend_block_backward(grad.to(device), *inputs, output, log_sum, scores, mask=placed, causal=block.causal)

    leaves = [it.double().requires_grad_() for it in (query, key, value)]
    expected, expected_sum = _written_out(leaves, scores, mask, causal=block.causal)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    kernel = kernel_for(inputs[0], inputs[2], scores, masked=block.masked)
    chosen = "no kernel" if kernel is None else kernel.name
    error = _error([output, log_sum, *grads], [expected, expected_sum, *wanted])
    return check("kernels", f"attention {block.name} {name}, {chosen}", error, bound)


def _written_out(
    inputs: Sequence[Tensor], scores: Scores, mask: Tensor | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    query, key, value = inputs
    key, value = (it.repeat_interleave(HEADS // KV_HEADS, dim=1) for it in (key, value))
    raw = query @ key.transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        raw = torch.tanh(raw / scores.softcap) * scores.softcap
    if causal:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if mask is not None:
        raw = raw.masked_fill(~mask, -torch.inf)
    return raw.softmax(dim=-1) @ value, raw.logsumexp(dim=-1)


def _grouped_error(device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(TOKENS_OF_EXPERTS), WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.randn(len(TOKENS_OF_EXPERTS), WIDTH, INNER, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(sum(TOKENS_OF_EXPERTS), INNER, generator=generator, dtype=torch.float64).to(dtype)

    ours = tokens.to(device).requires_grad_(), weights.to(device).requires_grad_()
    product = grouped_product(*ours, torch.tensor(TOKENS_OF_EXPERTS, device=device))
    grads = torch.autograd.grad(product, ours, grad.to(device))

    leaves = [it.double().requires_grad_() for it in (tokens, weights)]
    parts = leaves[0].split(TOKENS_OF_EXPERTS)
    expected = torch.cat([part @ weight for part, weight in zip(parts, leaves[1], strict=True)])
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    return _error([product, *grads], [expected, *wanted])


def _error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest relative error of a tensor, in its norm."""
    pairs = zip(found, wanted, strict=True)
    return max(float((ours.detach().double().cpu() - it).norm() / it.norm()) for ours, it in pairs)
