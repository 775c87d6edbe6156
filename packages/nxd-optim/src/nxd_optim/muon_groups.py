"""Chooses by shape and role which parameters of a model Muon updates, and shows the choice."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from nxd_state import get_shard_spec, rank_of_job
from nxd_state.parameter_marks import (
    MatrixLayout,
    get_matrix_layout,
    is_expert,
    is_summed_over_stages,
    mark_matrix_layout,
)
from torch import nn
from torch.nn.modules.conv import _ConvNd

from nxd_optim.matrix_layouts import matrix_layout_of

_log = logging.getLogger(__name__)

_HEADS = ("lm_head", "embed_out", "output_layer", "output", "head", "classifier", "score")
_MATRIX = "matrix"


@dataclass(frozen=True, eq=False)
class _Choice:
    """A parameter, its role, of which only "matrix" is for Muon, and the matrices in it; None if they are unknown."""

    name: str
    parameter: nn.Parameter
    role: str
    layout: MatrixLayout | None


def muon_parameter_groups(
    model: nn.Module, weight_decay: float = 0.1, *, adamw: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Divide a model's trained parameters between `Muon` and AdamW, and log the choice on rank 0.

    Muon gets the weights of linear layers, those of stacked experts included. AdamW gets embeddings, the output head,
    norms, biases, convolutions, and other parameters that are not the matrix of a linear map. Parameters in which a
    model fuses several matrices are marked with them (`nxd_state.parameter_marks.MatrixLayout`), so that `Muon` treats
    each as a matrix of its own. The choice depends on names, classes and shapes only, and so is the same at every
    layout.

    Args:
        model: the model, or this rank's part of it; tied parameters are listed once, frozen ones are skipped.
        weight_decay: weight decay, except of norms and biases.
        adamw: components of names ("gate", "embed_tokens") of further modules or parameters for AdamW.

    Returns:
        Three groups, any of which may be empty: matrices with `use_muon=True`, then AdamW's parameters with weight
        decay, and those without.

    Raises:
        ValueError: a component in `adamw` occurs in no parameter's name.
    """
    choices = _choose(model, adamw)
    if not dist.is_initialized() or rank_of_job() == 0:
        _log.info("%s", _table(choices))
    for it in choices:
        if it.role == _MATRIX and it.layout is not None:
            mark_matrix_layout(it.parameter, it.layout)
    matrices = [it.parameter for it in choices if it.role == _MATRIX]
    others = [it.parameter for it in choices if it.role != _MATRIX]
    return [
        {"params": matrices, "use_muon": True, "weight_decay": weight_decay},
        {"params": [p for p in others if p.dim() > 1], "use_muon": False, "weight_decay": weight_decay},
        {"params": [p for p in others if p.dim() <= 1], "use_muon": False, "weight_decay": 0.0},
    ]


def _choose(model: nn.Module, adamw: Iterable[str]) -> list[_Choice]:
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((f"{module_name}.{name}".lstrip("."), module))
    components = {part for found in owners.values() for name, _ in found for part in name.split(".")}
    if unknown := [it for it in adamw if it not in components]:
        raise ValueError(f"adamw={unknown} occur in no parameter's name; the model has {sorted(components)}")
    choices = []
    for parameter, found in owners.items():
        if parameter.requires_grad:
            name, role = found[0][0], _role(parameter, found, set(adamw))
            choices.append(_Choice(name, parameter, role, matrix_layout_of(model, name) if role == _MATRIX else None))
    return choices


def _role(parameter: nn.Parameter, owners: Sequence[tuple[str, nn.Module]], adamw: set[str]) -> str:
    if parameter.dim() <= 1:
        return "vector"
    name, owner = owners[0]
    path = name.split(".")
    if any(not adamw.isdisjoint(of_owner.split(".")) for of_owner, _ in owners):
        return "chosen"
    if any("Embedding" in type(module).__name__ for _, module in owners):
        return "embedding"
    if (len(path) > 1 and path[-2] in _HEADS) or is_summed_over_stages(parameter):  # tied weights are those of heads
        return "head"
    of_experts = is_expert(parameter) or get_matrix_layout(parameter) is not None or "experts" in path
    is_stack = parameter.dim() == 3 and of_experts
    if not (parameter.dim() == 2 or is_stack) or isinstance(owner, _ConvNd):
        return "not a matrix"
    is_map = path[-1].startswith(("weight", "lora_")) or path[-1].endswith(("weight", "proj"))
    return _MATRIX if is_map else "not of a linear map"


def _table(choices: Sequence[_Choice]) -> str:
    """Return a line for each kind of parameter: layers that differ in numbers of their names only are one kind."""
    kinds: dict[tuple[str, str, str, tuple[int, ...]], int] = {}
    for it in choices:
        optimizer = "Muon" if it.role == _MATRIX else f"AdamW ({it.role})"
        matrices = _matrices(it) if it.role == _MATRIX else ""
        kind = (optimizer, re.sub(r"\.\d+(?=\.|$)", ".*", it.name), matrices, tuple(it.parameter.shape))
        kinds[kind] = kinds.get(kind, 0) + 1
    by_muon = sum(it.role == _MATRIX for it in choices)
    lines = [f"Muon updates {by_muon} parameters of this rank, AdamW {len(choices) - by_muon}:"]
    for (optimizer, name, matrices, shape), count in kinds.items():
        lines.append(f"  {optimizer:28} {count:4} x {list(shape)!s:20} {name}{matrices}")
    return "\n".join(lines)


def _matrices(choice: _Choice) -> str:
    """Return what to say of the matrices in a parameter."""
    layout = choice.layout
    if layout is None:
        return ": one matrix, although it seems to hold several"
    said = []
    if layout.sections:
        spec = get_shard_spec(choice.parameter)
        shape = tuple(choice.parameter.shape) if spec is None else spec.pieces[0].logical_shape
        turns = shape[layout.outputs_dim] // sum(layout.sections)
        said.append(f"matrices of {', '.join(str(turns * it) for it in layout.sections)} outputs")
    if layout.outputs_dim == -1:
        said.append("stored as [inputs, outputs]")
    return f": {', '.join(said)}" if said else ""
