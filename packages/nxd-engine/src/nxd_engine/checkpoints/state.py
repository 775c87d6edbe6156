"""The bridge from shard metadata to checkpoints: the state of a model and its optimizer, as logical tensors.

Names and shapes are those of the unsharded model, so a checkpoint does not depend on the layout it came from. Other
tensors are stored under a prefix, see `kind_of`. nxd_ckpt handles files and their format.
"""

import ctypes
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from nxd_ckpt import CheckpointError, Coordinator, Shard, ShardedTensor
from nxd_ckpt.boxes import Box, uncovered
from nxd_ckpt.interop import TensorSource
from nxd_ckpt.interop.source import fill
from nxd_ckpt.optimizer_states import states_of
from nxd_ckpt.shard_marks import is_cut
from nxd_ckpt.sharded_tensor import as_sharded
from nxd_optim import MASTER_KEY, NeuronZero1Optimizer, give_states, restore_numbers, state_tensor
from nxd_pipeline import NxDPPModel
from nxd_state import ShardPiece, active_group, get_shard_spec
from torch import Tensor, nn
from torch.optim import Optimizer

CheckpointState = dict[str, ShardedTensor | Tensor]

OPTIMIZER_PREFIX = "optimizer/"  # followed by <logical name>/<key>
OPTIMIZER_DICT_PREFIX = "optimizer_state_dict/"  # bytes of a rank's state_dict, if no model named its parameters
RNG_PREFIX = "rng/"  # random streams of a rank
_NOT_OF_THE_MODEL = (OPTIMIZER_PREFIX, OPTIMIZER_DICT_PREFIX, RNG_PREFIX)

_MASTER = f"/{MASTER_KEY}"
_ONLY_ZERO1 = {"skipped_steps"}  # other optimizers ignore it
_EXTRA_STATE = "_extra_state"  # as torch names it
_SHOWN_NAMES = 8
_BLOCK_BYTES = 16 * 2**20


def kind_of(name: str) -> Literal["model", "optimizer", "run"]:
    """Return the kind of a checkpoint's tensor by its name, whoever wrote the checkpoint."""
    if not name.startswith(_NOT_OF_THE_MODEL):
        return "model"
    return "run" if name.startswith(RNG_PREFIX) else "optimizer"


def owner_of(name: str) -> str:
    """Return the name of the model's tensor that an optimizer state belongs to; any other name unchanged."""
    return name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")[0] if name.startswith(OPTIMIZER_PREFIX) else name


def model_state(model: nn.Module) -> CheckpointState:
    """Return parameters and persistent buffers of `model` as logical tensors; they share its memory.

    A tied parameter appears once, under its first name; so do its copies in several stages of a pipeline. For a
    pipeline, this rank's tensors are returned under the names of the model before it was cut.

    Raises:
        ValueError: a layer's weight has lost its shard metadata, so its part would be mistaken for the whole.
    """
    _check_shard_metadata(model)
    state: CheckpointState = {}
    for name, parameter in named_parameters(model):
        state.update(_logical_tensors(name, parameter, parameter.detach()))
    return state | _persistent_buffers(model)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> CheckpointState:
    """Return the optimizer's state as logical tensors; states of a parameter's shape are sharded like the parameter.

    With ZeRO-1 each rank contributes the boxes that it owns; names, shapes and values are the same as without it, so
    a checkpoint of one loads into the other.

    Raises:
        ValueError: the optimizer holds a parameter that the model lacks, or a state is neither tensor nor number.
    """
    if isinstance(optimizer, NeuronZero1Optimizer):
        return _zero1_state(model, optimizer)
    state: CheckpointState = {}
    for name, parameter in _optimized_parameters(model, optimizer):
        for key, found in optimizer.state.get(parameter, {}).items():
            value = state_tensor(found, key, name)
            if value.shape == parameter.shape:
                for logical, tensor in _logical_tensors(name, parameter, value).items():
                    state[f"{OPTIMIZER_PREFIX}{logical}/{key}"] = tensor
            elif value.numel() > 1 and is_cut(parameter):
                raise ValueError(
                    f"optimizer state {key!r} of {name} is {list(value.shape)}, but this rank's part of the parameter "
                    f"is {list(parameter.shape)}, so it is unknown which part other ranks hold; use an elementwise "
                    "optimizer with tensor parallelism"
                )
            else:  # such as a step count, which each logical tensor of a fused parameter has
                names = _logical_names(name, parameter)
                state.update({f"{OPTIMIZER_PREFIX}{logical}/{key}": value for logical in names})
    return state


