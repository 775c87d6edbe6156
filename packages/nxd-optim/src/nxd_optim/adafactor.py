"""`Adafactor`: torch's, and the same at layouts whose ranks hold parts of its matrices.

Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost". Rows and columns of a matrix
have a second moment each, and steps are scaled by the size of the weight and of the update. Where ranks hold parts of a
tensor, `logical_sums` adds what all of this needs: two messages per step, about as long as rows and columns.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from nxd_state import Group, get_device, get_shard_spec, is_lazy_device
from torch import Tensor

from nxd_optim.groups_and_states import give_states, restore_numbers, settings_of, state_tensor
from nxd_optim.joint_optimizer import JointOptimizer
from nxd_optim.logical_sums import (
    LogicalKey,
    LogicalPart,
    LogicalSums,
    SharedShapes,
    column_shape,
    logical_parts,
    row_shape,
)
from nxd_optim.state_tensors import StateTensor, StoredStates, factored_key, states_of_part, zeros_of_part
from nxd_optim.updated_parts import UpdatedParts, UpdatedRange, ranks_that_share

_ROWS, _COLUMNS, _ELEMENTS, _STEP = "row_var", "col_var", "variance", "step"  # torch's names


class Adafactor(JointOptimizer):
    """`torch.optim.Adafactor` at any layout.

    Parameters that a rank updates whole are updated by torch's own code. Of the others, where ranks hold tensor- or
    expert-parallel parts or are given parts by `NeuronZero1Optimizer`, row and column moments are kept on all ranks
    that hold elements of the logical tensor, and all have the values that one process has.

    A logical tensor is updated as torch updates a parameter. So where one parameter holds several logical tensors, such
    as the fused `qkv` of nxd-layers, each has its own moments and sizes, at every layout.

    Args:
        params: parameters or parameter groups.
        lr: upper limit of the relative learning rate, which falls with the square root of the step.
        beta2_decay: exponent of the step in the decay rate of the moments.
        eps: smallest square root of a second moment, None for that of the dtype, and smallest size of a weight.
        d: largest size of an update, beyond which it is scaled down.
        weight_decay: decoupled weight decay.
        foreach: whether torch's own code updates many parameters at once; None for torch's choice.
        maximize: whether to maximize.

    Attributes:
        factored_shapes: by key of a state, the function from a logical tensor's shape to the state's; see
            `state_tensors`.

    Raises:
        ValueError: an argument is out of range.
    """

    factored_shapes: Mapping[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
        _ROWS: row_shape,
        _COLUMNS: column_shape,
    }

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
        }
        self._torch = torch.optim.Adafactor([{"params": []}], **defaults)  # type: ignore[arg-type]
        self._moves: dict[Tensor, list[_Move]] = {}  # of the weights that torch's code does not update
        super().__init__(params, defaults)

    @classmethod
    def joint_step(cls, parts: Sequence[UpdatedParts]) -> "JointStep":
        """Return what several optimizers of this class do before their steps; see `JointOptimizer`."""
        return JointStep(parts)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore states and groups.

        Raises:
            KeyError: a parameter's state is that of another optimizer.
        """
        super().__setstate__(state)
        self.__dict__.setdefault("_torch", torch.optim.Adafactor([{"params": []}]))  # groups have the settings
        self.__dict__.setdefault("_moves", {})
        for group in self.param_groups:
            for parameter in group["params"]:
                found = self.state.get(parameter, {})
                if found and not found.keys() <= {_STEP, _ELEMENTS} and not any(key.startswith(_ROWS) for key in found):
                    raise KeyError(_ROWS)

    def _update(self) -> None:
        moves, self._moves = self._moves, {}
        for group in self.param_groups:
            for weight in group["params"]:
                if weight in moves:
                    weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
                    for it in moves[weight]:
                        it.part.shard.tensor.add_(it.update(), alpha=it.rate)
        self._torch.state = self.state
        self._torch.param_groups = [
            settings_of(group) | {"params": [weight for weight in group["params"] if weight not in moves]}
            for group in self.param_groups
        ]
        self._torch.step()

    def sharded_state(self) -> list[StateTensor]:
        """Return all states as boxes of logical tensors, for checkpoints that load at any layout; they share memory.

        This and the next three methods are those of `NeuronZero1Optimizer`.
        """
        return [
            state
            for it in self._own_ranges()
            for state in states_of_part(
                self,
                it,
                {
                    key: state_tensor(value, key, f"a parameter of shape {tuple(it.parameter.shape)}")
                    for key, value in self.state.get(it.weight, {}).items()
                },
            )
        ]

    def allocate_state(self, stored: Callable[[Tensor], StoredStates]) -> None:
        """Replace the states by zeros for those of a checkpoint: the tensors of `sharded_state` can then be filled.

        Args:
            stored: function from a parameter to the dtype and shape of each of its states by key.
        """
        give_states(self, {it.weight: zeros_of_part(self, it, stored(it.parameter)) for it in self._own_ranges()})

    def other_state(self) -> dict[str, Any]:
        """Return nothing: all state belongs to parameters."""
        return {}

    def finish_loading(self, others: Mapping[str, Any]) -> None:
        """Finish loading, once the tensors that `allocate_state` made are filled."""
        restore_numbers(self)

    def _own_ranges(self) -> list[UpdatedRange]:
        return [UpdatedRange(p, 0, p.numel(), p) for group in self.param_groups for p in group["params"]]


