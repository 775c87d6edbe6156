"""`initialize_parallel_model`: from a function that makes a model to that model on this rank, as a config says."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from nxd_layers.activation_checkpoint import apply_activation_checkpointing
from nxd_layers.activation_checkpoint.find import named_modules_of, named_transformer_layers
from nxd_layers.padding import pad_model
from nxd_pipeline import NxDPPModel
from nxd_pipeline.partition import materialize
from nxd_state import get_device, get_tensor_model_parallel_size, move_model_to_device
from torch import nn

from nxd_trainer.api.config import ensure_model_parallel
from nxd_trainer.api.config_checks import complete_config, param_init_fn_of
from nxd_trainer.api.meta_device import parameters_on_meta
from nxd_trainer.api.model import NxDModel
from nxd_trainer.api.turns import in_turns
from nxd_trainer.lora_checkpoint import initialize_lora_model

NUMBERS_OF_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")


def initialize_parallel_model(
    nxd_config: Mapping[str, Any],
    model_fn: Callable[..., nn.Module],
    *model_args: Any,
    include_buffers: bool = False,
    **model_kwargs: Any,
) -> NxDModel:
    """Make a model and wrap it: padded, with adapters, cut into stages and checkpointed, as the config says.

    Called by all ranks. To have weights that do not depend on the layout, seed torch alike on all ranks before.

    Args:
        nxd_config: of `neuronx_distributed_config`. It may have been changed since; it is checked again.
        model_fn: returns the model, from parallel layers where there is tensor parallelism. Ranks of a host take
            turns by `sequential_move_factor`, so it must not communicate where they are more than that.
        *model_args: for `model_fn`.
        include_buffers: with `meta_device_init`, leave buffers to `param_init_fn` as well.
        **model_kwargs: for `model_fn`.

    Raises:
        ValueError: the config has mistakes or does not fit the mesh, or the model does not fit the config.
        RuntimeError: `model_fn` raised on another rank.
    """
    config = complete_config(nxd_config)
    ensure_model_parallel(config)

    def make() -> nn.Module:
        with _init_context(config, include_buffers):
            module = model_fn(*model_args, **model_kwargs)
        if not isinstance(module, nn.Module):
            raise ValueError(f"model_fn returned a {type(module).__name__}; it must return the model, a torch module")
        if config["pipeline_parallel_size"] == 1:
            materialize(module, param_init_fn_of(config))
            move_model_to_device(module, get_device())
        return module

    module = in_turns(make, config["model_init_config"]["sequential_move_factor"])
    _check_sequence_parallel(module, config)
    if config["pad_model"]:
        pad_model(module, get_tensor_model_parallel_size(), _number_of_heads(module))
    lora_model = None
    if config["lora_config"] is not None:  # the adapters are in the model's own layers, which are not moved by this
        lora_model = initialize_lora_model(module, config["lora_config"])
    to_recompute = _checkpointed_classes(module, config)
    pipeline = NxDPPModel(module, **_pipeline_arguments(config))
    move_model_to_device(pipeline, get_device())
    model = NxDModel(module, pipeline, config, lora_model=lora_model)
    _checkpoint_activations(model, to_recompute)
    return model


def _init_context(config: Mapping[str, Any], include_buffers: bool) -> Any:
    if not config["model_init_config"]["meta_device_init"]:
        return nullcontext()
    return parameters_on_meta(include_buffers=include_buffers)


def _pipeline_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    # Who asks for no pipeline gets the loss where the model is, as from an ordinary forward.
    given = config["pipeline_config"] if config["pipeline_config"] is not None else {"return_loss_on_cpu": False}
    return {**given, "param_init_fn": param_init_fn_of(config)}


def _check_sequence_parallel(module: nn.Module, config: Mapping[str, Any]) -> None:
    if not config["sequence_parallel"] or config["tensor_parallel_size"] == 1:
        return
    parts = (*module.modules(), *module.parameters())
    if not any(getattr(part, "sequence_parallel_enabled", False) for part in parts):
        raise ValueError(
            f"sequence_parallel=True, but no layer of {type(module).__name__} is sequence parallel; build its layers "
            "with sequence_parallel_enabled=True (LlamaForCausalLM: sequence_parallel=True), or set it to False"
        )


def _number_of_heads(module: nn.Module) -> int:
    config = getattr(module, "config", None)
    for name in NUMBERS_OF_HEADS:
        if isinstance(heads := getattr(config, name, None), int):
            return heads
    raise ValueError(
        f"pad_model=True needs the number of attention heads, but {type(module).__name__} has no "
        f"config.{NUMBERS_OF_HEADS[0]}; give it one, or call pad_model in model_fn"
    )


def _checkpointed_classes(module: nn.Module, config: Mapping[str, Any]) -> tuple[type[nn.Module], ...]:
    """Classes of the modules to recompute, found in the whole model: a stage may lack some, and says less of itself."""
    chosen = config["activation_checkpoint_config"]
    if chosen is None:
        return ()
    if chosen == "full":
        layer_cls = (config["pipeline_config"] or {}).get("transformer_layer_cls")
        found = named_transformer_layers(module, layer_cls)
    else:
        found = named_modules_of(module, chosen)
    return tuple({type(part): None for part in found.values()})


def _checkpoint_activations(model: NxDModel, classes: tuple[type[nn.Module], ...]) -> None:
    here = {type(module) for module in model.modules()}
    present = [cls for cls in classes if cls in here]
    if present:
        apply_activation_checkpointing(model, present)
