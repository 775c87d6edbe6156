"""`Muon`: orthogonalized momentum for matrices, AdamW for everything else, equal to torch's at every layout.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". The momentum has one value per element,
so each rank keeps that of its part. Only the Newton-Schulz iterations need whole matrices: `matrix_exchange` brings
each to one rank. Which parameters are matrices is chosen in `muon_groups`.
"""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from nxd_state import Group, all_gather_object
from nxd_state.parameter_marks import MatrixLayout, get_matrix_layout
from torch import Tensor
from torch.optim import AdamW
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from nxd_optim.joint_optimizer import JointOptimizer
from nxd_optim.matrix_exchange import MatrixExchange, MatrixKey, MatrixPart
from nxd_optim.matrix_sections import Section, matrix_parts, outputs_and_inputs, sections_of
from nxd_optim.updated_parts import UpdatedParts, UpdatedRange, ranks_that_share

_MOMENTUM = "momentum_buffer"  # torch's name
_COMPUTED = torch.bfloat16  # the dtype of torch's iterations, which therefore also travels
_SETTINGS_OF_MUON = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_SETTINGS_OF_ADAMW = ("lr", "weight_decay", "betas", "fused")


class Muon(JointOptimizer):
    """Muon for the matrices in groups with `use_muon=True`, AdamW for the parameters of the other groups.

    In one process, float32 and float64 weights equal those of `torch.optim.Muon` and `AdamW` bit by bit. On many ranks
    it updates every matrix as if it were whole: tensor- and expert-parallel parts are gathered at one of the ranks that
    hold them, fused parameters are the matrices that their `ShardSpec` and `MatrixLayout` name, and a stack
    `[experts, rows, columns]` has a matrix for each expert. `NeuronZero1Optimizer` accepts it as well. As in torch, the
    iterations compute in bfloat16; messages have that dtype, too.

    Args:
        params: parameter groups, such as those of `muon_parameter_groups`; a group without `use_muon` is updated by
            Muon, as in torch.
        lr: learning rate of both, if groups have none of their own. With `adjust_lr_fn="match_rms_adamw"` one that
            suits AdamW suits Muon as well.
        weight_decay: decoupled weight decay of both.
        momentum: decay rate of the momentum.
        nesterov: whether to use Nesterov's momentum.
        ns_coefficients: coefficients of the Newton-Schulz polynomial.
        eps: smallest norm that a matrix is divided by.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr_fn: how the shape of a matrix `[outputs, inputs]`, also one that is stored as `[inputs, outputs]`,
            scales its learning rate: "original" (also None), "match_rms_adamw", or another of the installed torch.
        betas: AdamW's decay rates of the two moments.
        adamw_eps: AdamW's term in the denominator.
        fused: whether AdamW uses torch's fused kernel; None for torch's choice.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "use_muon": True,
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "fused": fused,
        }
        torch.optim.Muon([torch.zeros(1, 1)], **{key: defaults[key] for key in _SETTINGS_OF_MUON})  # type: ignore[arg-type]
        self._adamw = _adamw(defaults)
        self._directions: dict[Tensor, tuple[UpdatedRange, Tensor]] = {}
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
        self.__dict__.setdefault("_adamw", _adamw(self.defaults))
        self.__dict__.setdefault("_directions", {})
        for group in self.param_groups:
            expected = _MOMENTUM if group["use_muon"] else "exp_avg"
            for parameter in group["params"]:
                if self.state.get(parameter) and expected not in self.state[parameter]:
                    raise KeyError(expected)

    def _update(self) -> None:
        for group in self.param_groups:
            if group["use_muon"]:
                for weight in group["params"]:
                    if weight in self._directions:
                        _update(weight, *self._directions.pop(weight), group)
        self._step_of_adamw()

    def _own_ranges(self) -> list[UpdatedRange]:
        matrices = [p for group in self.param_groups if group["use_muon"] for p in group["params"]]
        return [UpdatedRange(p, 0, p.numel(), p) for p in matrices]

    def _take_direction(self, it: UpdatedRange, group: Mapping[str, Any]) -> Tensor:
        """Update the momentum by a weight's gradient; `step` moves the weight along the direction returned.

        Args:
            it: the weight, which has a gradient.
            group: the settings of its group.

        Returns:
            A tensor of the weight's shape in bfloat16, to be orthogonalized in place before `step`.
        """
        grad = it.weight.grad
        assert grad is not None
        if grad.is_sparse or grad.is_complex():
            raise RuntimeError(
                f"Muon does not support gradients of {grad.dtype}, {grad.layout}; give a parameter of shape "
                f"{tuple(it.parameter.shape)} to AdamW by use_muon=False"
            )
        state = self.state[it.weight]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        momentum: Tensor = state[_MOMENTUM]
        momentum.lerp_(grad, 1 - group["momentum"])
        direction = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        direction = direction.to(_COMPUTED, copy=True)
        self._directions[it.weight] = (it, direction)
        return direction

    def _step_of_adamw(self) -> None:
        self._adamw.state = self.state
        self._adamw.param_groups = [
            self._adamw.defaults
            | {key: group[key] for key in _SETTINGS_OF_ADAMW}
            | {"params": group["params"], "eps": group["adamw_eps"]}
            for group in self.param_groups
            if not group["use_muon"]
        ]
        self._adamw.step()


class JointStep:
    """The part of Muon's step that ranks share: all matrices that several optimizers update are orthogonalized.

    Args:
        parts: what each of the optimizers updates, in the same order on all ranks that share it.
    """

    def __init__(self, parts: Sequence[UpdatedParts]) -> None:
        self._parts = list(parts)
        self._shared: list[_SharedMatrices] | None = None

    @torch.no_grad()
    def prepare(self, optimizers: Sequence[Muon], used: Set[int], param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Update the momenta and orthogonalize the directions. Called by all ranks, before the optimizers' `step`.

        Args:
            optimizers: the optimizers of the parts. The weights of used parameters have their gradients.
            used: ids of the parameters to update, the same ones on all ranks that hold parts of them.
            param_groups: the groups of the parameters, with their settings.
        """
        groups = {id(p): group for group in param_groups if group["use_muon"] for p in group["params"]}
        if self._shared is None:
            self._shared = self._share(groups)
        for matrices in self._shared:
            matrices.orthogonalize(optimizers, used, groups)
        for optimizer in optimizers:
            optimizer._is_prepared = True

    def _share(self, groups: Mapping[int, Any]) -> list["_SharedMatrices"]:
        """Find the ranks that hold parts of the same matrices: replicas times those that split a layer."""
        by_group: dict[Group, dict[int, UpdatedParts]] = {}
        for index, it in enumerate(self._parts):
            parameters = [p for p in it.parameters if id(p) in groups]
            if parameters:
                group = ranks_that_share(parameters[0], it.replicas)
                ranges = [own for own in it.ranges if id(own.parameter) in groups]
                by_group.setdefault(group, {})[index] = UpdatedParts(parameters, ranges, group)
        return [_SharedMatrices(parts, group) for group, parts in by_group.items()]


