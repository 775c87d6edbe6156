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

OPTIMIZER_PREFIX = "optimizer/"  # and then <logical name>/<key>
OPTIMIZER_DICT_PREFIX = "optimizer_state_dict/"  # bytes of a rank's state_dict, where no model named its parameters
RNG_PREFIX = "rng/"  # random streams of a rank
_NOT_OF_THE_MODEL = (OPTIMIZER_PREFIX, OPTIMIZER_DICT_PREFIX, RNG_PREFIX)

_MASTER = f"/{MASTER_KEY}"
_ONLY_ZERO1 = {"skipped_steps"}  # means nothing to other optimizers
_EXTRA_STATE = "_extra_state"  # as torch names it
_SHOWN_NAMES = 8
_BLOCK_BYTES = 16 * 2**20


def kind_of(name: str) -> Literal["model", "optimizer", "run"]:
    """The kind of a checkpoint's tensor, by its name, whoever wrote the checkpoint."""
    if not name.startswith(_NOT_OF_THE_MODEL):
        return "model"
    return "run" if name.startswith(RNG_PREFIX) else "optimizer"


def owner_of(name: str) -> str:
    """The name of the model's tensor that a state of the optimizer belongs to; any other name itself."""
    return name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")[0] if name.startswith(OPTIMIZER_PREFIX) else name


def model_state(model: nn.Module) -> CheckpointState:
    """Parameters and persistent buffers of `model` as logical tensors; they share its memory.

    A tied parameter appears once, under its first name; so do its copies in several stages of a pipeline. A pipeline
    gives what this rank holds, under the names of the model before it was cut.

    Raises:
        ValueError: a layer's weight has lost its shard metadata, so that its part would be taken for the whole.
    """
    _check_shard_metadata(model)
    state: CheckpointState = {}
    for name, parameter in named_parameters(model):
        state.update(_logical_tensors(name, parameter, parameter.detach()))
    return state | _persistent_buffers(model)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> CheckpointState:
    """The optimizer's state as logical tensors: what has a parameter's shape is sharded as the parameter is.

    With ZeRO-1 each rank gives the boxes that it owns; names, shapes and values are those without it, so a checkpoint
    of one loads into the other.

    Raises:
        ValueError: the optimizer holds a parameter that is not the model's, or a state is neither tensor nor number.
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
                    f"optimizer state {key!r} of {name} is {list(value.shape)}, and the part of the parameter here is "
                    f"{list(parameter.shape)}: what other ranks have of it is not known; use an elementwise optimizer "
                    "with tensor parallelism"
                )
            else:  # such as a count of steps, which each logical tensor of a fused parameter has
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
    """The model's tensors that `optimizer_state` holds as wider master weights as well: with ZeRO-1 that saves them."""
    if not isinstance(optimizer, NeuronZero1Optimizer):
        return set()
    names = {parameter: name for name, parameter in _optimized_parameters(model, optimizer)}
    wider = optimizer.parameters_of_wider_masters()
    return {logical for parameter in wider for logical in _logical_names(names[parameter], parameter)}


def weights_kept_as_masters(stored: Iterable[str]) -> dict[str, str]:
    """The model's tensors that a checkpoint of these names keeps as master weights only, with the names of those."""
    names = set(stored)
    masters = {owner_of(name): name for name in names if name.startswith(OPTIMIZER_PREFIX) and name.endswith(_MASTER)}
    return {weight: name for weight, name in masters.items() if weight not in names}


