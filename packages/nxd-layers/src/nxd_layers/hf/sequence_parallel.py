"""Sequence parallelism around unmodified blocks (Korthikanti et al. 2022).

Between the first and the last decoder layer each rank has `seq/tp` positions. Attention and feed-forward blocks get the
full sequence, gathered before them, and their row-parallel layers leave the sum split again. So norms and residual sums
are computed on a part, and the code of the blocks sees full sequences.
A block that does not end in one row-parallel layer, such as experts, sums its output as without sequence parallelism,
and each rank keeps its part: the same memory, with an all-reduce instead of a reduce-scatter.
A multimodal model has merged the features of images into the embeddings before the first decoder layer of its language
model; its towers compute full sequences. Features that are added between layers are split like the hidden states.
Without gradients (evaluation, `generate()`) sequences stay full, and may have any length.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nxd_layers.hf.layers import mark_partial_gradients
from nxd_layers.hf.merged_inputs import (
    add_features_before_first_layer,
    are_cross_attentions_skipped,
    cross_attentions,
    split_merged_inputs,
    without_features_before_first_layer,
)
from nxd_layers.hf.plans import is_within
from nxd_layers.hf.split_activations import share_inputs, shared_inputs_of
from nxd_layers.hf.transformers_models import language_model
from nxd_layers.linear import RowParallelLinear
from nxd_layers.mappings import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region

SEQUENCE_DIM = 1  # of hidden states [batch, seq, hidden]
_SUMS = {"rowwise", "moe_tp_experts", "ep_dispatch_experts", "all_reduce", "colwise_gather_output", "colwise_rep"}
_OF_LINEAR_BLOCKS = ("colwise", "rowwise", "replicated_with_grad_allreduce", "local_params")


@dataclass(frozen=True)
class SequenceBlocks:
    """The parts of a model that sequence parallelism changes.

    Attributes:
        layers: paths of the decoder layers, in order.
        blocks: paths of the modules in them that need full sequences, and end in a row-parallel layer.
        summed_blocks: paths of those that need full sequences, and sum their output themselves.
    """

    layers: Sequence[str]
    blocks: Sequence[str]
    summed_blocks: Sequence[str]


class SequenceParallelHooks:
    """The hooks that split hidden states along the sequence in a part of a model.

    Args:
        model: a model that is sharded over the tensor-parallel ranks.
        found: its layers and blocks.
    """

    def __init__(self, model: nn.Module, found: SequenceBlocks) -> None:
        layers, blocks, summed_blocks = (
            [model.get_submodule(path) for path in paths] for paths in (found.layers, found.blocks, found.summed_blocks)
        )
        self._rows = [it for block in blocks for it in block.modules() if isinstance(it, RowParallelLinear)]
        self._is_active = True
        inside_blocks = {parameter for block in (*blocks, *summed_blocks) for parameter in block.parameters()}
        for layer in layers:
            mark_partial_gradients([it for it in layer.parameters() if it not in inside_blocks])
        for row in self._rows:
            row.sequence_dimension = SEQUENCE_DIM
            row.sequence_parallel_enabled = True
            mark_partial_gradients([] if row.bias is None else [row.bias])
        for block in blocks:
            share_inputs(block, least=1)  # so that they can reduce-scatter its gradient
        self._num_layers = len(layers)
        first, last = layers[0], layers[-1]
        decoder = language_model(model)
        if decoder is not None:
            decoder.register_forward_pre_hook(self._split_features, with_kwargs=True)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)
        first.register_forward_pre_hook(self._split, with_kwargs=True)
        for layer in layers[1:]:
            layer.register_forward_pre_hook(_drop_features, with_kwargs=True)
        for block in (*blocks, *summed_blocks):
            block.register_forward_pre_hook(self._gather, with_kwargs=True)
        for block in summed_blocks:
            block.register_forward_hook(self._keep_part, with_kwargs=True)
        last.register_forward_hook(self._leave)
        if cross_attentions(last):
            never_skipped = [it for it in layers if not cross_attentions(it)]
            never_skipped[-1].register_forward_hook(self._leave_if_last, with_kwargs=True)

    def _begin(self, model: Any, args: Any, kwargs: Any) -> None:
        self._set_active(torch.is_grad_enabled())
        asked = kwargs.get("output_hidden_states")
        if self._is_active and (model.config.output_hidden_states if asked is None else asked):
            raise ValueError(
                "output_hidden_states=True would return parts of the hidden states; ask for them under "
                "torch.no_grad(), where sequences stay full, or leave sequence_parallel out"
            )

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._set_active(True)  # for layers that are recomputed in backward

    def _set_active(self, is_active: bool) -> None:
        self._is_active = is_active
        for row in self._rows:
            row.sequence_parallel_enabled = is_active

    def _split_features(self, decoder: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._is_active:
            return args, kwargs
        return args, {**kwargs, **split_merged_inputs(kwargs, self._num_layers, scatter_to_sequence_parallel_region)}

    def _split(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = change_hidden_states(args, kwargs, partial(add_features_before_first_layer, kwargs))
        kwargs = without_features_before_first_layer(kwargs)
        return self._changed(args, kwargs, lambda it: scatter_to_sequence_parallel_region(it, SEQUENCE_DIM))

    def _gather(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        # Column-parallel layers of the block send gradients to the part; other readers of `full` have full gradients.
        def gathered(part: Tensor) -> Tensor:
            full = gather_from_sequence_parallel_region(part, SEQUENCE_DIM, to_model_parallel=False)
            for shared in shared_inputs_of(block):
                shared.gathered(full, part, SEQUENCE_DIM)
            return full

        return self._changed(args, kwargs, gathered)

    def _changed(self, args: Any, kwargs: Any, change: Any) -> Any:
        return change_hidden_states(args, kwargs, change) if self._is_active else (args, kwargs)

    def _keep_part(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        full = args[0] if args else kwargs["hidden_states"]
        # Experts may return [batch * seq, hidden].
        return self._changed_output(
            output, lambda it: scatter_to_sequence_parallel_region(it.reshape(full.shape), SEQUENCE_DIM)
        )

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> Any:
        return self._changed_output(
            output, lambda it: gather_from_sequence_parallel_region(it, SEQUENCE_DIM, to_model_parallel=False)
        )

    def _leave_if_last(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return self._leave(layer, args, output) if are_cross_attentions_skipped(kwargs) else output

    def _changed_output(self, output: Any, change: Callable[[Tensor], Tensor]) -> Any:
        return change_output(output, change) if self._is_active else output


def _drop_features(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, without_features_before_first_layer(kwargs)


def change_hidden_states(args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a block's arguments with other hidden states, for a pre-hook."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def change_output(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a block's output with other hidden states, which are first in a tuple, for a hook."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def sequence_blocks(model: nn.Module, styles: Mapping[str, str]) -> SequenceBlocks:
    """Find the decoder layers and their blocks.

    Args:
        model: the model, not sharded yet.
        styles: the styles of its modules and parameters, by path.

    Raises:
        ValueError: the sequences of this model cannot be split.
    """
    layers = _layers(model, styles)
    blocks: list[str] = []
    summed_blocks: list[str] = []
    for path in layers:
        layer = model.get_submodule(path)
        if any(not _is_gate(name, it) for name, it in layer.named_parameters(recurse=False)):
            raise _refusal(path, "the layer has parameters of its own")
        for name, child in layer.named_children():
            block = f"{path}.{name}"
            own = {key: style for key, style in styles.items() if is_within(key, block)}
            # By its name: transformers has no registry of norms, and its norms have no base class.
            if not own and (not any(True for _ in child.parameters()) or "Norm" in type(child).__name__):
                continue
            if not own:
                raise _refusal(block, "it is not sharded")
            if not _SUMS.intersection(own.values()):
                raise _refusal(block, "its output stays sharded until another module of the layer sums it")
            if "residual" in inspect.signature(child.forward).parameters:
                raise _refusal(block, "it adds the residual itself")
            (blocks if _ends_in_row(block, child, own) else summed_blocks).append(block)
    return SequenceBlocks(layers, blocks, summed_blocks)


def _is_gate(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a number that multiplies hidden states, as layers with cross-attention have."""
    return parameter.numel() == 1 and name.endswith("_gate")


