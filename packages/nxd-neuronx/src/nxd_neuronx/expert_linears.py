"""Linear layers of all experts at once, with the same number of tokens for each expert."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from nxd_layers.experts import ExpertLinear
from nxd_layers.initialization import default_linear_init
from nxd_layers.mappings import (
    GivenGroup,
    copy_to_tensor_model_parallel_region,
    process_group_as,
    reduce_from_tensor_model_parallel_region,
)
from nxd_state import active_group
from torch import Tensor

from nxd_neuronx.expert_configs import GLUType


def check_unset(**asked: Any) -> None:
    """Raise a NotImplementedError for arguments that are not supported here."""
    for name, value in asked.items():
        if value:
            raise NotImplementedError(f"{name} of mixture-of-experts layers is not supported; remove it")


def is_other_group(given: GivenGroup, axis: str) -> bool:
    """Return whether the process group differs from the mesh's group of this axis."""
    return given is not None and process_group_as(given).ranks != active_group(axis).ranks


class ExpertFusedLinear(ExpertLinear):
    """Base class of the experts' linear layers: `nxd_layers.experts.ExpertLinear`, for tokens of all experts."""

    def _outputs(self, input_: Tensor, expert_indices: Tensor | None) -> Tensor:
        weight = self.weight if expert_indices is None else self.weight[expert_indices]
        if input_.shape[0] not in (1, len(weight)):
            raise ValueError(
                f"input_ has {input_.shape[0]} experts, but this rank has {len(weight)}; pass as many, or 1"
            )
        return torch.einsum("e...i,eio->e...o", input_.expand(len(weight), *input_.shape[1:]), weight)


class ExpertFusedColumnParallelLinear(ExpertFusedLinear):
    """Linear layers whose outputs are split over the tensor-parallel ranks.

    Raises:
        NotImplementedError: a bias, another process group or another distribution of experts.
    """

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: Callable[[Tensor], Any] | None = None,
        keep_master_weight: bool = False,
        tensor_model_parallel_group: GivenGroup = None,
        expert_model_parallel_group: GivenGroup = None,
        is_prefill: bool = True,
        is_fused_gate_up: bool = False,
        expert_distribution: Sequence[Sequence[int]] | None = None,
    ) -> None:
        check_unset(
            bias=bias,
            tensor_model_parallel_group=is_other_group(tensor_model_parallel_group, "tp"),
            expert_model_parallel_group=is_other_group(expert_model_parallel_group, "ep"),
            expert_distribution=expert_distribution,
        )
        super().__init__(
            num_experts,
            input_size,
            output_size,
            split="outputs",
            stride=stride,
            dtype=dtype,
            device=device,
            init_method=init_method or default_linear_init,
        )

    def forward(self, input_: Tensor, expert_indices: Tensor | None = None, *_: Any) -> Tensor:
        """`[experts/ep, ..., in]`, or `[1, ..., in]`, to `[experts/ep, ..., out/tp]`, of all experts or those given."""
        return self._outputs(copy_to_tensor_model_parallel_region(input_), expert_indices)


class ExpertFusedRowParallelLinear(ExpertFusedLinear):
    """Linear layers whose inputs are split over the tensor-parallel ranks.

    Raises:
        NotImplementedError: a bias, another process group or another distribution of experts.
    """

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        bias: bool = False,
        reduce_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: Callable[[Tensor], Any] | None = None,
        keep_master_weight: bool = False,
        tensor_model_parallel_group: GivenGroup = None,
        expert_model_parallel_group: GivenGroup = None,
        is_prefill: bool = True,
        is_fused_gate_up: bool = False,
        expert_distribution: Sequence[Sequence[int]] | None = None,
    ) -> None:
        check_unset(
            bias=bias,
            tensor_model_parallel_group=is_other_group(tensor_model_parallel_group, "tp"),
            expert_model_parallel_group=is_other_group(expert_model_parallel_group, "ep"),
            expert_distribution=expert_distribution,
        )
        super().__init__(
            num_experts,
            input_size,
            output_size,
            split="inputs",
            stride=stride,
            dtype=dtype,
            device=device,
            init_method=init_method or default_linear_init,
        )
        self.reduce_output = reduce_output

    def forward(self, input_: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """`[experts/ep, ..., in/tp]` to `[experts/ep, ..., out]`; a partial sum without `reduce_output`."""
        output = self._outputs(input_, expert_indices)
        return reduce_from_tensor_model_parallel_region(output) if self.reduce_output else output


def gated_activation(
    activation: Callable[[Tensor], Tensor],
    glu_type: GLUType | str | None,
    *,
    scale: float,
    bias: float,
    gate_limits: tuple[float | None, float | None],
    up_limits: tuple[float | None, float | None],
) -> Callable[..., Tensor]:
    """Return a function that combines an expert's gate and up projections.

    Args:
        activation: activation function, applied to `scale * gate`.
        glu_type: SWIGLU also multiplies by the gate.
        scale: factor of the gate inside the activation.
        bias: constant added to up.
        gate_limits: minimum and maximum of the gate, or None.
        up_limits: minimum and maximum of up, or None.

    Raises:
        NotImplementedError: limits of up together with a bias: the old library does not apply them in one order.
    """
    check_unset(up_clamp_limits_with_hidden_act_bias=bias and any(it is not None for it in up_limits))
    is_swiglu = GLUType.validate(glu_type) is GLUType.SWIGLU

    def computed(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = _limited(gate, *gate_limits), _limited(up, *up_limits)
        inner = activation(scale * gate)
        return (gate * inner if is_swiglu else inner) * (up + bias)

    return computed


def _limited(values: Tensor, least: float | None, most: float | None) -> Tensor:
    return values if least is None and most is None else values.clamp(least, most)
