"""The states of the ZeRO optimizer: the two forms in which they are saved, and the memory that they take.

As boxes of logical tensors, they load at any layout; the caller names, stores and fills the tensors. As this rank's
part of `state_dict`, they fit one rank of one layout. Its documented files, one per rank in a folder, are written under
temporary names that become final once every rank has written, and are read as plain data.
"""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nxd_state import Group, active_group, all_gather_object, on_every_rank
from torch import Tensor, nn
from torch.optim import Optimizer

from nxd_optim.elementwise import for_the_cpu
from nxd_optim.groups_and_states import give_states, settings_of, state_tensor
from nxd_optim.state_tensors import StateTensor, StoredStates, states_of_part, zeros_of_part
from nxd_optim.zero.bucket import Parts

MASTER_KEY = "master_weight"

StoredKeys = Callable[[Tensor], StoredStates]


def logical_state(parts: Parts, *, with_masters: bool) -> list[StateTensor]:
    """Return all states of this rank.

    Raises:
        ValueError: a state is neither a tensor nor a number.
    """
    found: list[StateTensor] = []
    for bucket, base in parts:
        for it in bucket.ranges:
            tensors = {}
            if with_masters and bucket.has_masters and id(it.parameter) not in bucket.stale:
                tensors[MASTER_KEY] = it.weight.detach()
            for key, value in base.state.get(it.weight, {}).items():
                tensors[key] = state_tensor(value, key, f"a parameter of shape {tuple(it.parameter.shape)}")
            found += states_of_part(base, it.updated, tensors)
    return found


def parameters_of_wider_masters(parts: Parts) -> list[Tensor]:
    """Return the parameters whose master weights are wider than they, and not stale."""
    return [
        parameter
        for bucket, _ in parts
        if bucket.has_masters
        for parameter in bucket.parameters
        if bucket.dtypes.master.itemsize > parameter.itemsize and id(parameter) not in bucket.stale
    ]


def allocate_state(parts: Parts, stored: StoredKeys, *, with_masters: bool) -> None:
    """Allocate zeros for the stored states of every owned range.

    Updated weights that are not stored, or not wanted, are marked to be set from the parameters.
    """
    for bucket, base in parts:
        fills = with_masters and bucket.has_masters  # other copies, such as those on the host, are not in checkpoints
        bucket.stale = {id(p) for p in bucket.parameters if not (fills and MASTER_KEY in stored(p))}
        wanted = {
            it: {key: description for key, description in stored(it.parameter).items() if key != MASTER_KEY}
            for it in bucket.ranges
        }
        give_states(base, {it.weight: zeros_of_part(base, it.updated, states) for it, states in wanted.items()})


_SAVE_ID = "save_id"


def rank_state(parts: Parts, indices: Mapping[int, int], *, with_masters: bool) -> dict[str, Any]:
    """Return states, ranges and master weights by parameter index; tensors share memory with the optimizer.

    Args:
        parts: each bucket and its optimizer.
        indices: the index of each parameter, by id.
        with_masters: whether to add "master_weights".
    """
    found: dict[str, Any] = {"state": {}, "ranges": {}}
    if with_masters:
        found["master_weights"] = {}
    for bucket, base in parts:
        for it in bucket.ranges:
            index = indices[id(it.parameter)]
            found["ranges"][index] = (it.start, it.stop, it.parameter.numel())
            if it.weight in base.state:
                found["state"][index] = dict(base.state[it.weight])
            if with_masters and bucket.has_masters:
                found["master_weights"][index] = it.weight.detach()
    return found


def check_rank_state(state_dict: Mapping[str, Any], parts: Parts, indices: Mapping[int, int]) -> None:
    """Raise a ValueError unless the states belong to the parts that this rank owns."""
    missing = {"state", "ranges", "param_groups"} - set(state_dict)
    if missing:
        raise ValueError(f"the state dict lacks {sorted(missing)}; pass one of NeuronZero1Optimizer")
    expected = rank_state(parts, indices, with_masters=False)["ranges"]
    found = {index: tuple(ranges) for index, ranges in state_dict["ranges"].items()}
    for index in sorted(expected.keys() | found.keys()):
        if expected.get(index) != found.get(index):
            raise ValueError(
                f"the state dict belongs to another rank, layout or model: of parameter {index} it holds (start, stop, "
                f"size) {found.get(index)}, this rank owns {expected.get(index)}; to load at another layout, save "
                "sharded_state()"
            )