def _layers(model: nn.Module, styles: Mapping[str, str]) -> list[str]:
    decoder = language_model(model)
    within = next((name for name, it in model.named_modules() if it is decoder), None)
    in_decoder = [path for path in styles if within is None or is_within(path, within)]
    paths = {match[0] for path in in_decoder if (match := re.match(r"[^\d]*\.\d+", path))}
    lists = {path.rpartition(".")[0] for path in paths}
    if len(lists) != 1:
        raise _refusal(type(model).__name__, f"its sharded layers are in {len(lists)} lists of decoder layers, not one")
    name = lists.pop()
    if cross_attentions(model.get_submodule(f"{name}.0")):
        raise _refusal(f"{name}.0", "the layer is skipped in a batch without images, and the next one comes first")
    in_order = [f"{name}.{index}" for index, _ in model.get_submodule(name).named_children()]
    if set(in_order) != paths:
        raise _refusal(type(model).__name__, "not all of its decoder layers are sharded")
    return in_order


def _ends_in_row(path: str, block: nn.Module, styles: Mapping[str, str]) -> bool:
    """Return whether a block has sharded linear layers, the last one row-parallel, and norms of single heads only."""
    kinds = list(styles.values())
    if kinds.count("rowwise") != 1 or not set(kinds) <= set(_OF_LINEAR_BLOCKS):
        return False
    (row,) = (it for it, style in styles.items() if style == "rowwise")
    if not isinstance(block.get_submodule(row.removeprefix(path).removeprefix(".")), nn.Linear):
        return False
    planned = [it for it, style in styles.items() if style != "local_params"]
    return all(any(is_within(f"{path}.{name}", it) for it in planned) for name, _ in block.named_parameters())


def _refusal(path: str, reason: str) -> ValueError:
    return ValueError(f"sequence_parallel=True is not supported for {path}: {reason}; leave sequence_parallel out")
