"""`initialize_parallel_model`: calls a function that makes a model, and builds this rank's part of it by a config.

The model may be made without memory (`parameters_on_meta`). Unmodified transformers models are first split by their
own plan; attention heads are padded before the model is cut into stages, or on each stage.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from nxd_layers import RowParallelLinear, hf
from nxd_layers.activation_checkpoint import (
    apply_activation_checkpointing,
    matmul_outputs,
    named_modules_of,
    named_transformer_layers,
)
from nxd_layers.head_padding import pad_model
from nxd_optim import FullySharded, parameters_by_unit
from nxd_pipeline import NxDPPModel
from nxd_pipeline.partition import materialize
from nxd_state import (
    ParallelDegrees,
    find_towers,
    get_device,
    get_mesh,
    get_shard_spec,
    get_tensor_model_parallel_size,
    is_transformers_model,
    move_model_to_device,
    one_random_state,
    use_loss_over_labels,
)
from nxd_state.parameter_marks import is_sequence_parallel
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from nxd_engine.adapters import adapt_model, choose_adapters
from nxd_engine.config import complete_config, ensure_model_parallel, given_param_init_fn
from nxd_engine.nxd_model import NxDModel
from nxd_engine.rank_sync import in_turns, run_or_raise_peer_error

_NUMBERS_OF_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def initialize_parallel_model(
    nxd_config: Mapping[str, Any],
    model_fn: Callable[..., nn.Module],
    *model_args: Any,
    include_buffers: bool = False,
    **model_kwargs: Any,
) -> NxDModel:
    """Make a model and wrap it: cut into stages, padded, with adapters and checkpointed, as the config says.

    Called by all ranks. Random weights are those that rank 0 would draw, even if the ranks have different seeds.
    They do not depend on the layout.

    Args:
        nxd_config: the result of `neuronx_distributed_config`; it is checked again, so a script may change it.
        model_fn: returns the model, built from parallel layers if there is tensor parallelism; or a transformers
            model, which is split by its own plan (`nxd_layers.hf.parallelize`). If a host has more ranks than
            `sequential_move_factor`, they take turns, so the function must not communicate.
        *model_args: arguments of `model_fn`. If it does not accept them and the first is a bool, that one is taken as
            `include_buffers`.
        include_buffers: with `meta_device_init`, whether `param_init_fn` fills buffers as well.
        **model_kwargs: keyword arguments of `model_fn`.

    Raises:
        ValueError: the config has mistakes or does not fit the mesh, or the model does not fit the config.
        RuntimeError: `model_fn` or `param_init_fn` raised on another rank.
        CheckpointError: the checkpoint to take adapters from does not exist or does not fit.
    """
    config = complete_config(nxd_config)
    ensure_model_parallel(ParallelDegrees.of_config(config))
    with one_random_state():
        return _build(config, model_fn, model_args, model_kwargs, include_buffers=include_buffers)


def _build(
    config: Mapping[str, Any],
    model_fn: Callable[..., nn.Module],
    model_args: Sequence[Any],
    model_kwargs: Mapping[str, Any],
    *,
    include_buffers: bool,
) -> NxDModel:
    if _begin_with_include_buffers(model_fn, model_args, model_kwargs):
        include_buffers, *model_args = model_args

    filling = _Filling(config) if config["optimizer_config"]["zero_stage"] == 3 and not config["pad_model"] else None

    def make() -> nn.Module:
        with _init_context(config, include_buffers):
            module = model_fn(*model_args, **model_kwargs)
        if not isinstance(module, nn.Module):
            raise ValueError(f"model_fn returned a {type(module).__name__}; it must return the model, a torch module")
        module = _split_if_plain(module, config)
        _leave_out_cache(module, config)
        if filling is not None:
            filling.follow(module)
        if config["pipeline_parallel_size"] == 1:
            materialize(module, _param_init_fn_for(module, config), on_filled=filling)
            move_model_to_device(module, get_device())
        return module

    module = in_turns("making the model", make, config["model_init_config"]["sequential_move_factor"])
    _check_sequence_parallel(module, config)
    # Names and classes are looked up in the whole model, whose structure every rank has. Tensors are changed once they
    # have values; if they were made on the meta device, only their own stages have these.
    # A transformers model was already padded when it was split.
    padding = _plan_padding(module) if config["pad_model"] and not is_transformers_model(module) else None
    adapters = choose_adapters(module, config["lora_config"]) if config["lora_config"] is not None else None
    to_recompute = _checkpointed_classes(module, config)
    units = _units(module, config)
    kept_whole = {
        *to_recompute,
        *map(type, units),
        *(type(module.get_submodule(name)) for name in (adapters.layers if adapters else ())),
    }

    def cut() -> NxDModel:
        pipeline = NxDPPModel(module, **_pipeline_arguments(module, config, kept_whole), on_filled=filling)
        move_model_to_device(pipeline, get_device())
        return NxDModel(module, pipeline, config)

    model = run_or_raise_peer_error("making the stages of the model", cut)
    if padding is not None:
        _pad_heads(model, padding)
    if adapters is not None:
        adapt_model(model, adapters)
    _checkpoint_activations(
        model,
        to_recompute,
        keeps_products=config["activation_checkpoint_config"] == "selective",
        offload=config["activation_offload"],
    )
    if config["optimizer_config"]["zero_stage"] == 3:
        sharded = filling.sharded if filling is not None else _begin_sharding(config)
        sharded.finish(model.stages, [it for stage in model.stages for it in stage.modules() if it in units])
    return model


def _begin_with_include_buffers(
    model_fn: Callable[..., nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    if not args or not isinstance(args[0], bool):
        return False
    try:
        signature = inspect.signature(model_fn)
    except ValueError:  # the function is not written in Python
        return False
    return not _takes(signature, args, kwargs) and _takes(signature, args[1:], kwargs)


def _takes(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


@contextmanager
def parameters_on_meta(*, include_buffers: bool) -> Iterator[None]:
    """Put the parameters of modules made inside the block on the "meta" device, with ties and attributes.

    Args:
        include_buffers: also put buffers there, and every other new tensor. Otherwise buffers have their values, and
            each parameter takes memory only until it is registered with its module.
    """
    if include_buffers:
        with torch.device("meta"):
            yield
        return
    register = nn.Module.register_parameter
    on_meta = WeakIdKeyDictionary()  # so that a parameter shared by two modules stays one parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.is_meta:
            return
        if param not in on_meta:
            made = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            made.__dict__.update(param.__dict__)
            on_meta[param] = made
        module._parameters[name] = on_meta[param]

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _init_context(config: Mapping[str, Any], include_buffers: bool) -> Any:
    if not config["model_init_config"]["meta_device_init"]:
        return nullcontext()
    return parameters_on_meta(include_buffers=include_buffers)


def _pipeline_arguments(
    module: nn.Module, config: Mapping[str, Any], kept_whole: Iterable[type[nn.Module]]
) -> dict[str, Any]:
    # Without a pipeline the loss stays on the model's device, as from an ordinary forward.
    given: dict[str, Any] = (
        config["pipeline_config"] if config["pipeline_config"] is not None else {"return_loss_on_cpu": False}
    )
    leaves = [*(given.get("leaf_module_cls") or ()), *kept_whole]  # tracing into them would lose the modules
    ours = {"param_init_fn": _param_init_fn_for(module, config), "use_optimizer_wrapper": True}
    return {**given, **ours, "leaf_module_cls": leaves}


def _check_sequence_parallel(module: nn.Module, config: Mapping[str, Any]) -> None:
    if not config["sequence_parallel"] or config["tensor_parallel_size"] == 1:
        return
    has_layers = any(getattr(part, "sequence_parallel_enabled", False) for part in module.modules())
    if not has_layers and not any(map(is_sequence_parallel, module.parameters())):
        raise ValueError(
            f"sequence_parallel=True, but {type(module).__name__} has no sequence-parallel layer; build its layers "
            "with sequence_parallel_enabled=True (LlamaForCausalLM: sequence_parallel=True), scatter the activations "
            "after the embedding and gather them before the head, all of it or gradients are wrong (see Sequence "
            "parallelism in docs/how-to/migrate-from-neuronx.md); or set sequence_parallel to False"
        )


def _checkpointed_classes(module: nn.Module, config: Mapping[str, Any]) -> tuple[type[nn.Module], ...]:
    """Return the classes of the modules to recompute, found in the whole model, since a stage may lack some."""
    chosen = config["activation_checkpoint_config"]
    if chosen is None:
        return ()
    if chosen in ("full", "selective"):
        layer_cls = (config["pipeline_config"] or {}).get("transformer_layer_cls")
        found = named_transformer_layers(module, layer_cls)
    else:
        found = named_modules_of(module, chosen)
    return tuple({type(part): None for part in found.values()})


def _units(module: nn.Module, config: Mapping[str, Any]) -> set[nn.Module]:
    """Return the modules of the whole model whose parameters are gathered together.

    Encoders of images are left to the model as a whole: a rank without an image does not call them, and all ranks must
    gather the same units.
    """
    if config["optimizer_config"]["zero_stage"] < 3:
        return set()
    layer_cls = (config["pipeline_config"] or {}).get("transformer_layer_cls")
    classes = {type(part) for part in named_transformer_layers(module, layer_cls).values()}
    towers = tuple(f"{path}." for path in find_towers(module))
    named = module.named_modules()
    return {part for name, part in named if type(part) in classes and not f"{name}.".startswith(towers)}


def _begin_sharding(config: Mapping[str, Any]) -> FullySharded:
    options = config["optimizer_config"]
    reshard = options["reshard_after_forward"]
    return FullySharded(
        shard_group_size=options["shard_group_size"],
        reshard_after_forward=True if reshard is None else reshard,
        offload=options["zero_offload"] == "parameters",
    )


class _Filling:
    """Shards each layer of a model without memory as soon as it is filled, so that no rank ever has all of them.

    Attributes:
        sharded: what has been sharded.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self.sharded = _begin_sharding(config)
        self._of_unit: dict[nn.Module, list[Tensor]] = {}
        self._unit_of: dict[Tensor, nn.Module] = {}

    def follow(self, module: nn.Module) -> None:
        """Find the layers of the whole model that have no memory."""
        its = _units(module, self._config)
        units = [part for part in module.modules() if part in its]
        for unit, parameters in parameters_by_unit([module], units).items():
            if unit is not module and parameters and all(it.is_meta for it in parameters):
                self._of_unit[unit] = parameters
                self._unit_of |= dict.fromkeys(parameters, unit)

    def __call__(self, filled: nn.Module) -> None:
        """Shard the layers of which this module was the last to be filled."""
        for unit in dict.fromkeys(self._unit_of[it] for it in filled.parameters(recurse=False) if it in self._unit_of):
            if unit in self._of_unit and not any(it.is_meta for it in self._of_unit[unit]):
                its = set(self._of_unit.pop(unit))
                names = [name for name, parameter in unit.named_parameters() if parameter in its]
                move_model_to_device(unit, get_device())  # which makes other objects of them on some devices
                self.sharded.add(unit, [unit.get_parameter(name) for name in names])


