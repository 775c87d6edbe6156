"""The two ways to run a batch: the whole model on one rank, or this rank's stages of a model that is cut."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns
from typing import Any

import torch
from nxd_state import Group, PeerError, abort_group, is_lazy_device
from torch import Tensor, nn

from nxd_pipeline.partition import LocalParts, ParamInit, PartitionedModel, Wiring, materialize, without_other_stages
from nxd_pipeline.runtime.executor import Executor, Record, without_autocast
from nxd_pipeline.runtime.gradient_sync import GradientSyncs
from nxd_pipeline.runtime.microbatches import forward_of
from nxd_pipeline.runtime.p2p import P2PCommunicator
from nxd_pipeline.runtime.tied_weights import TiedWeights
from nxd_pipeline.schedules import (
    Action,
    ActionKind,
    Schedule,
    forward_only,
    insert_blocking_communication,
    insert_communication,
    make_schedule,
)

SplitBatch = Sequence[Mapping[str, Any]]
ReadOutput = Callable[[Any], Any]  # selects from the model's output; in training the loss


class PipelineAbort:
    """Ends all ranks of a pipeline if one fails; all of them report the first error."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._first: str | None = None

    @contextmanager
    def end_all_ranks(self) -> Iterator[None]:
        """If the body fails, the other ranks stop waiting and raise the first failure.

        Raises:
            PeerError: the body failed, and another rank had failed first.
            RuntimeError: a rank has failed in an earlier call.
        """
        if self._first is not None:
            raise RuntimeError(
                f"this pipeline has ended: {self._first}. Its ranks no longer wait for each other; start the job "
                "again from a checkpoint"
            )
        try:
            yield
        except BaseException as error:
            mine = f"pipeline rank {self._group.rank} failed with {type(error).__name__}: {error}"
            self._first = abort_group(self._group, mine)
            if self._first == mine:
                raise
            raise PeerError(f"this rank stopped because {self._first}") from error


