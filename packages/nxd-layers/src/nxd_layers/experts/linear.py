"""`ExpertLinear`: the linear layers of all experts as one parameter, its shard metadata, and the grouped product.

Measured on a CPU in float32, forward and backward, with 1 to 512 tokens for each of 4 to 64 experts: torch's grouped
product takes 0.5 to 0.9 of the time of a loop over experts; a batched product of
experts padded to the same number of tokens is between the two or slower than both.
"""

from dataclasses import replace
from typing import Literal

import torch
from nxd_state import (
    Box,
    ShardSpec,
    active_group,
    get_shard_spec,
    has_grouped_product,
    log_slow_path,
    set_partition_attributes,
    set_shard_spec,
    shard_along,
    splits_experts,
)
from nxd_state.degrees import expert_tensor_parallel_mistake
from nxd_state.parameter_marks import MatrixLayout, copy_marks, mark_expert, mark_matrix_layout
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_layers.initialization import InitMethod, default_linear_init, empty_parameter


def shard_expert_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return this rank's experts of a parameter that has all experts, with shard metadata.

    Args:
        parameter: `[experts, ...]`; each expert is whole or sharded over the tensor-parallel ranks.

    Raises:
        ValueError: the expert-parallel ranks do not divide the experts.
    """
    whole = ShardSpec.whole(parameter.shape, copies=active_group("etp").size)
    spec = spec_of_own_experts(get_shard_spec(parameter) or whole)
    first = active_group("ep").rank * spec.local_shape[0]
    part = parameter.detach()[first : first + spec.local_shape[0]].clone(memory_format=torch.contiguous_format)
    made = nn.Parameter(part, requires_grad=parameter.requires_grad)
    copy_marks(parameter, made)
    set_shard_spec(made, spec)
    mark_expert(made)
    return made


def check_expert_tensor_parallel_size() -> None:
    """Raise a ValueError if the mesh shards experts over some of the tensor-parallel ranks."""
    if mistake := expert_tensor_parallel_mistake(active_group("etp").size, active_group("tp").size):
        raise ValueError(mistake)


def spec_of_own_experts(spec: ShardSpec) -> ShardSpec:
    """Return the spec of this expert-parallel rank's part of a parameter `[experts, ...]`.

    Args:
        spec: the spec of the parameter with all experts, over the ranks that split each expert.
    """
    group, experts = active_group("ep"), spec.local_shape[0]
    if experts % group.size:
        raise ValueError(
            f"{experts} experts of a parameter {spec.local_shape} cannot be split over {group.size} ranks; "
            f"use an expert-parallel degree that divides {experts}"
        )
    number = experts // group.size
    first = group.rank * number
    pieces = []
    for piece in spec.pieces:
        begin = max(piece.local.offset[0], first)
        end = min(piece.local.slices[0].stop, first + number)
        if begin < end:
            shape = (end - begin, *piece.local.shape[1:])
            logical = piece.logical.offset[0] + begin - piece.local.offset[0]
            local_box = Box((begin - first, *piece.local.offset[1:]), shape)
            logical_box = Box((logical, *piece.logical.offset[1:]), shape)
            pieces.append(replace(piece, local=local_box, logical=logical_box))
    return ShardSpec((number, *spec.local_shape[1:]), tuple(pieces), axis="ep")


_GROUPED_ALIGNMENT = 16  # bytes: rows of other lengths are refused by torch


def grouped_product(tokens: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return each token times the weight of its expert; experts without tokens take no time.

    Args:
        tokens: `[rows, in]`, sorted by expert; at least one row.
        weights: `[experts, in, out]`.
        counts: `[experts]`, the number of tokens of each expert, on the device of the tokens; it is waited for only
            where torch has no grouped product.

    Returns:
        `[rows, out]`.
    """
    if _has_grouped_product(tokens, weights):
        ends = counts.cumsum(dim=0, dtype=torch.int32)
        product: Tensor = F.grouped_mm(tokens.contiguous(), weights.contiguous(), offs=ends)
        if product.requires_grad:
            product.register_hook(Tensor.contiguous)  # its backward refuses expanded gradients, as those of a sum are
        return product
    log_slow_path(
        f"products of {len(weights)} experts one after the other: torch {torch.__version__} has no grouped product of "
        f"{tokens.dtype} with weights {list(weights.shape)} in {weights.dtype}; use torch 2.10 or newer, bfloat16 and "
        f"sizes that are multiples of {_GROUPED_ALIGNMENT // 2}",
        tokens.device,
    )
    parts = zip(tokens.split(counts.tolist()), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts if len(part)])


