"""Linear layers that store their weight transposed, `[in, out]`: `Conv1D` of transformers, as GPT-2 has them.

The module stays, with a part of its parameters.
"""

from typing import Any

from torch import Tensor, nn

from nxd_layers.hf.shards import shard_parameter
from nxd_layers.hf.summed_bias import share_bias
from nxd_layers.mappings import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region


def split_outputs(layer: Any, *, stride: int = 1) -> None:
    """Keep this rank's outputs, `[..., out/tp]`.

    Args:
        layer: a `Conv1D`.
        stride: number of matrices side by side, each of which is cut on its own.

    Raises:
        ValueError: the outputs cannot be cut so.
    """
    shard_parameter(layer, "weight", 1, stride=stride)
    shard_parameter(layer, "bias", 0, stride=stride)
    layer.nf = layer.bias.numel()
    layer.register_forward_pre_hook(_sum_gradient)
    layer.takes_no_adapter = True


def split_inputs(layer: Any) -> None:
    """Take this rank's inputs, `[..., in/tp]`, and sum the products.

    Raises:
        ValueError: the inputs cannot be cut so.
    """
    shard_parameter(layer, "weight", 0)
    layer.nx = layer.weight.shape[0]
    share_bias(layer, "bias")
    layer.register_forward_hook(_sum_output)
    layer.takes_no_adapter = True


def _sum_gradient(layer: nn.Module, args: Any) -> tuple[Any, ...]:
    return copy_to_tensor_model_parallel_region(args[0]), *args[1:]


def _sum_output(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    return reduce_from_tensor_model_parallel_region(output)
