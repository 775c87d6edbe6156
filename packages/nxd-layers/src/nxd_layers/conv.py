"""Two-dimensional convolutions whose kernel is split over the tensor-parallel ranks, along output or input channels.

As with linear layers, the first followed by the second needs one sum forward and one backward. With one rank, or
without an initialised mesh, both are `nn.Conv2d`.
"""

import math

import torch
from nxd_state import ShardSpec, active_group, shard_along
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.utils import _pair

from nxd_layers.initialization import (
    InitMethod,
    default_bias_init,
    default_linear_init,
    empty_parameter,
    empty_sharded_parameter,
    fill_from_logical,
)
from nxd_layers.layer_group import layer_group
from nxd_layers.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region_,
    scatter_to_tensor_model_parallel_region,
)
from nxd_layers.padding.gradient import zero_padding_gradient

Size = int | tuple[int, int]

OUTPUT_CHANNEL_DIM, INPUT_CHANNEL_DIM = 0, 1  # of a kernel, [out, in, height, width]


class OutputChannelParallelConv2d(nn.Module):
    """A convolution of which each rank computes `out/tp` of the output channels.

    Args:
        in_channels: of the input.
        out_channels: of the output, over all ranks.
        kernel_size: height and width of the kernel; one number where they are equal.
        stride: of the kernel's positions.
        padding: zeros around the image.
        dilation: distance of the kernel's points.
        groups: must be 1.
        bias: whether to add a bias.
        padding_mode: must be "zeros".
        gather_output: give every rank all channels; otherwise its part.
        dtype: of weight and bias.
        device: of weight and bias; torch's default device if None.
        init_method: fills the whole kernel in place; as in `nn.Conv2d` if None.
        keep_master_weight: keep the whole initial kernel and bias as `master_weight` and `master_bias`.
        partition_pad: allow channels that do not divide: zeros fill up the last ranks' parts. A gathered output is cut.

    Attributes:
        weight: `[out/tp, in, height, width]`.
        bias: `[out/tp]` or None.
        master_weight: `[out, in, height, width]` on the CPU with `keep_master_weight`; otherwise None.
        master_bias: `[out]` likewise.

    Raises:
        ValueError: the tensor-parallel degree does not divide the channels; or groups, or another padding mode.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
    ) -> None:
        super().__init__()
        _check_supported(groups, padding_mode)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)
        self.gather_output, self.keep_master_weight = gather_output, keep_master_weight
        self.init_method = init_method or default_linear_init
        self.tensor_parallel_size = active_group("tp").size
        self._weight_spec = _spec(self._whole_shape, OUTPUT_CHANNEL_DIM, pad=partition_pad)
        self._bias_spec = _spec((out_channels,), 0, pad=partition_pad)
        split = {"partition_dim": 0, "num_partitions": self.tensor_parallel_size}
        self.weight = empty_sharded_parameter(self._weight_spec, **split, dtype=dtype, device=device)
        self.bias = empty_sharded_parameter(self._bias_spec, **split, dtype=dtype, device=device) if bias else None
        self.reset_parameters()

    @property
    def _whole_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels, *self.kernel_size)

    def reset_parameters(self) -> None:
        """Draw kernel and bias anew, the same at every tensor-parallel degree."""
        whole = fill_from_logical(self.weight, self._weight_spec, self._whole_shape, self.init_method)
        self.master_weight = _master(self, whole)
        self.master_bias = None
        if self.bias is not None:
            init_bias = default_bias_init(self.in_channels * math.prod(self.kernel_size))
            whole = fill_from_logical(self.bias, self._bias_spec, (self.out_channels,), init_bias)
            self.master_bias = _master(self, whole)

    def forward(self, in_tensor: Tensor) -> Tensor:
        """`[batch, in, height, width]` to `[batch, out, ...]`, or `[batch, out/tp, ...]` if it is not gathered."""
        group = layer_group(self.tensor_parallel_size)
        weight = zero_padding_gradient(self.weight, self._weight_spec)
        bias = None if self.bias is None else zero_padding_gradient(self.bias, self._bias_spec)
        input_ = copy_to_tensor_model_parallel_region(in_tensor, group)
        output = F.conv2d(input_, weight, bias, self.stride, self.padding, self.dilation)
        if not self.gather_output:
            return output
        return gather_from_tensor_model_parallel_region(output, 1, group)[:, : self.out_channels]

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"local={tuple(self.weight.shape)}, gather_output={self.gather_output}"
        )


class InputChannelParallelConv2d(nn.Module):
    """A convolution of which each rank reads `in/tp` of the input channels; the ranks' outputs are summed.

    Args:
        in_channels: of the input, over all ranks.
        out_channels: of the output.
        kernel_size: height and width of the kernel; one number where they are equal.
        stride: of the kernel's positions.
        padding: zeros around the image.
        dilation: distance of the kernel's points.
        groups: must be 1.
        bias: whether to add a bias (once, after the sum).
        padding_mode: must be "zeros".
        input_is_parallel: the input is this rank's part of the channels, as an output-channel-parallel layer leaves it.
        dtype: of weight and bias.
        device: of weight and bias; torch's default device if None.
        init_method: fills the whole kernel in place; as in `nn.Conv2d` if None.
        keep_master_weight: keep the whole initial kernel and bias as `master_weight` and `master_bias`.
        partition_pad: allow channels that do not divide: zeros fill up the last ranks' parts.

    Attributes:
        weight: `[out, in/tp, height, width]`.
        bias: `[out]` or None, whole on every rank.
        master_weight: `[out, in, height, width]` on the CPU with `keep_master_weight`; otherwise None.
        master_bias: `[out]` likewise.

    Raises:
        ValueError: the tensor-parallel degree does not divide the channels; or groups, or another padding mode.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
    ) -> None:
        super().__init__()
        _check_supported(groups, padding_mode)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)
        self.input_is_parallel, self.keep_master_weight = input_is_parallel, keep_master_weight
        self.init_method = init_method or default_linear_init
        self.tensor_parallel_size = active_group("tp").size
        self._weight_spec = _spec(self._whole_shape, INPUT_CHANNEL_DIM, pad=partition_pad)
        self.weight = empty_sharded_parameter(
            self._weight_spec, partition_dim=1, num_partitions=self.tensor_parallel_size, dtype=dtype, device=device
        )
        self.bias = empty_parameter((out_channels,), dtype, device) if bias else None
        self.reset_parameters()

    @property
    def _whole_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels, *self.kernel_size)

    def reset_parameters(self) -> None:
        """Draw kernel and bias anew, the same at every tensor-parallel degree."""
        whole = fill_from_logical(self.weight, self._weight_spec, self._whole_shape, self.init_method)
        self.master_weight = _master(self, whole)
        self.master_bias = None
        if self.bias is not None:
            init_bias = default_bias_init(self.in_channels * math.prod(self.kernel_size))
            bias_spec = shard_along((self.out_channels,), 0, rank=0, size=1)
            self.master_bias = _master(self, fill_from_logical(self.bias, bias_spec, (self.out_channels,), init_bias))

    def forward(self, in_tensor: Tensor) -> Tensor:
        """`[batch, in, height, width]` (`[batch, in/tp, ...]` if parallel) to `[batch, out, ...]`."""
        group = layer_group(self.tensor_parallel_size)
        padding = self.weight.shape[1] * group.size - self.in_channels
        if not self.input_is_parallel:
            padded = F.pad(in_tensor, (0, 0, 0, 0, 0, padding)) if padding else in_tensor
            in_tensor = scatter_to_tensor_model_parallel_region(padded, 1, group)
        weight = zero_padding_gradient(self.weight, self._weight_spec)
        partial = F.conv2d(in_tensor, weight, None, self.stride, self.padding, self.dilation)
        output = reduce_from_tensor_model_parallel_region_(partial, group)
        return output if self.bias is None else output + self.bias[:, None, None]

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"local={tuple(self.weight.shape)}, input_is_parallel={self.input_is_parallel}"
        )


def _master(layer: OutputChannelParallelConv2d | InputChannelParallelConv2d, whole: Tensor | None) -> Tensor | None:
    """The whole initial values, if the layer keeps them."""
    return whole.to(layer.weight.dtype) if layer.keep_master_weight and whole is not None else None


def _check_supported(groups: int, padding_mode: str) -> None:
    if groups != 1:
        raise ValueError(f"groups={groups}: only groups=1 is split over ranks; use torch.nn.Conv2d on every rank")
    if padding_mode != "zeros":
        raise ValueError(f"padding_mode={padding_mode!r}: only 'zeros' is known; pad by torch.nn.functional.pad before")


def _spec(shape: tuple[int, ...], dim: int, *, pad: bool) -> ShardSpec:
    group = active_group("tp")
    padded = -(-shape[dim] // group.size) * group.size if pad else None
    return shard_along(shape, dim, rank=group.rank, size=group.size, padded_length=padded)
