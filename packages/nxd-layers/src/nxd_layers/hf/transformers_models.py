"""The only module that imports the transformers library: its configs, its models, and the metadata they provide."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from nxd_state import has_dynamic_shapes, is_multimodal
from nxd_state.transformers_models import has_transformers_base
from torch import nn

from nxd_layers.experts import RouterBase, RouterLayer

_BIAS = "e_score_correction_bias"
# Some routers choose among more than the experts: ZAYA's have a class for no expert, LongCat's have experts that return
# their input.
_NUM_CHOICES = ("num_router_classes", "n_routed_experts", "num_experts")


def is_transformers_config(config: object) -> bool:
    """Return whether an object is a config of transformers."""
    return has_transformers_base(config, "PreTrainedConfig") or has_transformers_base(config, "PretrainedConfig")


def model_type_of(model: Any) -> str:
    """Return the `model_type` of a model's config, or its class's name if it has no config."""
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is the linear layer of transformers that stores its weight as `[in, out]`."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_activation(module: nn.Module) -> bool:
    """Return whether a module is an activation of torch with parameters, or of a class in transformers' table."""
    if isinstance(module, nn.PReLU):
        return True
    if "transformers" not in sys.modules:  # the module is not of one of its models
        return False
    from transformers.activations import ACT2CLS  # noqa: PLC0415 - optional

    classes = tuple(it[0] if isinstance(it, tuple) else it for it in ACT2CLS.values())
    return isinstance(module, classes)