@dataclass(eq=False)
class _Move:
    """The update of one box of a logical tensor.

    Attributes:
        part: the box, with its weights.
        gradient: the gradient of these elements.
        moments: estimates of their second moments, or two factors that broadcast to them.
        divisor: the number to divide the product of the factors by, one for each matrix.
        floor: smallest second moment.
        rate: factor of the update, known once its size is.
    """

    part: LogicalPart
    gradient: Tensor
    moments: tuple[Tensor, ...]
    divisor: Tensor | None
    floor: float
    rate: float = 0.0

    def update(self) -> Tensor:
        """Return the update before its size is limited. Computed twice, so that not all of them are kept at a time."""
        estimate = self.moments[0].clone() if self.divisor is None else torch.mul(*self.moments).div_(self.divisor)
        return estimate.clamp_(min=self.floor).rsqrt_().mul_(self.gradient)


class JointStep:
    """The part of Adafactor's step that ranks share: the moments and sizes of all tensors that ranks hold parts of.

    Args:
        parts: what each of the optimizers updates, in the same order on all ranks that share it.
    """

    def __init__(self, parts: Sequence[UpdatedParts]) -> None:
        self._parts = list(parts)
        self._shared: list[_SharedTensors] | None = None

    @torch.no_grad()
    def prepare(
        self, optimizers: Sequence[Adafactor], used: Set[int], param_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Update the moments and compute the rates. Called by all ranks, before the optimizers' `step`.

        Args:
            optimizers: the optimizers of the parts. The weights of used parameters have their gradients.
            used: ids of the parameters to update, the same ones on all ranks that hold parts of them.
            param_groups: the groups of the parameters, with their settings.
        """
        groups = {id(p): group for group in param_groups for p in group["params"]}
        if self._shared is None:
            self._shared = self._share()
        for tensors in self._shared:
            tensors.prepare(optimizers, used, groups)
        for optimizer in optimizers:
            optimizer._is_prepared = True

    def _share(self) -> list["_SharedTensors"]:
        by_group: dict[Group, dict[int, UpdatedParts]] = {}
        for index, it in enumerate(self._parts):
            if it.parameters:
                is_alone = it.replicas.size == 1 and all(get_shard_spec(p) is None for p in it.parameters)
                shared_by = ranks_that_share(it.parameters[0], it.replicas, whole_stacks=True)
                group = Group.solo("dp") if is_alone else shared_by
                by_group.setdefault(group, {})[index] = it
        return [_SharedTensors(parts, group) for group, parts in by_group.items()]


class _SharedTensors:
    """The logical tensors that the ranks of one group hold together.

    Args:
        parts: the parameters, and this rank's parts of them, by index of their optimizer.
        group: the ranks.
    """

    def __init__(self, parts: Mapping[int, UpdatedParts], group: Group) -> None:
        parameters = [p for it in parts.values() for p in it.parameters]
        self._group = group
        self._indices = {id(p): index for index, p in enumerate(parameters)}
        self._ranges = [(index, it) for index, own in parts.items() for it in own.ranges if not _is_whole(it)]
        held = [part for _, it in self._ranges for part in self._parts_of(it, it.weight)]
        self._shapes = SharedShapes.find(held, len(parameters), group)
        if is_lazy_device() and (self._shapes.shared or held):
            raise NotImplementedError(
                "Adafactor does not update parts of parameters on XLA, where steps with other numbers need another "
                "graph; use an elementwise optimizer, such as AdamW"
            )

    def prepare(self, optimizers: Sequence[Adafactor], used: Set[int], groups: Mapping[int, Mapping[str, Any]]) -> None:
        """Update the moments of all used parameters, and give each optimizer the moves of its weights."""
        ranges = [(optimizers[index], it) for index, it in self._ranges if id(it.parameter) in used]
        device = self._ranges[0][1].weight.device if self._ranges else get_device()
        like = torch.empty(0, dtype=self._shapes.dtype, device=device)
        shared = LogicalSums(self._shapes.shared, self._group, like)
        own = LogicalSums(self._shapes.own, None, like)
        sums_of = dict.fromkeys(self._shapes.shared, shared) | dict.fromkeys(self._shapes.own, own)
        for _, it in ranges:
            assert it.weight.grad is not None
            _check_gradient(it.weight.grad)
            for weight in self._parts_of(it, it.weight):
                sums_of[weight.key].add_weight(weight)
            for gradient in self._parts_of(it, it.weight.grad):
                sums_of[gradient.key].add_gradient(gradient)
        shared.add_weights_and_gradients_of_ranks()
        moves: list[tuple[_Move, Tensor, Mapping[str, Any]]] = []
        for optimizer, it in ranges:
            group = groups[id(it.parameter)]
            made = self._moves_of(it, optimizer.state[it.weight], sums_of, group)
            optimizer._moves[it.weight] = made
            moves += [(move, optimizer.state[it.weight][_STEP], group) for move in made]
        for move, _, _ in moves:
            sums_of[move.part.key].add_update(move.part, move.update())
        shared.add_updates_of_ranks()
        sizes = shared.sizes() | own.sizes()
        for move, step, group in moves:
            move.rate = _rate(*sizes[move.part.key], float(step), group)

    def _moves_of(
        self,
        it: UpdatedRange,
        state: dict[str, Any],
        sums_of: Mapping[LogicalKey, LogicalSums],
        group: Mapping[str, Any],
    ) -> list[_Move]:
        """Update the states of a weight by its gradient and the sums over its logical tensors."""
        grad = it.weight.grad
        assert grad is not None
        if not state:
            is_wide = torch.get_default_dtype() == torch.float64  # torch's choice, too
            state[_STEP] = torch.tensor(0.0, dtype=torch.float64 if is_wide else torch.float32)
        state[_STEP] += 1
        decay = float(state[_STEP]) ** group["beta2_decay"]
        smallest = torch.finfo(it.weight.dtype).eps if group["eps"][0] is None else group["eps"][0]
        weights, gradients = self._parts_of(it, it.weight), self._parts_of(it, grad)
        if it.parameter.dim() <= 1:
            if _ELEMENTS not in state:
                state[_ELEMENTS] = torch.zeros_like(grad, memory_format=torch.preserve_format)
            variance = state[_ELEMENTS].lerp_(grad * grad, decay)
            moments = [(part.shard.tensor,) for part in self._parts_of(it, variance)]
            return [
                _Move(weight, gradient.shard.tensor, of_part, None, smallest**2)
                for weight, gradient, of_part in zip(weights, gradients, moments, strict=True)
            ]
        factors = {}
        for key in dict.fromkeys(part.key for part in weights):
            means = (sums_of[key].row_means(key), sums_of[key].column_means(key))
            names = [factored_key(name, it.parameter, key.name) for name in (_ROWS, _COLUMNS)]
            for name, mean in zip(names, means, strict=True):
                if name not in state:
                    state[name] = torch.zeros_like(mean, dtype=grad.dtype)
                state[name].lerp_(mean.to(grad.dtype), decay)
            rows, columns = (state[name] for name in names)
            factors[key] = (rows, columns, rows.mean(dim=-2, keepdim=True).clamp_(min=smallest))
        moves = []
        for weight, gradient in zip(weights, gradients, strict=True):
            rows, columns, divisor = factors[weight.key]
            *stack, own_rows, own_columns = weight.shard.box.slices
            every = slice(None)
            both = rows[*stack, own_rows, every], columns[*stack, every, own_columns]
            moves.append(_Move(weight, gradient.shard.tensor, both, divisor[*stack, every, every], smallest**2))
        return moves

    def _parts_of(self, it: UpdatedRange, tensor: Tensor) -> list[LogicalPart]:
        return logical_parts(self._indices[id(it.parameter)], it, tensor)


def _is_whole(it: UpdatedRange) -> bool:
    """Whether a weight is one logical tensor as one process has it, which torch's own code updates."""
    if it.weight.shape != it.parameter.shape or it.stop - it.start < it.parameter.numel():
        return False
    spec = get_shard_spec(it.parameter)
    return spec is None or (
        list(spec.logical_shapes.values()) == [spec.local_shape]
        and not spec.has_padding
        and all(piece.local == piece.logical for piece in spec.pieces)
    )


def _check_gradient(grad: Tensor) -> None:
    if grad.is_sparse or grad.is_complex():
        raise RuntimeError(f"Adafactor does not support gradients of {grad.dtype}, {grad.layout}")


def _rate(of_weight: float, of_update: float, numel: int, step: float, group: Mapping[str, Any]) -> float:
    """Return the factor of an update.

    Args:
        of_weight: the sum of the squared weights.
        of_update: the sum of the squared elements of the update.
        numel: number of elements.
        step: number of the step, from 1.
        group: the settings.
    """
    relative = min(float(group["lr"]), 1 / sqrt(step))
    size = sqrt(of_weight) / sqrt(numel)
    rate = max(group["eps"][1], size) * relative / max(1.0, sqrt(of_update) / (sqrt(numel) * group["d"]))
    return rate if group["maximize"] else -rate
