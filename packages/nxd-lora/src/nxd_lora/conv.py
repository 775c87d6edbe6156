"""The branch of plain 2-D convolutions, whole on every rank.

A `[r, in, height, width]` is a convolution with the layer's own kernel, stride and padding into few channels, which B
`[out, r, 1, 1]` projects up. PEFT has the same shapes, so its files need no change.
"""

from typing import Any

from nxd_layers.initialization import empty_parameter, fill_from_logical
from nxd_state import shard_along
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_lora.adapter import LayerKind, factor, require_adapter, scale_of, widened
from nxd_lora.config import LoraConfig
from nxd_lora.linear import FACTOR_NAMES, branch_dropout, init_of_a


def _add_factors(layer: nn.Conv2d, config: LoraConfig, part: str) -> None:
    if layer.groups > 1 or layer.padding_mode != "zeros":
        raise ValueError(
            f"{layer} has groups={layer.groups} and padding_mode={layer.padding_mode!r}, but adapters support only "
            "groups=1 and 'zeros'; leave it out of target_modules"
        )
    rank, like = config.lora_rank, layer.weight
    shapes = ((rank, layer.in_channels, *layer.kernel_size), (layer.out_channels, rank, 1, 1))
    for name, shape, fill in zip(FACTOR_NAMES, shapes, (init_of_a(config), nn.init.zeros_), strict=True):
        whole = empty_parameter(shape, like.dtype, like.device)
        fill_from_logical(whole, shard_along(shape, 0, rank=0, size=1), shape, fill)
        layer.register_parameter(name, whole)


def _delta(layer: nn.Conv2d, input_: Tensor) -> Tensor:
    dropped = branch_dropout(input_, require_adapter(layer).dropout, training=layer.training)
    short = F.conv2d(dropped, factor(layer, 0), None, layer.stride, layer.padding, layer.dilation)
    return F.conv2d(short * scale_of(layer), factor(layer, 1))


def _weight_delta(layer: Any) -> dict[str, Tensor]:
    product = widened(layer.lora_B).flatten(1) @ widened(layer.lora_A).flatten(1)  # [out, in * height * width]
    return {"weight": scale_of(layer) * product.view_as(layer.weight)}


PLAIN_CONV2D = LayerKind(FACTOR_NAMES, _add_factors, _delta, _weight_delta)
