"""Runs the compared steps on this rank of the layout, through the documented API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from nxd_engine import NxDModel, NxDOptimizer, initialize_parallel_model, initialize_parallel_optimizer
from nxd_engine.checkpoints.state import logical_name
from nxd_pipeline.partition.stand_ins import AbsentLayer, AbsentModule
from nxd_state import Box, get_group, get_mesh
from torch import Tensor, nn

from nxd_parity.case import ParityCase, has_batch, inputs_in, make_model
from nxd_parity.recording import ActivationRecord, spec_of


@dataclass(frozen=True)
class Piece:
    """The values of a box of a logical tensor.

    Attributes:
        sums_over_tp: whether the tensor-parallel ranks' values must be summed: gradients of layers that see a part of
            the sequence.
        holders: for a gradient of experts, how many ranks of an expert-parallel group have the same box; else 0.
    """

    box: Box
    shape: tuple[int, ...]
    values: Tensor
    sums_over_tp: bool = False
    holders: int = 0


@dataclass
class LayoutStep:
    """This rank's results of a step; see `ReferenceStep`."""

    activations: dict[str, list[Tensor]]
    loss: float | None
    gradients: dict[str, list[Piece]]
    grad_norm: float | None
    parameters: dict[str, list[Piece]]


class LayoutRun:
    """This rank's model and optimizer. The mesh must be the config's."""

    def __init__(self, case: ParityCase, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Make the model and the optimizer, as a training script would."""
        self.model: NxDModel = initialize_parallel_model(config, lambda: make_model(case.model_fn, case.seed, dtype))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: NxDOptimizer = initialize_parallel_optimizer(
            config, case.optimizer_class, case.parameter_groups(trained), **case.optimizer_arguments
        )
        self._dtype = dtype
        self._first_names = self.model.pipeline.tied_names()

    def parameters(self) -> dict[str, list[Piece]]:
        """This rank's weights, by logical name."""
        return self._pieces((name, it, it) for name, it in self.model.named_parameters())

    def step(self, batch: Mapping[str, Any]) -> LayoutStep:
        """Train on this replica's part of a batch. Call it on all ranks."""
        replicas = get_group("dp")
        own = {name: _share(value, replicas.rank, replicas.size) for name, value in batch.items()}
        record = ActivationRecord()
        self.optimizer.zero_grad()
        # Stand-ins for other stages' modules compute nothing.
        own_modules = [it for it in self.model.named_modules() if not isinstance(it[1], AbsentLayer | AbsentModule)]
        own_modules = _without_insides_of_experts(own_modules)
        if get_mesh().cp > 1:
            own_modules = []  # their outputs cover only this rank's positions
        # no_sync, so that gradients can be read before they are averaged or moved.
        with record.watching(own_modules), self.model.no_sync():
            loss = self.model.run_train(**inputs_in(self._dtype, own))
        if isinstance(loss, list):
            loss = torch.stack(loss).mean() if loss else None
        gradients = self._pieces((name, it, it.grad) for name, it in self.model.named_parameters() if it.requires_grad)
        self.optimizer.step()
        norm = self.optimizer.grad_norm
        return LayoutStep(
            record.outputs,
            None if loss is None else float(loss),
            gradients,
            None if norm is None else float(norm),
            self.parameters(),
        )

    def _pieces(self, named: Any) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {}
        for own_name, parameter, tensor in named:
            if tensor is None:
                continue
            name = self._first_names.get(own_name, own_name)
            adds = tensor is not parameter and bool(getattr(parameter, "sequence_parallel_enabled", False))
            is_expert = get_mesh().splits_experts and getattr(parameter, "expert_model_parallel", False)
            for piece in spec_of(parameter).pieces:
                values = tensor.detach()[piece.local.slices].cpu().clone()
                found.setdefault(logical_name(name, piece.name), []).append(
                    Piece(piece.logical, piece.logical_shape, values, adds, piece.copies if is_expert else 0)
                )
        return found


def _without_insides_of_experts(named: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out the modules inside experts if experts are split: they see the tokens of other ranks."""
    if not get_mesh().splits_experts:
        return named
    experts = {
        f"{name}."
        for name, module in named
        if any(getattr(it, "expert_model_parallel", False) for it in module.parameters(recurse=False))
    }
    return [it for it in named if not any(it[0].startswith(prefix) for prefix in experts)]


def _share(value: Any, rank: int, size: int) -> Any:
    """This replica's part of an input."""
    return value.chunk(size)[rank] if has_batch(value) else value