def _has_grouped_product(tokens: Tensor, weights: Tensor) -> bool:
    """Whether torch's grouped product supports these: not in float64 or under autocast."""
    return (
        has_grouped_product(tokens.dtype, tokens)
        and tokens.dtype == weights.dtype
        and all(width * weights.itemsize % _GROUPED_ALIGNMENT == 0 for width in weights.shape[1:])
        and not torch.is_autocast_enabled(tokens.device.type)
        and hasattr(F, "grouped_mm")
    )


class ExpertLinear(nn.Module):
    """A linear layer without bias for each expert of this rank; initial values are the same at every layout.

    Args:
        num_experts: number of experts of all ranks.
        input_size: input size of each expert.
        output_size: output size of each expert.
        split: dim that the tensor-parallel ranks of an expert split.
        stride: number of matrices side by side in the outputs, each of which is split on its own.
        dtype: dtype of the weight.
        device: device of the weight.
        init_method: fills the weight of one expert, float32 `[in, out]`.

    Attributes:
        weight: `[experts/ep, in, out/etp]`, or `[experts/ep, in/etp, out]`.
        partition_dim: dim along which ranks split the weight.
        stride: as given.

    Raises:
        ValueError: ranks do not divide experts or sizes, or only some of the tensor-parallel ranks would split an
            expert.
    """

    is_transposed = True  # transformers' name for weights [experts, in, out]

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        *,
        split: Literal["inputs", "outputs"],
        stride: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod = default_linear_init,
    ) -> None:
        super().__init__()
        check_expert_tensor_parallel_size()
        self._shape = (num_experts, input_size, output_size)
        self._init_method = init_method
        group = active_group("etp")
        self.partition_dim = dim = 1 if split == "inputs" else 2
        self.stride = stride
        spec = shard_along(self._shape, dim, rank=group.rank, size=group.size, stride=stride)
        self._spec: ShardSpec = spec_of_own_experts(spec) if splits_experts() else spec
        self.weight = empty_parameter(self._spec.local_shape, dtype, device)
        if group.size > 1:
            set_partition_attributes(self.weight, partition_dim=dim, num_partitions=group.size, stride=stride)
        is_fused = stride > 1 and split == "outputs"
        mark_matrix_layout(self.weight, MatrixLayout(-1, (output_size // stride,) * stride if is_fused else ()))
        if splits_experts():
            mark_expert(self.weight)
        if splits_experts() or group.size > 1:
            set_shard_spec(self.weight, self._spec)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all experts again, one after the other, and keep this rank's."""
        if self.weight.is_meta:
            return
        pieces = self._spec.pieces
        for expert in range(self._shape[0]):
            whole = torch.empty(self._shape[1:], dtype=torch.float32, device="cpu")
            self._init_method(whole)
            for piece in pieces:
                here = expert - piece.logical.offset[0]
                if 0 <= here < piece.logical.shape[0]:
                    part = whole[piece.logical.slices[1:]].to(self.weight.device, self.weight.dtype)
                    self.weight[piece.local.offset[0] + here][piece.local.slices[1:]] = part

    def forward(self, tokens: Tensor, counts: Tensor | None) -> Tensor:
        """`[rows, in]`, the rows of this rank's experts one after the other, `counts` of each, to `[rows, out]`.

        Without counts each expert takes all rows: `[rows, in]` or `[experts, rows, in]` to `[experts, rows, out]`.
        """
        if counts is None:
            return tokens @ self.weight
        return grouped_product(tokens, self.weight, counts)
