"""LoRA for single layers and for wrapped models, under the names that scripts import."""

import logging

import nxd_lora
from nxd_engine.adapters import adapt_model, choose_adapters
from nxd_engine.model import NxDModel
from nxd_layers import GQAQKVColumnParallelLinear
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_lora import LoraConfig
from nxd_lora.adapter import adapter_of
from nxd_lora.targets import kind_of
from torch import nn

_logger = logging.getLogger(__name__)


class LoraModel(nxd_lora.LoraModel):
    """`nxd_lora.LoraModel`, with the names of its methods in scripts."""

    def get_base_model(self) -> nn.Module:
        """The model, with its adapters."""
        return self.module

    def merge_lora(self) -> None:
        """`merge`."""
        self.merge()

    def unmerge_lora(self) -> None:
        """`unmerge`."""
        self.unmerge()

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Numbers in parameters that train, and in all, on this rank."""
        parameters = list(self.module.parameters())
        return sum(it.numel() for it in parameters if it.requires_grad), sum(it.numel() for it in parameters)

    def print_trainable_parameters(self) -> None:
        """Log both."""
        trained, every = self.get_nb_trainable_parameters()
        _logger.info("%d parameters, of which %d are trained (%.2f%%)", every, trained, 100 * trained / every)


def get_lora_model(model: nn.Module, lora_config: LoraConfig | None) -> nn.Module:
    """A model with adapters.

    Args:
        model: a model, or an `NxDModel` that is not cut into stages; called by all ranks.
        lora_config: says which layers; None leaves the model as it is.

    Returns:
        The `NxDModel` itself, or a `LoraModel` around the model.

    Raises:
        ValueError: a target names nothing that can be adapted.
    """
    if lora_config is None:
        return model
    if not isinstance(model, NxDModel):
        return LoraModel(model, lora_config)
    adapt_model(model, choose_adapters(model.module, lora_config))
    return model


class LoraLayer(LoraModel):
    """One layer with an adapter; the layer stays the same object, as in `LoraModel`.

    Args:
        base_layer: a layer of a class that can be adapted.
        lora_config: rank, scale and initialization.

    Raises:
        ValueError: the layer cannot be adapted, is of another class than this one is for, or has an adapter.
    """

    layer_classes: tuple[type[nn.Module], ...] = (nn.Module,)

    def __init__(self, base_layer: nn.Module, lora_config: LoraConfig) -> None:
        kind = kind_of(base_layer)
        if kind is None or not isinstance(base_layer, self.layer_classes):
            wanted = " or ".join(cls.__name__ for cls in self.layer_classes)
            raise ValueError(f"{type(self).__name__} adapts {wanted}, not {type(base_layer).__name__}")
        if adapter_of(base_layer) is not None:
            raise ValueError(f"this {type(base_layer).__name__} already has an adapter; call unload() first")
        super().__init__(base_layer, lora_config, layers={"": tuple(kind.parts)})

    @property
    def base_layer(self) -> nn.Module:
        """The layer."""
        return self.module

    def get_base_layer(self) -> nn.Module:
        """The layer."""
        return self.module

    def extra_repr(self) -> str:
        """Rank and scale."""
        return f"lora_rank={self.lora_config.lora_rank}, scale={self.lora_config.scale}"


class LoraLinear(LoraLayer):
    """A linear layer with an adapter."""

    layer_classes = (nn.Linear,)


class LoraEmbedding(LoraLayer):
    """An embedding with an adapter."""

    layer_classes = (nn.Embedding,)


class LoraConv2d(LoraLayer):
    """A convolution with an adapter."""

    layer_classes = (nn.Conv2d,)


class LoraParallelLinear(LoraLayer):
    """A column- or row-parallel layer with an adapter."""

    layer_classes = (ColumnParallelLinear, RowParallelLinear)


class LoraGQAQKVParallelLinear(LoraLayer):
    """The query, key and value projections with an adapter each."""

    layer_classes = (GQAQKVColumnParallelLinear,)
