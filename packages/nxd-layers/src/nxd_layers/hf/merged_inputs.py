"""The inputs of the language model of a multimodal model, after image features have been merged into its embeddings.

The model around it has computed embeddings, features and positions of full sequences by then. Context parallelism cuts
all inputs of the language model. Some models also add features of images to the hidden states between layers
("DeepStack", Meng et al. 2024), or read them by cross-attention; sequence parallelism splits those of these inputs that
meet hidden states outside of blocks.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

Part = Callable[[Tensor, int], Tensor]  # returns a rank's part of a tensor along a dim

_STATES = "cross_attention_states"  # features of images for cross-attention, `[images, ..., hidden]`
_MASK = "cross_attention_mask"  # `[batch, 1, seq, keys]`
_ROWS_WITH_KEYS = "full_text_row_masked_out_mask"  # `[batch, 1, seq, 1]`
# The places of images in the sequence, bool `[batch, seq]` or `[batch, seq, 1]`, and their features `[places, hidden]`,
# in a list of those added after each of the first layers, or in a dict of those added before a layer, by its index.
_DEEP_STACKS = (("visual_pos_masks", "deepstack_visual_embeds"), ("vision_mask", "deepstack_features"))
_BEFORE_FIRST_LAYER = "nxd_features_before_first_layer"  # `[batch, seq, hidden]`, our own argument of layers


def cut_merged_inputs(given: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """Return a rank's part of the inputs that hold features of images beside the embeddings, by name.

    Args:
        given: the arguments of the language model, by name.
        part: cuts a tensor that has all positions.

    """
    changed = {name: part(given[name], 2) for name in (_MASK, _ROWS_WITH_KEYS) if given.get(name) is not None}
    return changed | _cut_deep_stacks(given, part)


def check_known(given: Mapping[str, Any], cut: Collection[str]) -> None:
    """Raise a ValueError if a language model gets tensors that are not known here and may have all positions.

    Args:
        given: its arguments, by name.
        cut: the names of arguments that are cut elsewhere.
    """
    known = {*cut, _STATES, _MASK, _ROWS_WITH_KEYS, *(name for names in _DEEP_STACKS for name in names)}
    for name, value in given.items():
        values = list(value.values()) if isinstance(value, Mapping) else value
        values = values if isinstance(values, list | tuple) else [values]
        if name not in known and any(isinstance(it, Tensor) and it.dim() for it in values):
            raise ValueError(
                f"the language model gets {name}, which cannot be split over context-parallel ranks; use "
                "context_parallel_size=1"
            )


def split_merged_inputs(given: Mapping[str, Any], num_layers: int, part: Part) -> dict[str, Any]:
    """Return those inputs with features of images that meet hidden states between the layers, as a rank has them.

    Args:
        given: the arguments of the language model, by name.
        num_layers: number of its layers; the hidden states are full before the first and after the last.
        part: splits a tensor that has all positions, along the sequence.

    Returns:
        The arguments that change, by name. One of them is for the first layer: see `add_features_before_first_layer`.
    """
    given, changed = dict(given), {}
    for places, features in _DEEP_STACKS:
        stack = given.get(features)
        if isinstance(stack, Mapping) and 0 in stack:
            changed[_BEFORE_FIRST_LAYER] = _in_sequence(given[places], stack[0])
            given[features] = {layer: it for layer, it in stack.items() if layer}
        elif isinstance(stack, list) and len(stack) >= num_layers:
            raise ValueError(
                f"sequence_parallel=True is not supported for {features} that are added after the last of "
                f"{num_layers} layers; leave sequence_parallel out"
            )
    if given.get(_ROWS_WITH_KEYS) is not None:
        changed[_ROWS_WITH_KEYS] = part(given[_ROWS_WITH_KEYS], 2)
    return changed | _cut_deep_stacks(given, part)


def add_features_before_first_layer(kwargs: Mapping[str, Any], hidden: Tensor) -> Tensor:
    """Return the full hidden states with the features that `split_merged_inputs` has set aside."""
    features = kwargs.get(_BEFORE_FIRST_LAYER)
    return hidden if features is None else hidden + features


def without_features_before_first_layer(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer as the model knows them."""
    return {name: it for name, it in kwargs.items() if name != _BEFORE_FIRST_LAYER}


def cross_attentions(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that are attention to features of images."""
    return [child for child in layer.children() if _reads_features(child)] if _reads_features(layer) else []


def are_cross_attentions_skipped(kwargs: Mapping[str, Any]) -> bool:
    """Return whether layers with attention to features are skipped, from the arguments of another layer."""
    return kwargs.get(_STATES) is None


def _reads_features(module: nn.Module) -> bool:
    return _STATES in inspect.signature(module.forward).parameters


def _cut_deep_stacks(given: Mapping[str, Any], part: Part) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for mask_name, features_name in _DEEP_STACKS:
        places, stack = given.get(mask_name), given.get(features_name)
        if places is None or stack is None:
            continue
        own = part(places, 1)
        of_rank = {
            layer: part(_in_sequence(places, features), 1)[own.flatten(1)]
            for layer, features in (stack.items() if isinstance(stack, Mapping) else enumerate(stack))
        }
        changed[mask_name] = own
        changed[features_name] = of_rank if isinstance(stack, Mapping) else list(of_rank.values())
    return changed


def _in_sequence(places: Tensor, features: Tensor) -> Tensor:
    """Return the features at their places and zeros elsewhere, `[batch, seq, hidden]`."""
    empty = features.new_zeros(*places.shape[:2], features.shape[-1])
    return empty.masked_scatter(places.flatten(1).unsqueeze(-1), features)
