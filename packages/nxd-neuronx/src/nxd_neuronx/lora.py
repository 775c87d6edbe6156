"""LoRA models under the names that scripts import."""

import logging

import nxd_lora
from nxd_engine.adapters import adapt_model, choose_adapters
from nxd_engine.nxd_model import NxDModel
from nxd_lora import LoraConfig
from torch import nn

_logger = logging.getLogger(__name__)


class LoraModel(nxd_lora.LoraModel):
    """`nxd_lora.LoraModel`, with the old names of its methods."""

    def get_base_model(self) -> nn.Module:
        """Return the model with its adapters."""
        return self.module

    def merge_lora(self) -> None:
        """`merge`."""
        self.merge()

    def unmerge_lora(self) -> None:
        """`unmerge`."""
        self.unmerge()

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return the numbers of trainable and of all parameters on this rank."""
        parameters = list(self.module.parameters())
        return sum(it.numel() for it in parameters if it.requires_grad), sum(it.numel() for it in parameters)

    def print_trainable_parameters(self) -> None:
        """Log both numbers."""
        trained, every = self.get_nb_trainable_parameters()
        _logger.info("%d parameters, of which %d are trained (%.2f%%)", every, trained, 100 * trained / every)


def get_lora_model(model: nn.Module, lora_config: LoraConfig | None) -> nn.Module:
    """Add adapters to a model. Called by all ranks.

    Args:
        model: the model, or an `NxDModel` without pipeline stages.
        lora_config: configuration that selects the layers; None leaves the model unchanged.

    Returns:
        The `NxDModel` itself, or a `LoraModel` that wraps the model.

    Raises:
        ValueError: a target matches no layer that can be adapted.
    """
    if lora_config is None:
        return model
    if not isinstance(model, NxDModel):
        return LoraModel(model, lora_config)
    adapt_model(model, choose_adapters(model.module, lora_config))
    return model
