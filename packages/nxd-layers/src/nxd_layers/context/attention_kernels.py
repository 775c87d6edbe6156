"""torch's attention kernels for a block of keys, with their log-sum-exp, and which of them serves an input.

The operations below `scaled_dot_product_attention` return the log-sum-exp that blocks are combined by, and their
backward takes the one of all keys, as torch's own context parallelism uses them. They need heads of a certain
alignment. The kernels:

- flash attention (Dao 2023, "FlashAttention-2"): half precision, no mask but the causal one; on the CPU any dtype and
  mask.
- memory-efficient attention (Rabe and Staats 2021, "Self-attention does not need O(n^2) memory"): float32 as well, and
  any mask.
- flex attention (Dong et al. 2024, "Flex Attention"): scores with a soft upper bound.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from nxd_state import has_flash_attention, has_fused_attention, is_cpu
from torch import Tensor
from torch.nn import functional as F

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256
_FLASH_MULTIPLE = 8  # of the size of heads
_EFFICIENT_ALIGNMENT = 16  # bytes, of heads and of rows of a mask
_LOG_SUM_MULTIPLE = 32  # queries, in the log-sum-exp that memory-efficient attention reads


@dataclass(frozen=True)
class Scores:
    """The definition of scores.

    Attributes:
        scale: scale of the products of queries and keys.
        softcap: soft upper bound of the scores (Gemma Team 2024, "Gemma 2"); None for no bound.
    """

    scale: float
    softcap: float | None = None


class AttentionKernel(Protocol):
    """Attention of a block, and its gradients; the arguments are those of `attend_block` and its backward."""

    name: str

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp; rows without keys have any values."""

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        scores: Scores,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's share of the gradients of queries, keys and values."""


def kernel_for(query: Tensor, value: Tensor, scores: Scores, *, masked: bool) -> AttentionKernel | None:
    """Return the fastest kernel for a block on its device; None if it has none.

    Args:
        query: the block's queries.
        value: the block's values.
        scores: definition of the scores.
        masked: whether there is a mask besides the causal one.
    """
    if is_cpu(query):
        return CpuFlashAttention() if scores.softcap is None else None
    if not has_fused_attention(query) or query.dtype not in (*_HALF, torch.float32):
        return None
    if scores.softcap is not None:
        return FlexAttention()
    small = max(query.shape[-1], value.shape[-1]) <= _LARGEST_FLASH_HEAD
    if not masked and small and query.dtype in _HALF and has_flash_attention(query):
        return FlashAttention()
    return EfficientAttention()


class CpuFlashAttention:
    """torch's flash attention on the CPU."""

    name = "flash"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        size = max(query.shape[-1], value.shape[-1])  # the kernel has one for all
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_widened(it, size) for it in (query, key, value)),
            is_causal=causal,
            attn_mask=None if mask is None else _added(mask, query.dtype),
            scale=scores.scale,
        )
        return output.narrow(-1, 0, value.shape[-1]), log_sum

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        scores: Scores,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        size = max(query.shape[-1], value.shape[-1])
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_widened(it, size) for it in (grad, query, key, value, output)),
            log_sum,
            0.0,
            causal,
            attn_mask=None if mask is None else _added(mask, query.dtype),
            scale=scores.scale,
        )
        return _narrowed(of_query, of_key, of_value, query, value)