def _checkpoint_activations(
    model: NxDModel, classes: tuple[type[nn.Module], ...], *, keeps_products: bool, offload: bool
) -> None:
    here = {type(module) for module in model.modules()}
    present = [cls for cls in classes if cls in here]
    if present:
        apply_activation_checkpointing(model, present, keep=matmul_outputs if keeps_products else None, offload=offload)


def _split_if_plain(module: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """Split a transformers model over the ranks of a stage, unless `model_fn` has done so; leave other models alone.

    At every layout, a batch without labels has a loss of 0.

    Raises:
        ValueError: the model cannot be split; `model_fn` may call `nxd_layers.hf.parallelize(model, plan=...)`.
    """
    hf.use_static_shapes(module)
    splits_experts = get_mesh().splits_experts
    splits = splits_experts or config["tensor_parallel_size"] > 1 or config["context_parallel_size"] > 1
    is_done = _is_split(module) or hf.cuts_sequences(module)
    if splits and not is_done and is_transformers_model(module):
        hf.parallelize(module, expert_parallel=splits_experts, sequence_parallel=config["sequence_parallel"])
    if is_transformers_model(module):
        use_loss_over_labels(module)
    return module


def _leave_out_cache(module: nn.Module, config: Mapping[str, Any]) -> None:
    """With activation checkpointing, turn off the key-value cache of a transformers model during training.

    It is on by default, and a recomputed layer would append to it twice. `generate()` still uses a cache.
    """
    if config["activation_checkpoint_config"] is not None and is_transformers_model(module):
        own: Any = module.config
        for model_config in (own, own.get_text_config()):  # Idefics 3 reads its own
            if hasattr(model_config, "use_cache"):
                model_config.use_cache = False


def _param_init_fn_for(module: nn.Module, config: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the config's `param_init_fn`, adapted from plain layers to the parallel layers of a transformers model.

    The model's own `_init_weights` also fills the values that the model sets in its layers.
    """
    fill = given_param_init_fn(config)
    if fill is None or not is_transformers_model(module):
        return fill
    parameters = inspect.signature(fill).parameters.values()
    takes_device = sum(it.kind in _POSITIONAL and it.default is it.empty for it in parameters) > 1
    fill_plain = (lambda plain: fill(plain, torch.device("cpu"))) if takes_device else fill
    fill_own = hf.param_init_fn_of(module, fill_plain)
    return _with_zeros(fill_own) if config["model_init_config"]["weights_are_loaded"] else fill_own


def _with_zeros(fill: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Return a function that sets what `fill` leaves unset to zero, except for buffers that no file holds."""

    def fill_all(module: nn.Module) -> None:
        fill(module)
        stored = {**module._parameters, **module._buffers}
        for name, tensor in stored.items():
            if tensor is None or not tensor.is_floating_point() or name in module._non_persistent_buffers_set:
                continue
            if bool(tensor.isnan().any()):
                tensor.zero_()

    return fill_all


def _is_split(module: nn.Module) -> bool:
    return any(get_shard_spec(parameter) for parameter in module.parameters())


@dataclass(frozen=True)
class _HeadPadding:
    """The heads and modules to pad.

    Attributes:
        num_heads: number of heads of the whole model, before padding.
        classes: classes of the modules whose layers are padded; all layers if empty.
    """

    num_heads: int
    classes: tuple[type[nn.Module], ...]


def _plan_padding(module: nn.Module) -> _HeadPadding:
    """Padding of a whole model, which may be on the meta device.

    Padded are the layers of modules with a row-parallel layer of their own that takes whole heads in: it takes the
    padding away again. So an output head, and what does not come in heads, stays as it is.
    """
    num_heads = _number_of_heads(module)
    classes = {
        type(part): None
        for part in module.modules()
        if any(isinstance(it, RowParallelLinear) and it.input_size % num_heads == 0 for it in part.children())
    }
    return _HeadPadding(num_heads, tuple(classes))


def _pad_heads(model: nn.Module, padding: _HeadPadding) -> None:
    """Pad a model, or a rank's stages of it. Called by all ranks, which fail together."""

    def pad() -> None:
        present = tuple(cls for cls in padding.classes if any(type(module) is cls for module in model.modules()))
        if present or not padding.classes:  # a stage may have none
            pad_model(model, get_tensor_model_parallel_size(), padding.num_heads, present)

    run_or_raise_peer_error("padding the layers", pad, error_type=ValueError)


def _number_of_heads(module: nn.Module) -> int:
    config = getattr(module, "config", None)
    for name in _NUMBERS_OF_HEADS:
        if isinstance(heads := getattr(config, name, None), int):
            return heads
    raise ValueError(
        f"pad_model=True needs the number of attention heads, but {type(module).__name__} has no "
        f"config.{_NUMBERS_OF_HEADS[0]}; give it one, or call pad_model in model_fn"
    )