def look_for_documents_by(look: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the search for documents in rows, from which transformers makes masks, on devices of static shapes.

    Args:
        look: a function that returns the number of each position's document, `[batch, seq]`, from position ids.
    """
    from transformers import masking_utils  # noqa: PLC0415 - optional

    theirs: Callable[[torch.Tensor], torch.Tensor | None] = masking_utils.find_packed_sequence_indices

    def find_documents(position_ids: torch.Tensor) -> torch.Tensor | None:
        has_own_way = has_dynamic_shapes(position_ids) or position_ids.is_meta
        return theirs(position_ids) if has_own_way else look(position_ids)

    _replace_search(find_documents, theirs)


def find_no_documents_on_meta() -> None:
    """Take each row for one document when masks are made on the meta device, whose positions have no values."""
    from transformers import masking_utils  # noqa: PLC0415 - optional

    theirs: Callable[[torch.Tensor], torch.Tensor | None] = masking_utils.find_packed_sequence_indices

    def find_unless_meta(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if position_ids.is_meta else theirs(position_ids)

    _replace_search(find_unless_meta, theirs)


def intercept_document_search(is_taken_over: Callable[[], bool]) -> None:
    """Call a function before a model searches its positions for documents to separate.

    Args:
        is_taken_over: the function; if it returns true, the model finds no documents.
    """
    from transformers import masking_utils  # noqa: PLC0415 - optional

    theirs: Callable[[torch.Tensor], torch.Tensor | None] = masking_utils.find_packed_sequence_indices

    def ask_before(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if is_taken_over() else theirs(position_ids)

    _replace_search(ask_before, theirs)


def _replace_search(ours: Any, theirs: Any) -> None:
    """Put a function before those that are there, unless it is one of them."""
    from transformers import masking_utils  # noqa: PLC0415 - optional

    ours.replaced, there = theirs, theirs
    while there is not None:
        if there.__qualname__ == ours.__qualname__:
            return
        there = getattr(there, "replaced", None)
    masking_utils.find_packed_sequence_indices = ours


def register_experts(name: str, forward: Callable[..., torch.Tensor]) -> None:
    """Register an implementation of experts, which a config can then name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415 - optional

    ALL_EXPERTS_FUNCTIONS.register(name, forward)


def build_on_meta(config: Any) -> nn.Module:
    """Build the causal language model of a config on the meta device, in the config's dtype.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers has no causal language model for the config.
    """
    try:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ImportError(
            "building a model from a config needs transformers: pip install 'nxd-layers[transformers]'"
        ) from error
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model


def rope_frequencies(sizes: Mapping[str, Any], length: int) -> tuple[tuple[float, ...], float]:
    """Return rotary frequencies from the `ROPE_INIT_FUNCTIONS` of transformers.

    Args:
        sizes: arguments of a `LlamaConfig` of transformers; `rope_parameters` names the type.
        length: length of the sequence, on which the types "dynamic" and "longrope" depend.

    Returns:
        Radians per position, `head/2` of them, and the factor of cosines and sines.
    """
    rope = dict(sizes["rope_parameters"])
    named = f"rope_scaling={ {name: value for name, value in rope.items() if name != 'rope_theta'} }"
    try:
        from transformers import LlamaConfig  # noqa: PLC0415 - optional
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(f"{named} needs transformers: pip install 'nxd-layers[transformers]'") from error
    try:
        with torch.device("cpu"):
            make = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
            config = LlamaConfig(**{**sizes, "rope_parameters": rope})
            # Its models pass the lengths of long sequences as tensors, and so round in float32.
            given = torch.tensor(length) if length > config.max_position_embeddings else length
            frequencies, scaling = make(config, "cpu", seq_len=given)
    except Exception as error:  # a table may hold anything
        raise ValueError(f"{named} is not usable: {type(error).__name__}: {error}") from error
    return tuple(frequencies.tolist()), float(scaling)


def register_attention(name: str, attend: Callable[..., Any], make_mask: Callable[..., Any]) -> None:
    """Register an attention and its masks under a name; see `AttentionInterface` of transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - optional

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)


def empty_cache() -> Any:
    """Return a cache of transformers for the keys and values of any number of layers."""
    from transformers import DynamicCache  # noqa: PLC0415 - optional

    return DynamicCache()


def transformers_plan(model: Any) -> Mapping[str, str]:
    """Return the model's own tensor-parallel plan, head and embeddings included; empty if it has none."""
    return dict(getattr(model, "_tp_plan", None) or {})


def transformers_expert_plan(model: Any) -> Mapping[str, str]:
    """Return the model's own expert-parallel plan; empty if it has none."""
    return dict(getattr(model, "_ep_plan", None) or {})


def _router_class(model: Any) -> type[nn.Module] | None:
    """Return the class of the modules whose first output is a router's logits; None if the model names none."""
    spec = (getattr(getattr(model, "base_model", None), "_can_record_outputs", None) or {}).get("router_logits")
    target = spec if isinstance(spec, type) else getattr(spec, "target_class", None)
    return None if getattr(spec, "index", 0) != 0 else target


def find_routers(model: nn.Module) -> dict[str, RouterLayer]:
    """Return the routers of an unsharded model by name, in the order of its layers.

    A router of transformers is found by what the model says of the outputs it can record. Routers whose number of
    experts is unknown, and those that return their logits in another place than the first, are not returned.
    """
    recorded = _router_class(model)
    found: dict[str, RouterLayer] = {}
    for path, module in model.named_modules():
        is_own = isinstance(module, RouterBase)
        if not (is_own or (recorded is not None and isinstance(module, recorded))):
            continue
        num_experts = next((it for name in _NUM_CHOICES if (it := getattr(module, name, None))), None)
        if num_experts is None and isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            num_experts = weight.shape[0]
        top_k = getattr(module, "top_k", None) or getattr(text_config(model), "num_experts_per_tok", None)
        if isinstance(num_experts, int) and isinstance(top_k, int):
            found[path] = RouterLayer(num_experts, top_k, _bias_of(model, path, num_experts), keeps_order=not is_own)
    return found


def _bias_of(model: nn.Module, router: str, num_experts: int) -> str | None:
    """Return the path of the router's bias, which is in the router or in the block around it."""
    block = router.rpartition(".")[0]
    for outer in (router, block):
        module = model.get_submodule(outer)
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
            if name.rpartition(".")[2] == _BIAS and tensor.numel() == num_experts:
                return f"{outer}.{name}".lstrip(".")
    return None


def base_model_path(model: Any) -> str:
    """Return the path of the model without its head; "" for a model without a head."""
    return "" if model.base_model is model else str(model.base_model_prefix)


def text_config(model: Any) -> Any:
    """Return the part of the model's config that describes its text decoder; None for a model without a config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def language_model(model: Any) -> Any:
    """Return the part of a multimodal model that reads text and merged features; None for other models."""
    decoder = model.get_decoder() if is_multimodal(model) else model
    return None if decoder is model else decoder


def input_embeddings(model: Any) -> nn.Module | None:
    """Return the model's token embeddings, or None."""
    return _asked(model, "get_input_embeddings")


def output_embeddings(model: Any) -> nn.Module | None:
    """Return the model's head, or None."""
    return _asked(model, "get_output_embeddings")


def adds_z_loss(model: Any) -> bool:
    """Return whether the forward adds a loss of the logits of all positions to that of `loss_function` (Bamba)."""
    return bool(getattr(model.config, "z_loss_coefficient", 0))


def _asked(model: Any, getter: str) -> nn.Module | None:
    try:
        found: nn.Module | None = getattr(model, getter)()
    except (NotImplementedError, AttributeError):  # models of images or of sounds have none
        return None
    return found
