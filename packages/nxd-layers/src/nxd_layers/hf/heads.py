"""The heads of attention modules: counting them, placing them on ranks, and telling the modules their new counts."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from nxd_layers.hf.head_layout import (
    HeadLayout,
    head_layout,
    key_value_linear,
    output_linear,
    place_query_parameter,
    query_linear,
)
from nxd_layers.hf.plans import joined
from nxd_layers.hf.styles import Target
from nxd_layers.hf.transformers_models import text_config

_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_MARKS = ("head_dim", "head_size", "qk_head_dim", "v_head_dim", "num_key_value_groups")
_GROUPS = "num_key_value_groups"
_KEY_VALUE_LAYERS = ("k_proj", "v_proj")
_VALUE_HEAD_SIZES = ("v_head_dim", "head_dim", "head_size")
_SIZE = "split_size"  # of all heads side by side
_OUTPUT_LAYERS = ("o_proj", "dense", "out_proj")
# With heads of queries, keys and values side by side, or with keys and values of each query head.
_LAYERS_OF_EQUAL_HEADS = ("query_key_value", "kv_b_proj")


def attentions(model: nn.Module, split: Iterable[str]) -> dict[str, nn.Module]:
    """The attention modules among the parents of layers whose outputs are split.

    Args:
        model: the whole model.
        split: paths of the layers.
    """
    parents = dict.fromkeys(path.rpartition(".")[0] for path in split)
    found = {path: model.get_submodule(path) for path in parents}
    marks = (*_MARKS, *_QUERY_COUNTS)
    return {path: module for path, module in found.items() if any(hasattr(module, mark) for mark in marks)}


def layout_of(path: str, attention: nn.Module, model: nn.Module, tp_size: int) -> HeadLayout:
    """Where the heads of an attention module will lie.

    Raises:
        ValueError: the module does not say how many it has, or they are not grouped evenly.
    """
    num_heads = _num_heads(attention, model)
    key_value_heads = _num_key_value_heads(attention, model)
    if num_heads is None:
        raise ValueError(
            f"{path} ({type(attention).__name__}) has neither num_heads nor config.num_attention_heads, so that its "
            "heads cannot be distributed over ranks; leave its layers out of the plan, or give it one of them"
        )
    try:
        return head_layout(num_heads, key_value_heads or num_heads, tp_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def place(target: Target, styles: Mapping[str, str], layout: HeadLayout) -> set[str]:
    """Split the layers of an attention module whose heads do not lie in equal runs.

    Args:
        target: the module.
        styles: of all paths.
        layout: of its heads.

    Returns:
        The paths that are done; styles of whole norms of single heads are left to do.

    Raises:
        ValueError: the module has something of a style that is not made for it.
    """
    own = {path: style for path, style in styles.items() if path.startswith(joined(target.path, ""))}
    # In the model's order, so that all ranks raise the same error.
    done = [path for path, style in own.items() if style not in ("replicated_with_grad_allreduce", "local_params")]
    if not any(own[path] == "rowwise" for path in done):
        raise ValueError(_cannot_place(target.path, "without a rowwise layer of its own", layout))
    for path in done:
        part = Target(target.model, path)
        if own[path] == "rowwise" and not part.is_parameter:
            part.replace(output_linear(part.of_class(nn.Linear), layout))
        elif own[path] != "colwise" or part.parent is not target.module:
            raise ValueError(_cannot_place(path, own[path], layout))
        elif part.is_parameter:
            place_query_parameter(part.parent, part.name, layout)
        elif part.name in _KEY_VALUE_LAYERS:
            part.replace(key_value_linear(part.of_class(nn.Linear), layout))
        else:
            part.replace(query_linear(part.of_class(nn.Linear), layout))
    return set(done)


def tell_counts(path: str, attention: nn.Module, layout: HeadLayout) -> None:
    """Tell an attention module how many heads are on this rank.

    Raises:
        ValueError: the module counts heads in a way that is not understood.
    """
    local = {
        **dict.fromkeys(_QUERY_COUNTS, (layout.num_heads, layout.heads_per_rank)),
        **dict.fromkeys(_KEY_VALUE_COUNTS, (layout.num_key_value_heads, layout.key_value_heads_per_rank)),
        _GROUPS: (layout.num_heads // layout.num_key_value_heads, layout.queries_per_copy),
    }
    for name, (whole, here) in local.items():
        count = getattr(attention, name, None)
        if not isinstance(count, int):
            continue
        if count != whole:
            raise ValueError(
                f"{path}.{name} is {count}, where {whole} is expected; its heads cannot be distributed over ranks"
            )
        setattr(attention, name, here)
    if hasattr(attention, _SIZE):
        setattr(attention, _SIZE, getattr(attention, _SIZE) // layout.num_heads * layout.heads_per_rank)
    regrouped = layout.queries_per_copy != layout.num_heads // layout.num_key_value_heads
    if regrouped and not hasattr(attention, _GROUPS):
        raise ValueError(
            f"tensor_model_parallel_size={layout.tp_size} changes how many query heads of {path} share a key/value "
            f"head, which the module takes from elsewhere than {_GROUPS}; use a degree that divides "
            f"{layout.num_key_value_heads}"
        )


def _num_heads(attention: nn.Module, model: nn.Module) -> int | None:
    """Of this layer, which may differ from the config's: by the size of what goes into its last projection."""
    sizes = [getattr(attention, name, None) for name in _VALUE_HEAD_SIZES]
    size = next((it for it in sizes if isinstance(it, int)), None)
    output = next((getattr(attention, name) for name in _OUTPUT_LAYERS if hasattr(attention, name)), None)
    if size is not None and isinstance(output, nn.Linear) and output.in_features % size == 0:
        return output.in_features // size
    return _count(_QUERY_COUNTS, attention, model)


def _num_key_value_heads(attention: nn.Module, model: nn.Module) -> int | None:
    """None where each query head has its own."""
    key, size = getattr(attention, "k_proj", None), getattr(attention, "head_dim", None)
    if isinstance(key, nn.Linear) and isinstance(size, int) and key.out_features % size == 0:
        return key.out_features // size
    if any(hasattr(attention, name) for name in _LAYERS_OF_EQUAL_HEADS):
        return None
    return _count(_KEY_VALUE_COUNTS, attention, model)


def _count(names: Iterable[str], attention: nn.Module, model: nn.Module) -> int | None:
    config: Any = getattr(attention, "config", None) or text_config(model)
    for holder in (attention, config):
        for name in names:
            if isinstance(count := getattr(holder, name, None), int):
                return count
    return None


def _cannot_place(path: str, style: str, layout: HeadLayout) -> str:
    return (
        f"{path} ({style}): tensor_model_parallel_size={layout.tp_size} does not divide {layout.num_heads} query or "
        f"{layout.num_key_value_heads} key/value heads, and this layer cannot be padded or copied; use a degree that "
        "divides both"
    )
