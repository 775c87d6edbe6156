"""Which matrices of linear maps a model's parameter holds: what models fuse, and weights `[inputs, outputs]`.

A rule goes by the name of a layer and, where models differ in what they call so, by the class of the module that owns
it. Sizes are those of logical tensors, so the matrices are the same at every layout. The layers are those of
transformers 5 and of torch. Layers of other models count as well if they are called `gate_up_proj`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from nxd_state import get_shard_spec
from nxd_state.parameter_marks import MatrixLayout, get_matrix_layout
from torch import Tensor, nn

_SEEMS_FUSED = re.compile(r"qkv|query_key_value|c_attn|gate_up|in_proj(_weight|_ba)?$|to_kv|w13|fused", re.IGNORECASE)
_INSIDE_A_LAYER = ("weight", "base_layer", "lora_B", "default")  # the last of PEFT's names
_LAST_PROJECTIONS = ("o_proj", "dense", "out_proj", "c_proj", "Wo", "proj", "projection")

# Attention with one projection for all: all queries, then all keys, then all values.
_CONCATENATED = (
    "DbrxAttention",
    "DecisionTransformerGPT2Attention",
    "GPT2Attention",
    "ImageGPTAttention",
    "ModernBertAttention",
    "MptAttention",
    "Phi3Attention",
    "Phi4MultimodalAttention",
)
# The same, where each key head and its value head follow the query heads that attend to it.
_BY_HEAD = (
    "BloomAttention",
    "GPTNeoXAttention",
    "GPTNeoXJapaneseAttention",
    "MiniMaxLightningAttention",
    "PersimmonAttention",
)
_CONCATENATED_EXPERTS = ("Llama4TextExperts", "LongcatFlashExperts", "Step3p7Experts")


def matrix_layout_of(model: nn.Module, name: str) -> MatrixLayout | None:
    """Return how a parameter of a linear map, or of a stack of them, holds its matrices.

    Args:
        model: the model, or this rank's part of it.
        name: the parameter's name in it.

    Returns:
        The layout; None if by its name it holds several matrices, but nothing says which, so that it can only be taken
        for one.
    """
    parameter = model.get_parameter(name)
    marked, shape = get_matrix_layout(parameter), _logical_shape(parameter)
    if marked is not None or shape is None:
        return marked or MatrixLayout()
    path = name.split(".")
    owner = model.get_submodule(".".join(path[:-1]))
    if any(part.startswith("lora_A") for part in path):
        return MatrixLayout()
    is_factor = any(part.startswith("lora_B") for part in path)
    while len(path) > 1 and path[-1] in _INSIDE_A_LAYER:
        path.pop()
    dim = -1 if not is_factor and _stores_inputs_first(owner, parameter) else -2
    parent, layer = model.get_submodule(".".join(path[:-1])), path[-1].removeprefix("lora_B_")
    sections = _sections(_Fused(parent, layer, shape[dim], is_stack=len(shape) == 3))
    if sections is None or (sections and (min(sections) < 1 or shape[dim] % sum(sections))):
        return None
    return MatrixLayout(dim, sections)


def _logical_shape(parameter: Tensor) -> tuple[int, ...] | None:
    """Return None if the parameter's spec itself says which tensors it holds, or this rank holds padding only."""
    spec = get_shard_spec(parameter)
    return tuple(parameter.shape) if spec is None else spec.logical_shapes.get("")


def _stores_inputs_first(owner: nn.Module, parameter: Tensor) -> bool:
    """Whether a weight is `[inputs, outputs]` or a stack of such."""
    if parameter.dim() == 2:
        return _is(owner, "Conv1D")
    if isinstance(marked := getattr(owner, "is_transposed", None), bool):  # transformers' mark, and that of nxd-layers
        return marked
    stacks = (getattr(owner, name, None) for name in ("gate_up_proj", "down_proj"))
    both, down = (_logical_shape(it) if isinstance(it, Tensor) else None for it in stacks)
    return both is not None and down is not None and both[-1] == 2 * down[-2]  # [in, 2 * between] and [between, out]


@dataclass(frozen=True, eq=False)
class _Fused:
    """A layer, or a stack of experts' layers.

    Attributes:
        parent: the module that owns it.
        name: its name there.
        outputs: the outputs of all its matrices together.
        is_stack: whether it is a stack.
    """

    parent: Any
    name: str
    outputs: int
    is_stack: bool


