"""Two-dimensional convolutions whose kernel is split over the tensor-parallel ranks, along output or input channels.

As with linear layers, the first followed by the second needs one sum forward and one backward. With one rank, or
without an initialized mesh, both are `nn.Conv2d`.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.utils import _pair

from nxd_layers.initialization import InitMethod, default_linear_init
from nxd_layers.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region_,
    scatter_to_tensor_model_parallel_region,
)
from nxd_layers.sharded_linear import ShardedLinear

Size = int | tuple[int, int]

OUTPUT_CHANNEL_DIM, INPUT_CHANNEL_DIM = 0, 1  # of a kernel, [out, in, height, width]


class _ShardedConv2d(ShardedLinear):
    """Base of both convolutions: sizes, and one kernel split along a channel dim."""

    def __init__(
        self,
        channels: tuple[int, int],
        kernel: tuple[Size, Size, Size, Size],
        *,
        partition_dim: int,
        groups: int,
        padding_mode: str,
        init_method: InitMethod | None,
        keep_master_weight: bool,
        partition_pad: bool,
    ) -> None:
        if groups != 1:
            raise ValueError(f"groups={groups}: only groups=1 is split over ranks; use torch.nn.Conv2d on every rank")
        if padding_mode != "zeros":
            raise ValueError(
                f"padding_mode={padding_mode!r}: only 'zeros' is known; pad by torch.nn.functional.pad before"
            )
        kernel_size, stride, padding, dilation = map(_pair, kernel)
        super().__init__(
            (channels[1], channels[0], *kernel_size),
            partition_dim=partition_dim,
            init_method=init_method or default_linear_init,
            pad_multiple=1 if partition_pad else None,
            keep_master_weight=keep_master_weight,
        )
        self.in_channels, self.out_channels = channels
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation

    def _convolved(self, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(input_, weight, bias, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        """Sizes and the arguments that change the computation."""
        name = "gather_output" if self.partition_dim == OUTPUT_CHANNEL_DIM else "input_is_parallel"
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"local={tuple(self.weight.shape)}, {name}={getattr(self, name)}"
        )


class OutputChannelParallelConv2d(_ShardedConv2d):
    """A convolution of which each rank computes `out/tp` of the output channels.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, over all ranks.
        kernel_size: height and width of the kernel; one number where they are equal.
        stride: step between the kernel's positions.
        padding: zeros around the image.
        dilation: distance between the kernel's points.
        groups: must be 1.
        bias: whether to add a bias.
        padding_mode: must be "zeros".
        gather_output: give every rank all channels; otherwise its part.
        dtype: dtype of weight and bias.
        device: device of weight and bias; None: torch's default device.
        init_method: fills the whole kernel in place; None: like `nn.Conv2d`.
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
        super().__init__(
            (in_channels, out_channels),
            (kernel_size, stride, padding, dilation),
            partition_dim=OUTPUT_CHANNEL_DIM,
            groups=groups,
            padding_mode=padding_mode,
            init_method=init_method,
            keep_master_weight=keep_master_weight,
            partition_pad=partition_pad,
        )
        self.gather_output = gather_output
        self._add_parameters(dtype, device, bias=bias)

    def forward(self, in_tensor: Tensor) -> Tensor:
        """`[batch, in, height, width]` to `[batch, out, ...]`, or `[batch, out/tp, ...]` if it is not gathered."""
        group = self.group()
        weight, bias = self.weight_and_bias(in_tensor.dtype)
        output = self._convolved(copy_to_tensor_model_parallel_region(in_tensor, group), weight, bias)
        if not self.gather_output:
            return output
        return gather_from_tensor_model_parallel_region(output, -3, group)[..., : self.out_channels, :, :]

    def features(self) -> dict[str, str]:
        """See `ShardedLinear.features`."""
        return super().features() | self._set_flags("gather_output")


class InputChannelParallelConv2d(_ShardedConv2d):
    """A convolution of which each rank reads `in/tp` of the input channels; the ranks' outputs are summed.

    Args:
        in_channels: channels of the input, over all ranks.
        out_channels: channels of the output.
        kernel_size: see `OutputChannelParallelConv2d`, also for the other arguments.
        bias: whether to add a bias (once, after the sum).
        input_is_parallel: the input is this rank's part of the channels, as an output-channel-parallel layer leaves it.

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
        super().__init__(
            (in_channels, out_channels),
            (kernel_size, stride, padding, dilation),
            partition_dim=INPUT_CHANNEL_DIM,
            groups=groups,
            padding_mode=padding_mode,
            init_method=init_method,
            keep_master_weight=keep_master_weight,
            partition_pad=partition_pad,
        )
        self.input_is_parallel = input_is_parallel
        self._add_parameters(dtype, device, bias=bias)

    def forward(self, in_tensor: Tensor) -> Tensor:
        """`[batch, in, height, width]` (`[batch, in/tp, ...]` if parallel) to `[batch, out, ...]`."""
        group = self.group()
        padding = self.padded_length - self.in_channels
        if not self.input_is_parallel:
            padded = F.pad(in_tensor, (0, 0, 0, 0, 0, padding)) if padding else in_tensor
            in_tensor = scatter_to_tensor_model_parallel_region(padded, -3, group)
        weight, bias = self.weight_and_bias(in_tensor.dtype)
        output = reduce_from_tensor_model_parallel_region_(self._convolved(in_tensor, weight, None), group)
        return output if bias is None else output + bias[:, None, None]

    def features(self) -> dict[str, str]:
        """See `ShardedLinear.features`."""
        return super().features() | self._set_flags("input_is_parallel")
