"""An adapter as whole, logical tensors: gathered from the ranks' parts, and put back at any layout.

Names are those of the unsharded model, `layers.0.q_proj.lora_A`, even if one layer holds several of its matrices. This
module does not depend on the file format.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from nxd_state import Group, ShardSpec, active_group, all_gather, all_gather_object, get_shard_spec, whole_parameters
from nxd_state.sharded_values import ValueHolder, holder_of
from torch import Tensor, nn

from nxd_lora.model import LoraModel


def gather_adapter(model: LoraModel) -> dict[str, Tensor]:
    """Return the whole adapter, with trained biases, on the CPU of every rank. Called by all ranks.

    Returns:
        Whole tensors of all pipeline stages, by logical name.
    """
    whole: dict[str, Tensor] = {}
    by_axis: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.adapter_parameters().items():
        spec = get_shard_spec(parameter)
        by_axis.setdefault("tp" if spec is None else spec.axis, {})[name] = parameter
    for axis, parameters in sorted(by_axis.items()):
        # Experts are distributed over the ranks of "ep", and each expert over those of "etp".
        groups = [active_group(it) for it in (("etp", "ep") if axis == "ep" else (axis,))]
        specs_by_rank = [{name: get_shard_spec(p) for name, p in parameters.items()}]
        for group in groups:
            specs_by_rank = [specs for of_rank in all_gather_object(specs_by_rank, group) for specs in of_rank]
        with whole_parameters(parameters.values()):
            for name, parameter in parameters.items():
                values = parameter.detach().clone()  # what is returned outlives the block
                whole.update(_gathered(name, values, [specs[name] for specs in specs_by_rank], groups))
    stages: list[dict[str, Tensor]] = all_gather_object(whole, active_group("pp"))
    return {name: tensor for stage in stages for name, tensor in stage.items()}


@torch.no_grad()
def load_adapter(model: LoraModel, tensors: Mapping[str, Tensor]) -> None:
    """Fill the adapter from whole tensors, each rank taking its part. Called by all ranks.

    Args:
        model: the model whose adapter is overwritten in place, in its own dtype.
        tensors: whole tensors by logical name, as `gather_adapter` returns them; the same on every rank. Other
            parameters of the model may be included and are filled as well.

    Raises:
        ValueError: lists every tensor that is missing, unknown to the model, or of another shape, and tensors of one
            tied parameter that differ.
        RuntimeError: the adapter is merged into the weights.
    """
    if model.is_merged:
        raise RuntimeError("the adapter is merged into the weights; unmerge() before loading another adapter")
    parameters = dict(model.module.named_parameters(remove_duplicate=False))  # files have tied ones under both names
    known = {name: shape for name, p in parameters.items() for name, shape, _, _ in _boxes(name, p)}
    needed = {name for parameter in model.adapter_parameters().items() for name, _, _, _ in _boxes(*parameter)}
    _check_fit(tensors, known, needed, _differing(tensors, parameters))
    filled: dict[ValueHolder | None, list[tuple[nn.Parameter, str, _Index, _Index]]] = {}  # by who gathers it
    for parameter_name, parameter in parameters.items():
        found = [it for it in _boxes(parameter_name, parameter) if it[0] in tensors]
        boxes = [(parameter, name, local, logical) for name, _, local, logical in found]
        filled.setdefault(holder_of(parameter), []).extend(boxes)
    for boxes in filled.values():
        with whole_parameters((parameter for parameter, *_ in boxes), changed=True):
            for parameter, name, local, logical in boxes:
                parameter[local].copy_(tensors[name][logical])


def adapter_names(model: LoraModel, *, with_biases: bool = True) -> list[str]:
    """Logical names of the adapter's tensors on this stage: its factors, and trained biases."""
    parameters = model.adapter_parameters() if with_biases else model.factors()
    return list(dict.fromkeys(box[0] for named in parameters.items() for box in _boxes(*named)))


_Index = tuple[slice, ...]


def _boxes(name: str, parameter: nn.Parameter) -> Iterator[tuple[str, tuple[int, ...], _Index, _Index]]:
    """Yield logical name and shape, and the position of each box in both tensors."""
    spec = get_shard_spec(parameter)
    if spec is None:
        everything = (slice(None),) * parameter.dim()
        yield name, tuple(parameter.shape), everything, everything
        return
    for piece in spec.pieces:
        yield _logical_name(name, piece.name), piece.logical_shape, piece.local.slices, piece.logical.slices


def _gathered(
    name: str, local: Tensor, specs: Sequence[ShardSpec | None], groups: Sequence[Group]
) -> dict[str, Tensor]:
    if specs[0] is None:
        return {name: local.cpu()}
    whole: dict[str, Tensor] = {}
    parts = local.unsqueeze(0)
    for group in groups:
        parts = all_gather(parts, group)
    for part, spec in zip(parts.cpu(), specs, strict=True):
        if spec is not None:
            targets = {
                relative: whole.setdefault(_logical_name(name, relative), torch.zeros(shape, dtype=part.dtype))
                for relative, shape in spec.logical_shapes.items()
            }
            spec.copy_to_logical(part, targets)
    return whole


def _logical_name(name: str, relative: str) -> str:
    """Return the logical name; `relative` is a `ShardPiece.name`, relative to the parent of the parameter's layer."""
    return ".".join([*name.split(".")[:-2], relative]) if relative else name


def _differing(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """List tied parameters for which tensors have different values; one would overwrite the other."""
    names: dict[nn.Parameter, str] = {}
    problems = []
    for name, parameter in parameters.items():
        if name in tensors:
            first = names.setdefault(parameter, name)
            if tensors[first].shape == tensors[name].shape and not torch.equal(tensors[first], tensors[name]):
                problems.append(f"{first} and {name} are one tied parameter but differ; untie them before wrapping")
    return problems


def _check_fit(
    tensors: Mapping[str, Tensor], known: Mapping[str, tuple[int, ...]], needed: set[str], differing: list[str]
) -> None:
    """Raise on all ranks or none. A tensor unknown on one stage, or all padding on one rank, may belong to another."""
    group = active_group("pp", "tp")
    missing = [f"{name} is missing" for name in sorted(needed - set(tensors))]
    shapes = [
        f"{name} has shape {tuple(tensor.shape)}, expected {known[name]}"
        for name, tensor in tensors.items()
        if name in known and tuple(tensor.shape) != known[name]
    ]
    views = all_gather_object((missing + shapes + differing, set(known)), group)
    anywhere = set().union(*(names for _, names in views))
    problems = list(dict.fromkeys(problem for found, _ in views for problem in found))
    problems += [f"the model has no {name}" for name in tensors if name not in anywhere]
    if problems:
        raise ValueError("the adapter does not fit this model:\n  " + "\n  ".join(problems))