def saved_here(model: nn.Module, state: CheckpointState) -> CheckpointState:
    """The part of a model's and optimizer's state that this rank saves: without further copies of a tied weight.

    Copies on several stages of a pipeline, and more so their optimizer state, may be apart by rounding. The first one
    counts, from which the others take their values; to load, all copies are needed.
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
        ignored: names that may be stored though no rank wants them.
        what: the checkpoint, for the message.
        coordinator: reaches the other ranks.
        can_be_lax: whether the caller has `strict=False`.

    Raises:
        CheckpointError: a name is missing or no rank wants it; the same text on all ranks.
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
            + (", or pass strict=False to load what both have" if can_be_lax else "")
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def check_shapes(source: TensorSource, into: CheckpointState) -> None:
    """Compare the tensors that a source and this rank have.

    Raises:
        CheckpointError: some are of other shapes; it names them.
    """
    problems = [
        f"{name} is {list(source.tensors[name].global_shape)}, the model's {list(shape)}"
        for name, tensor in into.items()
        if name in source.tensors
        and source.tensors[name].global_shape != (shape := as_sharded(name, tensor).global_shape)
    ]
    if problems:
        more = f" and {len(problems) - _SHOWN_NAMES} more" if len(problems) > _SHOWN_NAMES else ""
        raise CheckpointError(f"it does not fit the model: {'; '.join(problems[:_SHOWN_NAMES])}{more}")


def check_ties(source: TensorSource, tied: Mapping[str, str], what: str) -> None:
    """Compare tensors that are one weight of a model where a source holds each of them. Called by one rank.

    Args:
        source: of the model's tensors.
        tied: by each further name of a tied weight, the name under which checkpoints know it.
        what: the source, for the message.

    Raises:
        CheckpointError: they differ, so that filling the model with one would lose the other.
    """
    for name, known in tied.items():
        if name in source.tensors and known in source.tensors and not same_values(source, name, known):
            raise CheckpointError(
                f"{what} does not fit the model: {name} and {known} are one tied weight there, and differ here; make "
                "the model without the tie (tie_word_embeddings=false)"
            )


def same_values(source: TensorSource, name: str, other: str) -> bool:
    """Whether two tensors of a source are equal, a block of rows after the other."""
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
    """Fill this rank's tensors from those of a source; types are converted, and what it lacks is left alone.

    Memory beside the tensors: 16 MiB of a source that maps files, otherwise the largest of this rank's boxes.

    Raises:
        CheckpointError: shapes differ, and nothing is touched; elements are missing, or the source cannot be read.
    """
    check_shapes(source, into)
    for name in into.keys() & source.tensors.keys():
        for shard in as_sharded(name, into[name]).shards:
            for block in _blocks(shard.box, shard.tensor.element_size()) if source.is_mapped else [shard.box]:
                _fill(source, name, block, shard)


def _fill(source: TensorSource, name: str, block: Box, destination: Shard) -> None:
    found = source.shards(name, block)
    if uncovered(block, [shard.box for shard in found]):
        raise CheckpointError(f"no stored tensor holds all of {name!r} {block}")
    for shard in found:
        common = shard.box.intersect(block)
        if common is None:
            continue
        values = shard.tensor[common.relative_to(shard.box).slices()]
        destination.tensor[common.relative_to(destination.box).slices()].copy_(values)
        if source.is_mapped:
            _release(values)


def _blocks(box: Box, item_size: int) -> Iterator[Box]:
    """Rows of a box, as many at a time as make some megabytes."""
    if not box.shape or not box.num_elements:
        yield box
        return
    row_bytes = box.num_elements // box.shape[0] * item_size
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - start)
        yield Box((box.offsets[0] + start, *box.offsets[1:]), (count, *box.shape[1:]))


def _release(tensor: Tensor) -> None:
    """Give back the whole pages under a view of a read-only mapped file, whose values stay readable.

    The system keeps them for as long as there is room, but counts them as the process's own; so a rank would seem, to
    whoever limits it, to hold every byte that it has read.
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
    """Make room in a new optimizer for the state that a checkpoint holds, so that it can be loaded in place.

    Master weights of ZeRO-1 that the checkpoint lacks are taken from the parameters at the next step. Room is made in
    the dtypes that the optimizer keeps its states in, whatever those of the checkpoint are.

    Args:
        model: the model whose parameters the optimizer has.
        optimizer: its existing state is replaced.
        stored: dtype and global shape of every tensor in the checkpoint.

    Raises:
        ValueError: the states are of an optimizer of another class.
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
        if not spec.pieces:  # nothing but padding is here, whatever its logical shape
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
    """To be called when the states for which `allocate_optimizer_state` made room have been filled.

    Args:
        optimizer: whose states they are.
        others: what `other_optimizer_state` gave; empty if nothing.

    Raises:
        ValueError: it has no way to take them.
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
    """What an optimizer keeps outside of its parameters' states and its groups; empty if nothing.

    Raises:
        ValueError: its `state_dict` is of no known form, or it keeps tensors while ranks have parts of the model.
    """
    if isinstance(optimizer, NeuronZero1Optimizer):
        numbers = {key: value for key, value in optimizer.other_state().items() if value}
        return {"attributes": numbers} if numbers else {}
    found = states_of("the optimizer", optimizer)
    others = {key: value for key, value in (("of_none", found.of_none), ("attributes", found.attributes)) if value}
    if active_group("tp").size * active_group("pp").size > 1 and any(isinstance(it, Tensor) for it in _leaves(others)):
        raise ValueError(
            f"the {type(optimizer).__name__} keeps tensors that belong to no parameter ({', '.join(_names(others))}); "
            "which part of the model they belong to is not known, so they cannot be saved with tensor or pipeline "
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
    """This rank's modules that have a `get_extra_state` of their own, by the names of their states."""
    named = model.local_named_modules() if isinstance(model, NxDPPModel) else model.named_modules()
    return {
        f"{name}.{_EXTRA_STATE}".lstrip("."): module
        for name, module in named
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _check_shard_metadata(model: nn.Module) -> None:
    """Copies and moves by torch's own means (`deepcopy`, `to_empty`, `load_state_dict(assign=True)`) drop it."""
    for name, module in model.local_named_modules() if isinstance(model, NxDPPModel) else model.named_modules():
        if getattr(module, "tensor_parallel_size", 1) == 1:
            continue
        for own_name, parameter in module.named_parameters(prefix=name, recurse=False):
            if own_name.rpartition(".")[2].startswith("weight") and get_shard_spec(parameter) is None:
                raise ValueError(
                    f"{own_name} is split over {module.tensor_parallel_size} ranks but has no shard metadata any more; "
                    "move models with move_model_to_device, and carry it over with copy_parameter_attributes"
                )


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters, each once, by their names in a checkpoint."""
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
    """`tensor`, which is split as `parameter` is, as views by logical name."""
    spec = get_shard_spec(parameter)
    if spec is None:
        return {name: tensor}
    pieces: dict[str, list[ShardPiece]] = {}
    for piece in spec.pieces:
        pieces.setdefault(logical_name(name, piece.name), []).append(piece)
    return {logical: _sharded_tensor(tensor, found) for logical, found in pieces.items()}


def _logical_names(name: str, parameter: Tensor) -> list[str]:
    """Of the logical tensors that a parameter holds; its own where it is all padding."""
    return list(_logical_tensors(name, parameter, parameter)) or [name]


def _sharded_tensor(tensor: Tensor, pieces: Iterable[ShardPiece]) -> ShardedTensor:
    pieces = list(pieces)
    shards = [Shard(tensor[piece.local.slices], piece.logical.offset) for piece in pieces]
    return ShardedTensor(pieces[0].logical_shape, shards)


def logical_name(parameter_name: str, relative: str) -> str:
    """The full name behind a `ShardPiece.name`: the parameter's own, or one beside the module that owns it."""
    if not relative:
        return parameter_name
    parent = parameter_name.split(".")[:-2]
    return ".".join([*parent, relative])