class _SharedMatrices:
    """The matrices that the ranks of one group hold together.

    Args:
        parts: the parameters that are matrices, and this rank's parts of them, by index of their optimizer.
        group: the ranks.
    """

    def __init__(self, parts: Mapping[int, UpdatedParts], group: Group) -> None:
        self._parameters = [p for it in parts.values() for p in it.parameters]
        self._indices = {id(p): index for index, p in enumerate(self._parameters)}
        self._ranges = [(index, own) for index, it in parts.items() for own in it.ranges]
        counts = all_gather_object(len(self._parameters), group)
        if len(set(counts)) > 1:
            raise ValueError(
                f"the ranks {list(group.ranks)}, which hold parts of the same matrices, have {counts} parameters with "
                "use_muon=True; choose the same ones on all of them"
            )
        self._exchange = MatrixExchange([part for _, it in self._ranges for part in self._absent(it)], group)

    def orthogonalize(
        self, optimizers: Sequence[Muon], used: Set[int], groups: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Make the directions of all used parameters, and orthogonalize them."""
        parts: list[MatrixPart] = []
        for index, it in self._ranges:
            key = id(it.parameter)
            if key in used:
                direction = optimizers[index]._take_direction(it, groups[key])
                parts += matrix_parts(self._indices[key], _sections(it, direction))
            else:
                parts += self._absent(it)

        def orthogonalized(key: MatrixKey, matrix: Tensor) -> Tensor:
            return _orthogonalized(matrix, groups[id(self._parameters[key.parameter])])

        self._exchange.compute(parts, orthogonalized, {index for key, index in self._indices.items() if key in used})

    def _absent(self, it: UpdatedRange) -> list[MatrixPart]:
        """Return parts without values."""
        nothing = it.weight.new_empty((), dtype=_COMPUTED).expand(it.weight.shape)
        return matrix_parts(self._indices[id(it.parameter)], _sections(it, nothing))


def _adamw(defaults: Mapping[str, Any]) -> AdamW:
    return AdamW([{"params": []}], **{key: defaults[key] for key in _SETTINGS_OF_ADAMW}, eps=defaults["adamw_eps"])


def _orthogonalized(matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
    return _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _update(weight: Tensor, it: UpdatedRange, direction: Tensor, group: Mapping[str, Any]) -> None:
    """Decay a weight and move it along a direction, at a rate for the shape of each logical matrix."""
    rate = float(group["lr"])
    weight.mul_(1 - rate * group["weight_decay"])
    layout = _layout(it)
    for target, source in zip(_sections(it, weight), _sections(it, direction), strict=True):
        shape = outputs_and_inputs(target.shape, layout)
        target.values.add_(source.values, alpha=-_adjust_lr(rate, group["adjust_lr_fn"], shape))


def _sections(it: UpdatedRange, tensor: Tensor) -> list[Section]:
    """Return a tensor of a weight's shape as boxes of matrices, which share its memory."""
    return sections_of(it.shards_of(tensor), _layout(it))


def _layout(it: UpdatedRange) -> MatrixLayout:
    return get_matrix_layout(it.parameter) or MatrixLayout()