class FlashAttention:
    """torch's flash attention on CUDA: several query heads may read one key head."""

    name = "flash"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`; there is no mask."""
        size = _multiple(max(query.shape[-1], value.shape[-1]), _FLASH_MULTIPLE)
        output, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *(_widened(it, size) for it in (query, key, value)), 0.0, causal, False, scale=scores.scale
        )
        return output.narrow(-1, 0, value.shape[-1]), log_sum

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        scores: Scores,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        size = _multiple(max(query.shape[-1], value.shape[-1]), _FLASH_MULTIPLE)
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(_widened(it, size) for it in (grad, query, key, value, output)),
            log_sum.contiguous(),
            None,  # all sequences are of one length
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
            query.new_empty(2, dtype=torch.uint64),  # the state of dropout, of which there is none
            query.new_empty((), dtype=torch.uint64),
            scale=scores.scale,
        )
        return _narrowed(of_query, of_key, of_value, query, value)


class EfficientAttention:
    """torch's memory-efficient attention on CUDA: as many key heads as query heads, and the mask is added."""

    name = "efficient"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        output, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            *self._inputs(query, key, value), self._bias(mask, query, key), True, 0.0, causal, scale=scores.scale
        )
        output = output.narrow(-1, 0, value.shape[-1])
        if mask is not None:
            output = output.where(mask.any(dim=-1, keepdim=True), 0.0)  # a row without keys may be nan
        return output, log_sum.narrow(-1, 0, query.shape[2])

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        scores: Scores,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`."""
        inputs = self._inputs(query, key, value)
        size = inputs[2].shape[-1]
        # Rows are outermost in the kernel's output, and it reads the output as it would have written it.
        by_rows = _widened(output, size).transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        of_query, of_key, of_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            _widened(grad, size),
            *inputs,
            self._bias(mask, query, key),
            by_rows,
            F.pad(log_sum, (0, -query.shape[2] % _LOG_SUM_MULTIPLE), value=torch.inf).contiguous(),
            query.new_empty((), dtype=torch.int64),  # the state of dropout, of which there is none
            query.new_empty((), dtype=torch.int64),
            0.0,
            [True, True, True, False],
            causal,
            scale=scores.scale,
        )
        of_key, of_value = (it.unflatten(1, (key.shape[1], -1)).sum(dim=2) for it in (of_key, of_value))
        return _narrowed(of_query, of_key, of_value, query, value)

    @staticmethod
    def _inputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and keys and values repeated for each query head, with aligned heads."""
        multiple = _EFFICIENT_ALIGNMENT // query.element_size()
        copies = query.shape[1] // key.shape[1]
        whole = (query, *(it.repeat_interleave(copies, dim=1) if copies > 1 else it for it in (key, value)))
        wide_query, wide_key, wide_value = (_widened(it, _multiple(it.shape[-1], multiple)) for it in whole)
        return wide_query, wide_key, wide_value

    @staticmethod
    def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """What is added to the scores, `[batch, heads, queries, keys]`, with aligned rows."""
        if mask is None:
            return None
        keys = key.shape[2]
        bias = _added(F.pad(mask, (0, -keys % _EFFICIENT_ALIGNMENT)), query.dtype).narrow(-1, 0, keys)
        return bias.expand(query.shape[0], query.shape[1], -1, -1)


class FlexAttention:
    """torch's flex attention, compiled. Its backward knows the block's own log-sum-exp, so backward attends again.

    Args:
        attend: a function like `flex_attention`; default: that one, compiled.
    """

    name = "flex"

    def __init__(self, attend: Callable[..., Any] | None = None) -> None:
        self._attend = attend or _compiled_flex_attention()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Scores, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionKernel.forward`."""
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: PLC0415 - loads sympy

        output, aux = self._attend(
            query,
            key,
            value,
            score_mod=_score_mod(scores, mask, causal),
            scale=scores.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        return output, aux.lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        scores: Scores,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `AttentionKernel.backward`.

        The output for all keys is the sum over blocks of w * out, with w = exp(lse - log_sum). So the gradient of a
        block's `out` is w * grad, and that of its `lse` is w * grad * (out - output), summed over a head.
        """
        query, key, value = (it.detach().requires_grad_() for it in (query, key, value))
        with torch.enable_grad():
            own, own_sum = self.forward(query, key, value, scores, mask, causal)
        weight = (own_sum.detach() - log_sum).exp()
        of_own = weight.unsqueeze(-1) * grad
        of_sum = (of_own * (own.detach() - output)).sum(dim=-1)
        of_query, of_key, of_value = torch.autograd.grad(
            (own, own_sum), (query, key, value), (of_own.to(own.dtype), of_sum.to(own_sum.dtype))
        )
        return of_query, of_key, of_value


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - loads sympy

    return torch.compile(flex_attention, dynamic=False)


def _score_mod(scores: Scores, mask: Tensor | None, causal: bool) -> Callable[..., Tensor]:
    """What flex attention does to each score."""
    softcap = scores.softcap
    allowed = None if mask is None else mask.squeeze(1)

    def modified(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if softcap is not None:
            score = torch.tanh(score / softcap) * softcap
        if causal:
            score = torch.where(row >= column, score, -torch.inf)
        if allowed is not None:
            reads = allowed[batch, row, column] if len(allowed) > 1 else allowed[0][row, column]
            score = torch.where(reads, score, -torch.inf)
        return score

    return modified


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _widened(tensor: Tensor, size: int) -> Tensor:
    """The layout that kernels need: heads of one size with contiguous elements."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return F.pad(tensor, (0, size - tensor.shape[-1])) if tensor.shape[-1] < size else tensor


def _narrowed(
    of_query: Tensor, of_key: Tensor, of_value: Tensor, query: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    head, value_head = query.shape[-1], value.shape[-1]
    return of_query.narrow(-1, 0, head), of_key.narrow(-1, 0, head), of_value.narrow(-1, 0, value_head)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 for keys that a query may read, else -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), -torch.inf)