@torch.no_grad()
def load_rank_state(state_dict: Mapping[str, Any], parts: Parts, indices: Mapping[int, int]) -> None:
    """Load states and master weights that `check_rank_state` has accepted."""
    for bucket, base in parts:
        index_of = {it.weight: indices[id(it.parameter)] for it in bucket.ranges}
        weights = [weight for group in base.param_groups for weight in group["params"]]
        states = {
            position: state_dict["state"][index]
            for position, weight in enumerate(weights)
            if (index := index_of[weight]) in state_dict["state"]
        }
        base.load_state_dict({"state": states, "param_groups": base.state_dict()["param_groups"]})
        if bucket.has_masters:
            for weight, index in index_of.items():
                master = state_dict.get("master_weights", {}).get(index)
                if master is not None:
                    weight.copy_(master)


def write_rank_file(state: dict[str, Any], output_dir: str | os.PathLike[str], *, serially: bool) -> None:
    """Write this rank's state; see `NeuronZero1Optimizer.save_sharded_state_dict`.

    Raises:
        RuntimeError: a rank could not write; all ranks raise, and existing files are untouched.
    """
    replicas = active_group("dp", "cp")
    path = _path_of_rank(output_dir)
    save_id: str = all_gather_object(uuid.uuid4().hex, _world())[0]
    temporary = path.with_name(f".{path.name}.{save_id}")
    doing = f"saving optimizer states to {output_dir}"
    try:
        for turn in range(replicas.size if serially else 1):
            mine = not serially or replicas.rank == turn
            act = (lambda: _write(state | {_SAVE_ID: save_id}, temporary)) if mine else _nothing
            on_every_rank(doing, act, _world())
        on_every_rank(doing, lambda: os.replace(temporary, path), _world())
    finally:
        temporary.unlink(missing_ok=True)


def read_rank_file(
    apply: Callable[[dict[str, Any]], None], output_dir: str | os.PathLike[str], num_workers_per_step: int
) -> None:
    """Read this rank's state and call `apply` with it; see `NeuronZero1Optimizer.load_sharded_state_dict`.

    Raises:
        ValueError: `num_workers_per_step` is not positive.
        RuntimeError: a rank could not read or apply its file, or the files come from several saves; all ranks raise.
    """
    if num_workers_per_step < 1:
        raise ValueError(f"num_workers_per_step={num_workers_per_step} must be positive; the default is 8")
    path = _path_of_rank(output_dir)
    doing = f"loading optimizer states from {output_dir}"
    my_turn = int(os.environ.get("LOCAL_RANK", _world().rank)) // num_workers_per_step
    read: list[dict[str, Any]] = []
    for turn in range(max(all_gather_object(my_turn, _world())) + 1):
        on_every_rank(doing, (lambda: read.append(_read(path))) if turn == my_turn else _nothing, _world())
    if len(set(all_gather_object(read[0].pop(_SAVE_ID, None), _world()))) > 1:
        raise RuntimeError(
            f"{doing} failed: the files come from several saves, one of which did not finish; use another folder"
        )
    on_every_rank(doing, lambda: apply(read[0]), _world())


def _path_of_rank(output_dir: str | os.PathLike[str]) -> Path:
    dp_rank, tp_rank, pp_rank = active_group("dp", "cp").rank, active_group("tp").rank, active_group("pp").rank
    return Path(output_dir) / "optim" / f"dp_rank_{dp_rank:02d}_tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}.pt"


def _world() -> Group:
    return active_group("pp", "dp", "cp", "tp")


def _nothing() -> None:
    """Do nothing: it is another rank's turn."""


