"""The only module that depends on the transformers library: its configs, its models, and the metadata they provide."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def is_transformers_model(model: object) -> bool:
    """Whether it is a model of transformers, which is not imported for the question."""
    return _has_base(model, "PreTrainedModel")


def is_transformers_config(config: object) -> bool:
    """Whether it is a config of transformers."""
    return _has_base(config, "PreTrainedConfig") or _has_base(config, "PretrainedConfig")


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of transformers that stores its weight as `[in, out]`."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def build_on_meta(config: Any) -> nn.Module:
    """The causal language model of a config, in the config's dtype, without memory.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers has no causal language model for the config.
    """
    try:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError("a model of a config needs transformers: pip install 'nxd-layers[transformers]'") from error
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model


def own_plan(model: Any) -> Mapping[str, str]:
    """The tensor-parallel plan that the model brings along, head and embeddings included; empty if it has none."""
    return dict(getattr(model, "_tp_plan", None) or {})


def base_model_path(model: Any) -> str:
    """The path of the model without its head; "" if it has none itself."""
    return "" if model.base_model is model else str(model.base_model_prefix)


def text_config(model: Any) -> Any:
    """The part of the model's config that describes its decoder of text; None for a model without config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def input_embeddings(model: Any) -> nn.Module | None:
    """The table of the model's tokens."""
    return _asked(model, "get_input_embeddings")


def output_embeddings(model: Any) -> nn.Module | None:
    """The model's head."""
    return _asked(model, "get_output_embeddings")


def takes_causal_lm_loss(model: Any) -> bool:
    """Whether the model's forward calls its `loss_function`, and that is the one of causal language models."""
    forward = inspect.unwrap(type(model).forward)
    calls_it = "loss_function" in forward.__code__.co_names
    return calls_it and getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


def _asked(model: Any, getter: str) -> nn.Module | None:
    try:
        found: nn.Module | None = getattr(model, getter)()
    except (NotImplementedError, AttributeError):  # models of images or of sounds have none
        return None
    return found


def _has_base(thing: object, name: str) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.partition(".")[0] == "transformers" for cls in type(thing).__mro__
    )