_Sections: TypeAlias = tuple[int, ...] | None


def _sections(layer: _Fused) -> _Sections:
    """Return `MatrixLayout.sections`; None if they are unknown."""
    if layer.name in _RULES:
        return _RULES[layer.name](layer)
    return None if _SEEMS_FUSED.search(layer.name) else ()


def _gate_and_up(layer: _Fused) -> _Sections:
    halves = (layer.outputs // 2,) * 2
    if not layer.is_stack or _is(layer.parent, *_CONCATENATED_EXPERTS):
        return halves
    concatenated = getattr(layer.parent, "is_concatenated", None)  # transformers' mark of experts
    return halves if concatenated else None if concatenated is None else (1, 1)


def _halves_in(*classes: str) -> Callable[[_Fused], _Sections]:
    return lambda layer: (layer.outputs // 2,) * 2 if _is(layer.parent, *classes) else ()


def _of_attributes(*names: str) -> Callable[[_Fused], _Sections]:
    """Return a rule by which attributes of the owner are the numbers of outputs."""

    def sections(layer: _Fused) -> _Sections:
        found = [getattr(layer.parent, name, None) for name in names]
        known = tuple(it for it in found if isinstance(it, int))
        return known if len(known) == len(names) else None

    return sections


def _of_torch_attention(layer: _Fused) -> _Sections:
    return (layer.parent.embed_dim,) * 3 if isinstance(layer.parent, nn.MultiheadAttention) else None


def _queries_keys_values(layer: _Fused) -> _Sections:
    attention = layer.parent
    queries = _inputs_of_last_projection(attention)
    if queries is None:
        return None
    each = (layer.outputs - queries) // 2
    arrangement = _arrangement(attention, layer)
    if arrangement == "concatenated":
        return queries, each, each
    if arrangement == "by head" and each > 0 and (head := _head_size(attention)) is not None:
        return queries // each * head, head, head
    return (queries, queries) if arrangement == "keys and values" else None


def _arrangement(attention: Any, layer: _Fused) -> str | None:
    """Return how an attention's one projection holds queries, keys and values; None if this is unknown."""
    across = bool(getattr(attention, "is_cross_attention", False))
    if _is(attention, "FalconAttention"):
        return "concatenated" if attention.multi_query and not attention.new_decoder_architecture else "by head"
    if _is(attention, "GPTBigCodeAttention") and not across:
        return "concatenated" if attention.multi_query else "by head"
    if _is(attention, *_BY_HEAD):
        return "by head"
    of_vision = layer.name == "qkv" and type(attention).__module__.startswith(("transformers.models.", "timm."))
    if _is(attention, *_CONCATENATED) or of_vision:
        return "keys and values" if across else "concatenated"
    return None


_RULES: dict[str, Callable[[_Fused], _Sections]] = {
    "gate_up_proj": _gate_and_up,
    "Wi": _halves_in("ModernBertMLP", "ModernBertDecoderMLP"),
    "input_linear": _halves_in("GraniteMoeHybridMLP", "GraniteMoeSharedMLP", "GraniteMoeSWAMLP"),
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv"), _queries_keys_values),
    "kv_b_proj": _of_attributes("qk_nope_head_dim", "v_head_dim"),  # of latent attention, head by head
    "in_proj_qkv": _of_attributes("key_dim", "key_dim", "value_dim"),  # of linear attention
    "in_proj_weight": _of_torch_attention,
}


def _inputs_of_last_projection(attention: nn.Module) -> int | None:
    """Return the outputs of all query heads together, which the last projection takes."""
    for name in _LAST_PROJECTIONS:
        layer: Any = getattr(attention, name, None)
        layer = getattr(layer, "base_layer", layer)
        weight = getattr(layer, "weight", None)
        shape = _logical_shape(weight) if isinstance(weight, Tensor) and weight.dim() == 2 else None
        if shape is not None:
            return shape[0 if _is(layer, "Conv1D") else 1]
    return None


def _head_size(attention: nn.Module) -> int | None:
    found = (getattr(attention, name, None) for name in ("head_dim", "head_size"))
    return next((it for it in found if isinstance(it, int)), None)


def _is(module: nn.Module, *names: str) -> bool:
    """Whether a module is of a class of one of these names, or of one derived from it."""
    return any(cls.__name__ in names for cls in type(module).__mro__)
