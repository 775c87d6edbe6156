"""Records the compared steps on this rank of the layout, through the documented API."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from nxd_engine import (
    NxDModel,
    NxDOptimizer,
    initialize_parallel_model,
    initialize_parallel_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from nxd_engine.nxd_model import names_of
from nxd_parity import events, record
from nxd_parity.by_hand import Recorder
from nxd_parity.events import Placement
from nxd_pipeline.partition.local_parts import LocalParts
from nxd_state import all_gather_object, get_device, get_group, step_boundary
from torch import Tensor

from nxd_trainer.parity.case import ParityCase, has_batch, inputs_in, make_model
from nxd_trainer.parity.trained_state import TrainedState

Batches = Sequence[Mapping[str, Any]]


class LayoutRun:
    """This rank's model and optimizer. The mesh must be the config's."""

    def __init__(self, case: ParityCase, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Make the model and the optimizer, as a training script would."""
        self.model: NxDModel = initialize_parallel_model(config, lambda: make_model(case.model_fn, case.seed, dtype))
        self.optimizer: NxDOptimizer = initialize_parallel_optimizer(
            config, case.optimizer_class, case.parameter_groups(self.model), **case.optimizer_arguments
        )
        if case.prepare is not None:
            case.prepare(self.model)
        self._dtype = dtype

    def train(self, batches: Batches) -> None:
        """Train without a recording."""
        for batch in batches:
            self._backward(batch)
            self.optimizer.step()
            step_boundary()

    def save(self, folder: Path) -> None:
        """Save a checkpoint of the model and the optimizer."""
        save_checkpoint(folder, "resumed", self.model, self.optimizer)

    def load(self, folder: Path) -> None:
        """Load a checkpoint that `save` made at any layout."""
        load_checkpoint(folder, "resumed", self.model, self.optimizer)

    def record(self, batches: Batches, folder: Path) -> list[str]:
        """Train and record. Call it on all ranks.

        Returns:
            what could not be recorded, and why.
        """
        with record(folder, by_hand=True, modules_of=lambda it: LocalParts([it]).named_modules()) as recorder:
            names = names_of(self.model.parameters())
            state = TrainedState(recorder, self.model, self.optimizer, names, is_whole=False)
            self.optimizer.register_gradient_hook(state.gradients)
            state.parameters()
            state.optimizer_states()
            for batch in batches:
                self._record_number(recorder, events.LOSS, self._mean_loss(self._backward(batch)))
                self.optimizer.step()
                step_boundary()  # torch-xla gives wrong values of tensors that are read one by one before it
                self._record_number(recorder, events.GRADIENT_NORM, self.optimizer.grad_norm)
                recorder.end_step()
                state.optimizer_states()
                state.parameters()
        notes = [f"optimizer states were not compared: {state.problem}"] if state.problem else []
        compiled = [name for name, it in self.model.named_modules() if it._compiled_call_impl is not None]
        if compiled:
            notes.append(
                f"modules inside {len(compiled)} compiled ones, such as {compiled[0]}, cannot be seen: compared are "
                "the outputs of those around them, losses, gradients, norms, optimizer states and parameters"
            )
        return notes

    def _backward(self, batch: Mapping[str, Any]) -> Any:
        """Compute the loss of this replica's part of a batch, and the gradients."""
        replicas = get_group("dp")
        parts = {name: value.chunk(replicas.size)[replicas.rank] for name, value in batch.items() if has_batch(value)}
        self.optimizer.zero_grad()
        return self.model.run_train(**inputs_in(self._dtype, {**batch, **parts}, get_device()))

    def _mean_loss(self, loss: Any) -> Tensor | None:
        """Return the mean over the replicas' losses; each tensor-parallel rank has its own, and other stages none."""
        if isinstance(loss, list):
            loss = torch.stack(loss).mean() if loss else None
        of_replicas = all_gather_object(None if loss is None else float(loss), get_group("dp", "cp"))
        known = [it for it in of_replicas if it is not None]
        return torch.tensor(sum(known) / len(known), dtype=torch.float64) if known else None

    def _record_number(self, recorder: Recorder, kind: str, number: Tensor | None) -> None:
        if number is not None:
            recorder.tensor(kind, "", number, placement=Placement((), ()))
