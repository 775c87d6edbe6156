"""The bridge from shard metadata to checkpoints: the state of a model as logical tensors.

Names and shapes are those of the unsharded model, so a checkpoint does not depend on the layout it came from. Other
tensors are stored under a prefix, see `kind_of`. `optimizer_state.py` does the same for an optimizer; nxd_ckpt handles
files and their format.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from nxd_ckpt import Shard, ShardedTensor
from nxd_optim import MASTER_KEY
from nxd_optim.flat_shards import shards_of_range
from nxd_pipeline import NxDPPModel
from nxd_state import ShardPiece, get_shard_spec, owned_range
from nxd_state.parameter_marks import is_tied_copy
from torch import Tensor, nn

CheckpointState = dict[str, ShardedTensor | Tensor]

OPTIMIZER_PREFIX = "optimizer/"  # followed by <logical name>/<key>
OPTIMIZER_DICT_PREFIX = "optimizer_state_dict/"  # bytes of a rank's state_dict, if no model named its parameters
RNG_PREFIX = "rng/"  # random streams of a rank
_NOT_OF_THE_MODEL = (OPTIMIZER_PREFIX, OPTIMIZER_DICT_PREFIX, RNG_PREFIX)

_MASTER = f"/{MASTER_KEY}"
_EXTRA_STATE = "_extra_state"  # as torch names it


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

    Of parameters that are sharded over the replicas (ZeRO-3) these are the elements that this rank owns, perhaps none;
    after filling them call `nxd_state.values_changed`.

    A tied parameter appears once, under its first name; so do its copies in several stages of a pipeline. For a
    pipeline, this rank's tensors are returned under the names of the model before it was cut.

    Raises:
        ValueError: a layer's weight has lost its shard metadata, so its part would be mistaken for the whole.
    """
    _check_shard_metadata(model)
    state: CheckpointState = {}
    for name, parameter in parameters_in_checkpoint(model):
        state.update(_own_values(name, parameter))
    return state | _persistent_buffers(model)


def _own_values(name: str, parameter: Tensor) -> CheckpointState:
    """Return the values of a parameter that this rank keeps, by logical name."""
    owned = owned_range(parameter)
    if owned is None:
        return logical_tensors(name, parameter, parameter.detach())
    shards: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for it in shards_of_range(parameter, owned.start, owned.stop, owned.values):
        shards.setdefault((logical_name(name, it.name), it.logical_shape), []).append(Shard(it.tensor, it.box.offset))
    return {logical: ShardedTensor(shape, found) for (logical, shape), found in shards.items()}


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
        if is_tied_copy(parameter)
        for logical in logical_names_of(model.tied_names().get(name, name), parameter)
    }
    return {name: tensor for name, tensor in state.items() if owner_of(name) not in further}


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


def parameters_in_checkpoint(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return this rank's parameters, each once, by their names in a checkpoint."""
    if not isinstance(model, NxDPPModel):
        return model.named_parameters()
    first_names = model.tied_names()
    return ((first_names.get(name, name), parameter) for name, parameter in model.local_named_parameters())


def frozen_weights_of(model: nn.Module) -> set[str]:
    """Return the names in a checkpoint of this rank's parameters that do not train."""
    frozen = ((name, it) for name, it in parameters_in_checkpoint(model) if not it.requires_grad)
    return {logical for name, parameter in frozen for logical in logical_names_of(name, parameter)}


def _persistent_buffers(model: nn.Module) -> CheckpointState:
    if isinstance(model, NxDPPModel):
        parameters = {name for name, _ in model.local_named_parameters()} | model.tied_names().keys()
        kept = parameters | modules_with_extra_state(model).keys()
        return {name: tensor for name, tensor in model.local_state_dict(keep_vars=True).items() if name not in kept}
    persistent = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def logical_tensors(name: str, parameter: Tensor, tensor: Tensor) -> CheckpointState:
    """Return views of `tensor`, which is split like `parameter`, by logical name."""
    spec = get_shard_spec(parameter)
    if spec is None:
        return {name: tensor}
    pieces: dict[str, list[ShardPiece]] = {}
    for piece in spec.pieces:
        pieces.setdefault(logical_name(name, piece.name), []).append(piece)
    return {logical: _sharded_tensor(tensor, found) for logical, found in pieces.items()}


def logical_names_of(name: str, parameter: Tensor) -> list[str]:
    """Return the names of a parameter's logical tensors; its own name if it is all padding."""
    return list(logical_tensors(name, parameter, parameter)) or [name]


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
