"""The heads of attention modules: counts them, places them on ranks, and tells the modules how many are there."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from nxd_layers.hf.head_layout import (
    HeadLayout,
    check_query_parameter,
    head_layout,
    key_value_linear,
    output_linear,
    place_query_parameter,
    query_linear,
)
from nxd_layers.hf.plans import join_path
from nxd_layers.hf.styles import Apply, Target, replace_linear
from nxd_layers.hf.transformers_models import text_config

_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_MARKS = ("head_dim", "head_size", "qk_head_dim", "v_head_dim", "num_key_value_groups")
_GROUPS = "num_key_value_groups"
_KEY_VALUE_LAYERS = ("k_proj", "v_proj")
_VALUE_HEAD_SIZES = ("v_head_dim", "head_dim", "head_size")
_SIZE = "split_size"  # of all heads together
_OUTPUT_LAYERS = ("o_proj", "dense", "out_proj")
# Layers with as many key and value heads as query heads.
_LAYERS_OF_EQUAL_HEADS = ("query_key_value", "kv_b_proj")


def attentions(model: nn.Module, split: Iterable[str]) -> dict[str, nn.Module]:
    """Return the attention modules among the parents of layers whose outputs are sharded.

    Args:
        model: the unsharded model.
        split: paths of the layers.
    """
    parents = dict.fromkeys(path.rpartition(".")[0] for path in split)
    found = {path: model.get_submodule(path) for path in parents}
    marks = (*_MARKS, *_QUERY_COUNTS)
    return {path: module for path, module in found.items() if any(hasattr(module, mark) for mark in marks)}


def layout_of(path: str, attention: nn.Module, model: nn.Module, tp_size: int) -> HeadLayout:
    """Return where the heads of an attention module will be.

    Raises:
        ValueError: the number of heads is unknown, or they are not in groups of equal size.
    """
    num_heads = _num_heads(attention, model)
    key_value_heads = _num_key_value_heads(attention, model)
    if num_heads is None:
        raise ValueError(
            f"{path} ({type(attention).__name__}) has neither num_heads nor config.num_attention_heads, so its "
            "heads cannot be distributed over ranks; leave its layers out of the plan, or set one of them"
        )
    try:
        return head_layout(num_heads, key_value_heads or num_heads, tp_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def plan_heads(target: Target, styles: Mapping[str, str], layout: HeadLayout) -> dict[str, Apply]:
    """Check the layers of an attention module whose heads are not in equal runs, and return how to shard each of them.

    Returns:
        By path, the function that shards it. Full norms of single heads are left to their styles.
    """
    own = {path: style for path, style in styles.items() if path.startswith(join_path(target.path, ""))}
    # In the model's order, so that all ranks raise the same error.
    placed = [path for path, style in own.items() if style not in ("replicated_with_grad_allreduce", "local_params")]
    if not any(own[path] == "rowwise" for path in placed):
        raise ValueError(_cannot_place(target.path, "without a rowwise layer of its own", layout))
    return {path: _placement(Target(target.model, path), target.module, own[path], layout) for path in placed}


def _placement(part: Target, attention: nn.Module, style: str, layout: HeadLayout) -> Apply:
    if style == "rowwise" and not part.is_parameter:
        return replace_linear(part, partial(output_linear, layout=layout))
    if style != "colwise" or part.parent is not attention:
        raise ValueError(_cannot_place(part.path, style, layout))
    if part.is_parameter:
        check_query_parameter(part.parent, part.name, layout)
        return partial(place_query_parameter, part.parent, part.name, layout)
    make = key_value_linear if part.name in _KEY_VALUE_LAYERS else query_linear
    return replace_linear(part, partial(make, layout=layout))


def set_head_counts(attention: nn.Module, layout: HeadLayout) -> None:
    """Tell an attention module how many heads are on this rank; see `check_counts`."""
    for name, (_, here) in _counts(attention, layout).items():
        setattr(attention, name, here)
    if hasattr(attention, _SIZE):
        setattr(attention, _SIZE, getattr(attention, _SIZE) // layout.num_heads * layout.heads_per_rank)


def check_counts(path: str, attention: nn.Module, layout: HeadLayout) -> None:
    """Raise a ValueError if an attention module counts heads in an unknown way."""
    for name, (full, _) in _counts(attention, layout).items():
        if (count := getattr(attention, name)) != full:
            raise ValueError(
                f"{path}.{name} is {count}, but {full} was expected from the sizes of its layers, so its heads cannot "
                "be distributed over ranks; leave its layers out of the plan"
            )
    regrouped = layout.queries_per_copy != layout.num_heads // layout.num_key_value_heads
    if regrouped and not hasattr(attention, _GROUPS):
        raise ValueError(
            f"tensor_model_parallel_size={layout.tp_size} changes how many query heads of {path} share a key/value "
            f"head, which the module does not read from {_GROUPS}; use a degree that divides "
            f"{layout.num_key_value_heads}"
        )


def _counts(attention: nn.Module, layout: HeadLayout) -> dict[str, tuple[int, int]]:
    """Return the counts that a module has, by name: of the full model, and on this rank."""
    counts = {
        **dict.fromkeys(_QUERY_COUNTS, (layout.num_heads, layout.heads_per_rank)),
        **dict.fromkeys(_KEY_VALUE_COUNTS, (layout.num_key_value_heads, layout.key_value_heads_per_rank)),
        _GROUPS: (layout.num_heads // layout.num_key_value_heads, layout.queries_per_copy),
    }
    return {name: both for name, both in counts.items() if isinstance(getattr(attention, name, None), int)}


def _num_heads(attention: nn.Module, model: nn.Module) -> int | None:
    """Return the number in this layer, by its last projection's inputs: it may differ from the config's."""
    sizes = [getattr(attention, name, None) for name in _VALUE_HEAD_SIZES]
    size = next((it for it in sizes if isinstance(it, int)), None)
    output = next((getattr(attention, name) for name in _OUTPUT_LAYERS if hasattr(attention, name)), None)
    if size is not None and isinstance(output, nn.Linear) and output.in_features % size == 0:
        return output.in_features // size
    return _count(_QUERY_COUNTS, attention, model)


def _num_key_value_heads(attention: nn.Module, model: nn.Module) -> int | None:
    """Return None where each query head has its own."""
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
