"""`initialize_parallel_model`: from a function that makes a model to that model on this rank, as a config says."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from nxd_layers.activation_checkpoint import apply_activation_checkpointing
from nxd_layers.activation_checkpoint.find import named_modules_of, named_transformer_layers
from nxd_layers.hf import is_transformers_model
from nxd_pipeline import NxDPPModel
from nxd_pipeline.partition import materialize
from nxd_state import get_device, move_model_to_device
from torch import nn

from nxd_trainer.api.adapters import adapt_model, choose_adapters
from nxd_trainer.api.config import complete_config, ensure_model_parallel
from nxd_trainer.api.head_padding import pad_heads, plan_padding
from nxd_trainer.api.hugging_face import leave_out_cache, param_init_fn_for, split_if_plain
from nxd_trainer.api.meta_device import parameters_on_meta
from nxd_trainer.api.model import NxDModel
from nxd_trainer.api.rank_sync import in_turns, together


def initialize_parallel_model(
    nxd_config: Mapping[str, Any],
    model_fn: Callable[..., nn.Module],
    *model_args: Any,
    include_buffers: bool = False,
    **model_kwargs: Any,
) -> NxDModel:
    """Make a model and wrap it: cut into stages, padded, with adapters and checkpointed, as the config says.

    Called by all ranks. To have weights that do not depend on the layout, seed torch alike on all ranks before.

    Args:
        nxd_config: of `neuronx_distributed_config`. It may have been changed since; it is checked again.
        model_fn: returns the model, from parallel layers where there is tensor parallelism; or a model of
            transformers, which is split by its own plan (`nxd_layers.hf.parallelize`). Ranks of a host take turns by
            `sequential_move_factor`, so it must not communicate where they are more than that.
        *model_args: for `model_fn`.
        include_buffers: with `meta_device_init`, leave buffers to `param_init_fn` as well.
        **model_kwargs: for `model_fn`.

    Raises:
        ValueError: the config has mistakes or does not fit the mesh, or the model does not fit the config.
        RuntimeError: `model_fn` or `param_init_fn` raised on another rank.
        CheckpointError: there is no such checkpoint to take adapters from, or it does not fit.
    """
    config = complete_config(nxd_config)
    ensure_model_parallel(config)

    def make() -> nn.Module:
        with _init_context(config, include_buffers):
            module = model_fn(*model_args, **model_kwargs)
        if not isinstance(module, nn.Module):
            raise ValueError(f"model_fn returned a {type(module).__name__}; it must return the model, a torch module")
        module = split_if_plain(module, config)
        leave_out_cache(module, config)
        if config["pipeline_parallel_size"] == 1:
            materialize(module, param_init_fn_for(module, config))
            move_model_to_device(module, get_device())
        return module

    module = in_turns("make its model", make, config["model_init_config"]["sequential_move_factor"])
    _check_sequence_parallel(module, config)
    # What is chosen by names and classes is chosen in the whole model, of which every rank has the outline; what
    # changes tensors is done once they have values, which on the meta device is on their stages only.
    # A model of transformers has been padded where it was split.
    padding = plan_padding(module) if config["pad_model"] and not is_transformers_model(module) else None
    adapters = choose_adapters(module, config["lora_config"]) if config["lora_config"] is not None else None
    to_recompute = _checkpointed_classes(module, config)
    kept_whole = {*to_recompute, *(type(module.get_submodule(name)) for name in (adapters.layers if adapters else ()))}

    def cut() -> NxDModel:
        pipeline = NxDPPModel(module, **_pipeline_arguments(module, config, kept_whole))
        move_model_to_device(pipeline, get_device())
        return NxDModel(module, pipeline, config)

    model = together("make its stages of the model", cut)
    if padding is not None:
        pad_heads(model, padding)
    if adapters is not None:
        adapt_model(model, adapters)
    _checkpoint_activations(model, to_recompute)
    return model


def _init_context(config: Mapping[str, Any], include_buffers: bool) -> Any:
    if not config["model_init_config"]["meta_device_init"]:
        return nullcontext()
    return parameters_on_meta(include_buffers=include_buffers)


def _pipeline_arguments(
    module: nn.Module, config: Mapping[str, Any], kept_whole: Iterable[type[nn.Module]]
) -> dict[str, Any]:
    # Who asks for no pipeline gets the loss where the model is, as from an ordinary forward.
    given: dict[str, Any] = (
        config["pipeline_config"] if config["pipeline_config"] is not None else {"return_loss_on_cpu": False}
    )
    leaves = [*(given.get("leaf_module_cls") or ()), *kept_whole]  # a trace into them would lose the modules
    return {**given, "param_init_fn": param_init_fn_for(module, config), "leaf_module_cls": leaves}


def _check_sequence_parallel(module: nn.Module, config: Mapping[str, Any]) -> None:
    if not config["sequence_parallel"] or config["tensor_parallel_size"] == 1:
        return
    parts = (*module.modules(), *module.parameters())
    if not any(getattr(part, "sequence_parallel_enabled", False) for part in parts):
        raise ValueError(
            f"sequence_parallel=True, but no layer of {type(module).__name__} is sequence parallel; build its layers "
            "with sequence_parallel_enabled=True (LlamaForCausalLM: sequence_parallel=True), or set it to False"
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