def _write(state: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        torch.save(_to_cpu(state), file)
        file.flush()
        os.fsync(file.fileno())


def _to_cpu(value: Any) -> Any:
    """Copy tensors to the CPU, each with only its own elements: a view would be saved with its whole bucket."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    return value


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes on this rank.

    Attributes:
        parameters: trained parameters, or with ZeRO-3 this rank's part of them.
        gradients: measured: existing gradients; predicted: gradients of all parameters before a step.
        mean_gradients: mean gradients of this rank's part; kept between steps on the CPU only.
        master_weights: master weights of this rank's part; zero if the parameters are updated directly.
        state: optimizer state of this rank's part.
        buckets: measured: the largest bucket, which is the most that a message adds; predicted: zero.
    """

    parameters: int
    gradients: int
    mean_gradients: int
    master_weights: int
    state: int
    buckets: int


@dataclass(frozen=True)
class MemoryReport:
    """Measured and predicted bytes; `str()` formats them as a table.

    Attributes:
        measured: what there is.
        predicted: what the model's sizes say.
        on_host: names of the attributes of `MemoryBytes` that are in host memory, and not on the device.
    """

    measured: MemoryBytes
    predicted: MemoryBytes
    on_host: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [f"{'':16}{'measured':>12}{'predicted':>12}"]
        for kind in MemoryBytes.__dataclass_fields__:
            numbers = (getattr(self.measured, kind), getattr(self.predicted, kind))
            row = f"{kind.replace('_', ' '):16}" + "".join(f"{number / 2**20:8.1f} MiB" for number in numbers)
            rows.append(f"{row}  in host memory" if kind in self.on_host else row)
        return "\n".join(rows)


def memory_report(
    parts: Parts, make_optimizer: Callable[[Any], Optimizer], param_groups: Sequence[Mapping[str, Any]]
) -> MemoryReport:
    """Count the memory of each bucket and its optimizer. For transient memory, only the largest size is given.

    Args:
        parts: each bucket and the optimizer of this rank's part.
        make_optimizer: function that makes an optimizer of parameter groups, to find out which states it keeps.
        param_groups: the groups of the parameters, as a user sees them; their settings may select the states.
    """
    parts = list(parts)
    measured = MemoryBytes(
        parameters=sum(bucket.parameter_bytes for bucket, _ in parts),
        gradients=sum(bucket.gradient_bytes for bucket, _ in parts),
        mean_gradients=sum(bucket.mean_bytes for bucket, _ in parts),
        master_weights=sum(bucket.master_bytes for bucket, _ in parts),
        state=sum(_state_bytes(base) for _, base in parts),
        buckets=max((bucket.message_bytes for bucket, _ in parts), default=0),
    )
    parameters = gradients = means = masters = state = 0
    for bucket, _ in parts:
        elements = sum(parameter.numel() for parameter in bucket.parameters)
        ids = {id(parameter) for parameter in bucket.parameters}
        group_size = bucket.placement.replicas.size
        kept = elements if bucket.parameter_bytes >= bucket.message_bytes else elements // group_size
        parameters += kept * bucket.parameters[0].itemsize
        gradients += elements * bucket.dtypes.gradient.itemsize
        means += elements * bucket.dtypes.master.itemsize // group_size if bucket.mean_bytes else 0
        masters += elements * bucket.dtypes.master.itemsize // group_size if bucket.master_bytes else 0
        for group in param_groups:
            for shape in ((2,), (2, 3)):
                here = sum(p.numel() for p in group["params"] if id(p) in ids and (p.dim() > 1) == (len(shape) > 1))
                if here:
                    bytes_per_element = _state_bytes_per_element(make_optimizer, group, bucket.dtypes.master, shape)
                    state += here * bytes_per_element // group_size
    on_host = ("mean_gradients", "master_weights", "state") if any(it.is_on_host for it, _ in parts) else ()
    of_parameters = ("parameters",) if any(it.parameters_on_host for it, _ in parts) else ()
    predicted = MemoryBytes(parameters, gradients, means, masters, state, 0)
    return MemoryReport(measured, predicted, (*of_parameters, *on_host))


def _state_bytes(optimizer: Optimizer) -> int:
    return sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    )


def _state_bytes_per_element(
    make_optimizer: Callable[[Any], Optimizer],
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> int:
    """Measure the bytes by a step with a tiny parameter that has a group's settings."""
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = make_optimizer([for_the_cpu(settings_of(group)) | {"params": [parameter]}])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter].values()
    return sum(value.itemsize for value in state if isinstance(value, Tensor) and value.shape == parameter.shape)
