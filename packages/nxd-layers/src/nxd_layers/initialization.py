"""Making parameters whose initial values do not depend on the layout.

Every rank draws the whole logical weight in float32 on the CPU, from the same random state, and keeps its part. So
weights are the same at any tensor-parallel degree and on any device, and the random state advances alike on all ranks.
"""

import math
from collections.abc import Callable

import torch
from nxd_state import ShardSpec, set_partition_attributes, set_shard_spec
from torch import Tensor, nn

InitMethod = Callable[[Tensor], object]


def empty_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None, *, requires_grad: bool = True
) -> nn.Parameter:
    """Return an uninitialized parameter; without a device it is on torch's default device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=requires_grad)


def empty_sharded_parameter(
    spec: ShardSpec,
    *,
    partition_dim: int,
    num_partitions: int,
    stride: int = 1,
    dtype: torch.dtype,
    device: torch.device | str | None,
    requires_grad: bool = True,
) -> nn.Parameter:
    """Return an uninitialized parameter with its shard metadata."""
    parameter = empty_parameter(spec.local_shape, dtype, device, requires_grad=requires_grad)
    if num_partitions > 1:
        set_shard_spec(parameter, spec)
        set_partition_attributes(parameter, partition_dim=partition_dim, num_partitions=num_partitions, stride=stride)
    return parameter


@torch.no_grad()
def fill_from_logical(
    parameter: nn.Parameter, spec: ShardSpec, logical_shape: tuple[int, ...], init_method: InitMethod
) -> Tensor | None:
    """Draw the whole tensor of `logical_shape` with `init_method` and keep the shard of `spec`; padding becomes zero.

    A parameter on the meta device is not changed, and nothing is drawn for it.

    Returns:
        The whole tensor, in float32 on the CPU, if it was drawn.
    """
    if parameter.is_meta:
        return None
    whole = torch.empty(logical_shape, dtype=torch.float32, device="cpu")
    init_method(whole)
    parameter.zero_()
    spec.copy_from_logical(whole, parameter)
    return whole


def default_linear_init(weight: Tensor) -> None:
    """The initialization of `nn.Linear`: uniform within 1/sqrt(in)."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def default_bias_init(input_size: int) -> InitMethod:
    """The initialization of a bias of `nn.Linear`: uniform within 1/sqrt(in)."""
    bound = 1 / math.sqrt(input_size) if input_size > 0 else 0.0
    return lambda bias: nn.init.uniform_(bias, -bound, bound)