class WholeModelRunner:
    """Runs a model that is not cut, microbatch by microbatch.

    Attributes:
        local: this rank's part of the model.
        original: the model before it was cut, with the weights of this rank only.
        schedule: this rank's actions in training, with communication.
    """

    def __init__(self, model: nn.Module, num_microbatches: int, param_init_fn: ParamInit | None) -> None:
        self.local, self.original = LocalParts([model]), model
        self.schedule = make_schedule("1f1b", 1, num_microbatches)
        materialize(model, param_init_fn)

    def complete(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a batch with the defaults of omitted inputs: unchanged, as the model itself has the defaults."""
        return batch

    def train(
        self,
        microbatches: SplitBatch,
        read_loss: ReadOutput,
        syncs: GradientSyncs,
        record: Record | None,
    ) -> list[Tensor]:
        """Run forward and backward, and let `syncs` average gradients; return the losses that this rank computes.

        `record` is that of `Executor.run`.
        """
        losses = []
        parameters = list(self.original.parameters())
        for index, microbatch in enumerate(microbatches):
            start = perf_counter_ns()
            with forward_of(index):
                loss = read_loss(self.original(**microbatch))
            middle = perf_counter_ns()
            last = parameters if index == len(microbatches) - 1 else []
            with without_autocast(), syncs.backward_of(parameters, last):
                (loss / len(microbatches)).backward(torch.full_like(loss, syncs.loss_scale()))
            losses.append(loss.detach())
            if record is not None:
                record(Action(ActionKind.FORWARD, 0, index), start, middle)
                record(Action(ActionKind.BACKWARD, 0, index), middle, perf_counter_ns())
        syncs.synchronize()
        return losses

    @torch.no_grad()
    def evaluate(self, microbatches: SplitBatch, read_output: ReadOutput) -> list[Any]:
        """Run forward without gradients; return the outputs that this rank computes, as `read_output` selects them."""
        results = []
        for index, microbatch in enumerate(microbatches):
            with forward_of(index):
                results.append(read_output(self.original(**microbatch)))
        return results

    def synchronize_tied_weights(self) -> None:
        """Do nothing: there are no copies."""

    def tie_added_parameters(self) -> None:
        """Do nothing: there are no copies."""

    def forget_layouts(self) -> None:
        """Do nothing: there are no messages."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        return self.original(*args, **kwargs)


class StagesRunner:
    """Runs this rank's stages of a model that is cut; other ranks run the others. See `WholeModelRunner`.

    Attributes:
        modules: the stages' modules.
    """

    def __init__(
        self,
        model: PartitionedModel,
        whole: nn.Module,
        schedule: Schedule,
        group: Group,
        abort: PipelineAbort,
        param_init_fn: ParamInit | None,
        on_filled: Callable[[nn.Module], None] | None,
    ) -> None:
        """Keep what this rank needs of all stages; the rest goes with the last reference to the model.

        Raises:
            ValueError: the schedule cannot be executed.
        """
        self._group, self._abort = group, abort
        self._wiring, self._optional_inputs = Wiring(model.stages), model.optional_inputs
        stages = {index: model.stages[index] for index in schedule.stages_of(group.rank)}
        self.local = LocalParts(list(stages.values()))
        materialize(whole, param_init_fn, only=self.local.tensors(), on_filled=on_filled)
        self._tied_weights = TiedWeights(model.stages, schedule.rank_of_stage, group)
        self.modules = nn.ModuleList(stage.module for stage in stages.values())
        self.original = without_other_stages(whole, self.local.tensors())
        modules = {index: stage.module for index, stage in stages.items()}
        self._p2p = P2PCommunicator(group)
        insert = insert_blocking_communication if is_lazy_device() else insert_communication
        self.schedule = insert(schedule, self._wiring.edges)
        evaluation = insert(forward_only(schedule), self._wiring.edges)
        self._train_executor = Executor(modules, self._wiring, self.schedule, self._p2p)
        self._eval_executor = Executor(modules, self._wiring, evaluation, self._p2p)

    def complete(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a batch with the defaults of omitted inputs; raises ValueError if inputs are missing or unknown."""
        batch = {**self._optional_inputs, **batch}
        self._wiring.check_inputs(batch.keys())
        return batch

    def train(
        self,
        microbatches: SplitBatch,
        read_loss: ReadOutput,
        syncs: GradientSyncs,
        record: Record | None,
    ) -> list[Tensor]:
        """See `WholeModelRunner.train`."""
        tied = {weight.parameter for weight in self._tied_weights.weights}  # complete when all stages are done

        def without_tied(parameters: Sequence[Tensor], last: Sequence[Tensor]) -> AbstractContextManager[None]:
            return syncs.backward_of([p for p in parameters if p not in tied], [p for p in last if p not in tied])

        # On XLA each action is a graph of its own, and its communication has a place in the order of all ranks.
        overlaps = len(syncs.active()) == 1 and not is_lazy_device()
        with self._abort.end_all_ranks():
            self._tied_weights.synchronize()
            with self._tied_weights.gradients_summed():
                losses = self._train_executor.run(
                    self._group.rank,
                    microbatches,
                    read_loss,
                    record,
                    without_tied if overlaps else None,
                    syncs.loss_scale(),
                )
            syncs.synchronize()
        return losses

    def evaluate(self, microbatches: SplitBatch, read_output: ReadOutput) -> list[Any]:
        """See `WholeModelRunner.evaluate`."""
        with self._abort.end_all_ranks():
            self._tied_weights.synchronize()
            return self._eval_executor.run(self._group.rank, microbatches, read_output)

    def synchronize_tied_weights(self) -> None:
        """Set all copies of a tied weight to the values of the first."""
        with self._abort.end_all_ranks():
            self._tied_weights.synchronize()

    def tie_added_parameters(self) -> None:
        """Make parameters that were added to modules which several ranks hold equal there. Called by all ranks."""
        places = {
            f"{path}.{name}".lstrip("."): (module, name)
            for path, module in self.local.named_modules()
            for name, _ in module.named_parameters(recurse=False)
        }
        with self._abort.end_all_ranks():
            self._tied_weights.add(places)

    def forget_layouts(self) -> None:
        """Forget the layouts of messages, because dtypes have changed."""
        self._p2p.forget_layouts()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a RuntimeError: the model is cut."""
        raise RuntimeError(
            f"this model is cut into {self.schedule.num_stages} pipeline stages, and no rank can run it alone; "
            "call run_train(**inputs), which also runs backward, or run_eval(**inputs)"
        )