def _zero1_state(model: nn.Module, optimizer: NeuronZero1Optimizer) -> CheckpointState:
    names = {parameter: name for name, parameter in _optimized_parameters(model, optimizer)}
    state: CheckpointState = {}
    shards: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for entry in optimizer.sharded_state():
        name = names[entry.parameter]
        if entry.scalar is not None:
            logical_names = _logical_names(name, entry.parameter)
            state.update({f"{OPTIMIZER_PREFIX}{logical}/{entry.key}": entry.scalar for logical in logical_names})
        for shard in entry.shards:
            full_name = f"{OPTIMIZER_PREFIX}{logical_name(name, shard.name)}/{entry.key}"
            shards.setdefault((full_name, shard.logical_shape), []).append(Shard(shard.tensor, shard.box.offset))
    return state | {name: ShardedTensor(shape, found) for (name, shape), found in shards.items()}


def weights_of_wider_masters(model: nn.Module, optimizer: Optimizer) -> set[str]:
    """Return the model's tensors that `optimizer_state` also holds as wider master weights, if ZeRO-1 saves them."""
    if not isinstance(optimizer, NeuronZero1Optimizer):
        return set()
    names = {parameter: name for name, parameter in _optimized_parameters(model, optimizer)}
    wider = optimizer.parameters_of_wider_masters()
    return {logical for parameter in wider for logical in _logical_names(names[parameter], parameter)}


def weights_kept_as_masters(stored: Iterable[str]) -> dict[str, str]:
    """Map the model's tensors that a checkpoint stores only as master weights to the names of those."""
    names = set(stored)
    masters = {owner_of(name): name for name in names if name.startswith(OPTIMIZER_PREFIX) and name.endswith(_MASTER)}
    return {weight: name for weight, name in masters.items() if weight not in names}


def saved_here(model: nn.Module, state: CheckpointState) -> CheckpointState:
    """Return the model and optimizer state that this rank saves, without further copies of a tied weight.

    Copies on several pipeline stages, and even more their optimizer states, may differ by rounding. The first copy is
    saved, and the others take their values from it; to load, all copies are needed.
    """
    if not isinstance(model, NxDPPModel):
        return state
    further = {
        logical
        for name, parameter in model.local_named_parameters()
        if getattr(parameter, "shared", False)
        for logical in _logical_names(model.tied_names().get(name, name), parameter)
    }
    return {name: tensor for name, tensor in state.items() if owner_of(name) not in further}


