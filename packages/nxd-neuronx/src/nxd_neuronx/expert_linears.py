"""Linear layers of all experts at once, on as many tokens for each, as scripts for NeuronX Distributed make them."""

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
from torch import Tensor, nn

from nxd_neuronx.expert_configs import GLUType
from nxd_neuronx.expert_regions import enter_expert_parallel_region, exit_expert_parallel_region


def check_unset(**asked: Any) -> None:
    """Raise a NotImplementedError for arguments whose work is not done here."""
    for name, value in asked.items():
        if value:
            raise NotImplementedError(f"{name} of mixture-of-experts layers is not done here; leave it out")


def is_other_group(given: GivenGroup, axis: str) -> bool:
    """Whether a process group is given that is not the mesh's of this axis."""
    return given is not None and process_group_as(given).ranks != active_group(axis).ranks


class ExpertFusedLinear(ExpertLinear):
    """What the linear layers of experts share: `nxd_layers.experts.ExpertLinear`, called with tokens of all experts."""

    def _outputs(self, input_: Tensor, expert_indices: Tensor | None) -> Tensor:
        weight = self.weight if expert_indices is None else self.weight[expert_indices]
        if input_.shape[0] not in (1, len(weight)):
            raise ValueError(f"input_ has {input_.shape[0]} experts and this rank {len(weight)}; give as many, or 1")
        return torch.einsum("e...i,eio->e...o", input_.expand(len(weight), *input_.shape[1:]), weight)


class ExpertFusedColumnParallelLinear(ExpertFusedLinear):
    """Outputs of each expert are split over the tensor-parallel ranks.

    Raises:
        NotImplementedError: a bias, another group or another distribution of experts is asked for.
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

    def forward(  # type: ignore[override]
        self, input_: Tensor, expert_indices: Tensor | None = None, *_: Any
    ) -> Tensor:
        """`[experts/ep, ..., in]`, or 1 in place of the experts, to `[experts/ep, ..., out/tp]`; of some if asked."""
        return self._outputs(copy_to_tensor_model_parallel_region(input_), expert_indices)


class ExpertFusedRowParallelLinear(ExpertFusedLinear):
    """Inputs of each expert are split over the tensor-parallel ranks.

    Raises:
        NotImplementedError: a bias, another group or another distribution of experts is asked for.
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

    def forward(self, input_: Tensor, expert_indices: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """`[experts/ep, ..., in/tp]` to `[experts/ep, ..., out]`; a part of the sum without `reduce_output`."""
        output = self._outputs(input_, expert_indices)
        return reduce_from_tensor_model_parallel_region(output) if self.reduce_output else output


class Experts(nn.Module):
    """Experts on as many tokens for each; in training, tokens travel to the ranks of their experts and back.

    Raises:
        NotImplementedError: biases, limits or another distribution of experts are asked for.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        glu: bool,
        activation_fn: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        device: torch.device | str | None,
        bias: bool = False,
        glu_type: GLUType | str | None = GLUType.GLU,
        hidden_act_scaling_factor: float = 1.0,
        hidden_act_bias: float = 0.0,
        gate_clamp_upper_limit: float | None = None,
        gate_clamp_lower_limit: float | None = None,
        up_clamp_upper_limit: float | None = None,
        up_clamp_lower_limit: float | None = None,
        input_layer_init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        is_prefill: bool = True,
        tensor_model_parallel_group: GivenGroup = None,
        expert_model_parallel_group: GivenGroup = None,
        expert_distribution: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "bias": bias,
            "dtype": dtype,
            "device": device,
            "tensor_model_parallel_group": tensor_model_parallel_group,
            "expert_model_parallel_group": expert_model_parallel_group,
            "expert_distribution": expert_distribution,
        }
        self.num_experts = num_experts
        gated = gated_activation(
            activation_fn,
            glu_type,
            scale=hidden_act_scaling_factor,
            bias=hidden_act_bias,
            gate_limits=(gate_clamp_lower_limit, gate_clamp_upper_limit),
            up_limits=(up_clamp_lower_limit, up_clamp_upper_limit),
        )
        self._activation = gated if glu else activation_fn
        width, stride = (2 * intermediate_size, 2) if glu else (intermediate_size, 1)
        first = ExpertFusedColumnParallelLinear(
            num_experts, hidden_size, width, stride=stride, init_method=input_layer_init_method, **options
        )
        self.gate_up_proj = first if glu else None
        self.up_proj = None if glu else first
        self.down_proj = ExpertFusedRowParallelLinear(
            num_experts,
            intermediate_size,
            hidden_size,
            reduce_output=False,
            init_method=output_layer_init_method,
            **options,
        )

    def forward(self, hidden_states: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """Compute.

        Args:
            hidden_states: `[experts, capacity, hidden]`, or 1 in place of the experts.
            expert_indices: `[chosen]`, to compute these experts only; not where ranks split the experts.

        Returns:
            `[experts, capacity, hidden]`, parts of the sum over the tensor-parallel ranks.

        Raises:
            ValueError: experts are chosen among those of several ranks.
        """
        travels = active_group("ep").size > 1
        if travels and expert_indices is not None:
            raise ValueError("expert_indices chooses among all experts, which several ranks have; leave it out")
        travels = travels and self.training
        tokens = enter_expert_parallel_region(hidden_states, False) if travels else hidden_states.unsqueeze(1)
        if self.gate_up_proj is not None:
            inner = self._activation(*self.gate_up_proj(tokens, expert_indices).chunk(2, dim=-1))
        else:
            assert self.up_proj is not None  # one of them is there
            inner = self._activation(self.up_proj(tokens, expert_indices))
        output: Tensor = self.down_proj(inner, expert_indices)
        return exit_expert_parallel_region(output, False) if travels else output.squeeze(1)


def gated_activation(
    activation: Callable[[Tensor], Tensor],
    glu_type: GLUType | str | None,
    *,
    scale: float,
    bias: float,
    gate_limits: tuple[float | None, float | None],
    up_limits: tuple[float | None, float | None],
) -> Callable[..., Tensor]:
    """What an expert makes of a gate and the other half of its first product.

    Args:
        activation: of the gate times `scale`.
        glu_type: SWIGLU also multiplies by the gate.
        scale: of the gate in the activation.
        bias: added to the other half.
        gate_limits: least and largest value of the gate, or None.
        up_limits: of the other half.

    Raises:
        NotImplementedError: limits of the other half together with a bias: whether they hold before it is not the same
            everywhere in that library.
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