def check_names(
    stored: Iterable[str],
    wanted: Iterable[str],
    ignored: Iterable[str],
    what: str,
    coordinator: Coordinator,
    *,
    can_be_lax: bool = True,
) -> None:
    """Compare the model in a checkpoint with the one that the ranks want to fill, by names. Called by all ranks.

    Args:
        stored: names in the checkpoint, of any kind.
        wanted: names of the model's tensors on this rank.
        ignored: names that may be stored even if no rank wants them.
        what: the checkpoint, for the message.
        coordinator: the coordinator of the ranks.
        can_be_lax: whether the caller accepts `strict=False`.

    Raises:
        CheckpointError: a name is missing, or no rank wants it; the same text on all ranks.
    """
    of_all_ranks = coordinator.all_gather_object((sorted(wanted), sorted(ignored)))
    wanted_names = {name for names, _ in of_all_ranks for name in names}
    known = wanted_names | {name for _, names in of_all_ranks for name in names}
    stored_names = {name for name in stored if kind_of(name) == "model"}
    missing, unexpected = sorted(wanted_names - stored_names), sorted(stored_names - known)
    problems = [f"it lacks {_listed(missing)}"] if missing else []
    problems += [f"the model lacks {_listed(unexpected)}"] if unexpected else []
    if problems:
        raise CheckpointError(
            f"{what} does not fit the model: {'; '.join(problems)}. Load it into the model that was saved"
            + (", or pass strict=False to load the tensors that both have" if can_be_lax else "")
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def check_shapes(source: TensorSource, into: CheckpointState) -> None:
    """Compare the shapes of a source's and this rank's tensors.

    Raises:
        CheckpointError: some shapes differ; it names them.
    """
    problems = [
        f"{name} is {list(source.tensors[name].global_shape)}, but {list(shape)} in the model"
        for name, tensor in into.items()
        if name in source.tensors
        and source.tensors[name].global_shape != (shape := as_sharded(name, tensor).global_shape)
    ]
    if problems:
        more = f" and {len(problems) - _SHOWN_NAMES} more" if len(problems) > _SHOWN_NAMES else ""
        raise CheckpointError(f"it does not fit the model: {'; '.join(problems[:_SHOWN_NAMES])}{more}")


def check_ties(source: TensorSource, tied: Mapping[str, str], what: str) -> None:
    """Compare the tensors of a tied weight that a source stores several times. Called by one rank.

    Args:
        source: source of the model's tensors.
        tied: maps each further name of a tied weight to its name in checkpoints.
        what: the source, for the message.

    Raises:
        CheckpointError: they differ, so filling the model with one would lose the other.
    """
    for name, known in tied.items():
        if name in source.tensors and known in source.tensors and not same_values(source, name, known):
            raise CheckpointError(
                f"{what} does not fit the model: it has different values for {name} and {known}, which are one tied "
                "weight in the model; make the model without the tie (tie_word_embeddings=false)"
            )


def same_values(source: TensorSource, name: str, other: str) -> bool:
    """Whether two tensors of a source are equal, compared block by block."""
    info, its = source.tensors[name], source.tensors[other]
    if info.global_shape != its.global_shape or info.dtype != its.dtype:
        return False
    rows, *inner = info.global_shape
    at_a_time = max(1, _BLOCK_BYTES // max(1, info.dtype.itemsize * math.prod(inner)))
    for first in range(0, rows, at_a_time):
        box = Box((first, *(0 for _ in inner)), (min(at_a_time, rows - first), *inner))
        values = [torch.empty(box.shape, dtype=info.dtype) for _ in range(2)]
        fill(source, name, box, values[0])
        fill(source, other, box, values[1])
        if not torch.equal(*values):
            return False
    return True


@torch.no_grad()
def fill_state(source: TensorSource, into: CheckpointState) -> None:
    """Fill this rank's tensors from a source; types are converted, and tensors that it lacks are left alone.

    Extra memory: 16 MiB if the source maps files, otherwise the largest of this rank's boxes.

    Raises:
        CheckpointError: shapes differ (nothing is changed then), elements are missing, or the source cannot be read.
    """
    check_shapes(source, into)
    for name in into.keys() & source.tensors.keys():
        for shard in as_sharded(name, into[name]).shards:
            for block in _blocks(shard.box, shard.tensor.element_size()) if source.is_mapped else [shard.box]:
                _fill(source, name, block, shard)


def _fill(source: TensorSource, name: str, block: Box, destination: Shard) -> None:
    found = source.shards(name, block)
    if uncovered(block, [shard.box for shard in found]):
        raise CheckpointError(f"the stored tensors do not cover {name!r} {block}")
    for shard in found:
        common = shard.box.intersect(block)
        if common is None:
            continue
        values = shard.tensor[common.relative_to(shard.box).slices()]
        destination.tensor[common.relative_to(destination.box).slices()].copy_(values)
        if source.is_mapped:
            _release(values)


def _blocks(box: Box, item_size: int) -> Iterator[Box]:
    """Yield the rows of a box in blocks of a few megabytes."""
    if not box.shape or not box.num_elements:
        yield box
        return
    row_bytes = box.num_elements // box.shape[0] * item_size
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - start)
        yield Box((box.offsets[0] + start, *box.offsets[1:]), (count, *box.shape[1:]))


def _release(tensor: Tensor) -> None:
    """Release the whole pages under a view of a read-only mapped file; its values stay readable.

    The system caches these pages while there is room, but counts them as the process's memory; so a memory limit would
    see a rank hold every byte that it has read.
    """
    if not tensor.numel() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + reach * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def allocate_optimizer_state(
    model: nn.Module, optimizer: Optimizer, stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    """Allocate the state that a checkpoint holds in a new optimizer, so that it can be loaded in place.

    ZeRO-1 master weights that the checkpoint lacks are taken from the parameters at the next step. Tensors are
    allocated in the dtypes in which the optimizer keeps its states, whatever dtypes the checkpoint has.

    Args:
        model: the model whose parameters the optimizer has.
        optimizer: the optimizer, whose existing state is replaced.
        stored: dtype and global shape of every tensor in the checkpoint.

    Raises:
        ValueError: the states belong to an optimizer of another class.
    """
    keys_by_name: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for full_name, description in stored.items():
        if full_name.startswith(OPTIMIZER_PREFIX):
            key = full_name.rpartition("/")[2]
            keys_by_name.setdefault(owner_of(full_name), {})[key] = description
    names = {parameter: name for name, parameter in _optimized_parameters(model, optimizer)}

    def stored_keys(parameter: Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            key: description
            for logical in [names[parameter], *_logical_names(names[parameter], parameter)]
            for key, description in keys_by_name.get(logical, {}).items()
        }

    if isinstance(optimizer, NeuronZero1Optimizer):
        optimizer.allocate_state(stored_keys)
        return

    def has_its_elements(shape: tuple[int, ...], parameter: Tensor) -> bool:
        spec = get_shard_spec(parameter)
        if spec is None:
            return shape == parameter.shape
        if not spec.pieces:  # this rank holds only padding, whatever the logical shape
            return len(shape) == parameter.dim()
        return any(shape == piece.logical_shape for piece in spec.pieces)

    def room(parameter: Tensor) -> dict[str, Tensor]:
        return {
            key: torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if has_its_elements(shape, parameter)
            else torch.zeros(shape, dtype=dtype)
            for key, (dtype, shape) in stored_keys(parameter).items()
            if key != MASTER_KEY
        }

    give_states(optimizer, {parameter: room(parameter) for parameter in names})


def settle_optimizer_state(optimizer: Optimizer, others: Mapping[str, Any]) -> None:
    """Finish loading: call it when the states allocated by `allocate_optimizer_state` have been filled.

    Args:
        optimizer: the optimizer with these states.
        others: the result of `other_optimizer_state`; empty if there is none.

    Raises:
        ValueError: the optimizer cannot load them.
    """
    attributes = others.get("attributes", {})
    is_zero1 = isinstance(optimizer, NeuronZero1Optimizer)
    found = states_of("the optimizer", optimizer) if others and not is_zero1 else None
    takes = optimizer.other_state() if isinstance(optimizer, NeuronZero1Optimizer) else found and found.attributes
    lacking = attributes.keys() - _ONLY_ZERO1 - (takes or {}).keys()
    if lacking:
        raise ValueError(
            f"the optimizer was saved with {sorted(lacking)} by its own state_dict, which {type(optimizer).__name__} "
            "does not have; load into the class that was saved"
        )
    if isinstance(optimizer, NeuronZero1Optimizer):
        optimizer.settle_state(attributes)
        return
    restore_numbers(optimizer)
    if found is not None:
        found.put(found.states, others.get("of_none", {}), attributes)


def other_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state that an optimizer keeps outside its parameters' states and groups; empty if there is none.

    Raises:
        ValueError: its `state_dict` has an unknown form, or it keeps such tensors while the model is split over ranks.
    """
    if isinstance(optimizer, NeuronZero1Optimizer):
        numbers = {key: value for key, value in optimizer.other_state().items() if value}
        return {"attributes": numbers} if numbers else {}
    found = states_of("the optimizer", optimizer)
    others = {key: value for key, value in (("of_none", found.of_none), ("attributes", found.attributes)) if value}
    if active_group("tp").size * active_group("pp").size > 1 and any(isinstance(it, Tensor) for it in _leaves(others)):
        raise ValueError(
            f"the {type(optimizer).__name__} keeps tensors that belong to no parameter ({', '.join(_names(others))}); "
            "it is unknown which part of the model they belong to, so they cannot be saved with tensor or pipeline "
            "parallelism"
        )
    return others


def _names(others: Mapping[str, Any]) -> list[str]:
    return sorted(str(key) for kind in others.values() for key in kind)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    else:
        yield value


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return this rank's modules that define `get_extra_state`, by the names of their states."""
    named = model.local_named_modules() if isinstance(model, NxDPPModel) else model.named_modules()
    return {
        f"{name}.{_EXTRA_STATE}".lstrip("."): module
        for name, module in named
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _check_shard_metadata(model: nn.Module) -> None:
    """Raise ValueError if shard metadata is lost: `deepcopy`, `to_empty` and `load_state_dict(assign=True)` drop it."""
    for name, module in model.local_named_modules() if isinstance(model, NxDPPModel) else model.named_modules():
        if getattr(module, "tensor_parallel_size", 1) == 1:
            continue
        for own_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if own_name.rpartition(".")[2].startswith("weight") and get_shard_spec(parameter) is None:
                raise ValueError(
                    f"{own_name} is split over {module.tensor_parallel_size} ranks but has lost its shard metadata; "
                    "move models with move_model_to_device, and keep metadata with copy_parameter_attributes"
                )


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return this rank's parameters, each once, by their names in a checkpoint."""
    if not isinstance(model, NxDPPModel):
        return model.named_parameters()
    first_names = model.tied_names()
    return ((first_names.get(name, name), parameter) for name, parameter in model.local_named_parameters())


def _persistent_buffers(model: nn.Module) -> CheckpointState:
    if isinstance(model, NxDPPModel):
        parameters = {name for name, _ in model.local_named_parameters()} | model.tied_names().keys()
        kept = parameters | modules_with_extra_state(model).keys()
        return {name: tensor for name, tensor in model.local_state_dict().items() if name not in kept}
    persistent = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _optimized_parameters(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in named_parameters(model)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(f"the optimizer holds a {tuple(parameter.shape)} parameter that is not the model's")
            yield names[parameter], parameter


def _logical_tensors(name: str, parameter: Tensor, tensor: Tensor) -> CheckpointState:
    """Return views of `tensor`, which is split like `parameter`, by logical name."""
    spec = get_shard_spec(parameter)
    if spec is None:
        return {name: tensor}
    pieces: dict[str, list[ShardPiece]] = {}
    for piece in spec.pieces:
        pieces.setdefault(logical_name(name, piece.name), []).append(piece)
    return {logical: _sharded_tensor(tensor, found) for logical, found in pieces.items()}


def _logical_names(name: str, parameter: Tensor) -> list[str]:
    """Return the names of a parameter's logical tensors; its own name if it is all padding."""
    return list(_logical_tensors(name, parameter, parameter)) or [name]


def _sharded_tensor(tensor: Tensor, pieces: Iterable[ShardPiece]) -> ShardedTensor:
    pieces = list(pieces)
    shards = [Shard(tensor[piece.local.slices], piece.logical.offset) for piece in pieces]
    return ShardedTensor(pieces[0].logical_shape, shards)


def logical_name(parameter_name: str, relative: str) -> str:
    """Return the full name of a `ShardPiece.name`: the parameter's own, or a sibling of the module that owns it."""
    if not relative:
        return parameter_name
    parent = parameter_name.split(".")[:-2]
    return ".".join([*parent, relative])
