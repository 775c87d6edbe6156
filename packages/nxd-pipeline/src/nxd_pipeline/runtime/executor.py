"""Runs a schedule: this rank's computations, sends and receives, in the order that the schedule prescribes."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch
from nxd_state import Pending, autocast_devices, step_boundary, whole_parameters
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec

from nxd_pipeline.partition.stage import Wiring
from nxd_pipeline.runtime.microbatches import forward_of
from nxd_pipeline.runtime.p2p import (
    P2PCommunicator,
    TensorLayout,
    ValueLayout,
    after_leaf,
    describe_value,
    detached_leaves,
)
from nxd_pipeline.runtime.split_backward import SplitBackward
from nxd_pipeline.schedules import Action, ActionKind, Schedule, verify_schedule
from nxd_pipeline.schedules.edge import Dataflow
from nxd_pipeline.schedules.schedule import RECEIVES

Record = Callable[[Action, int, int], None]
BackwardOf = Callable[[Sequence[Tensor], Sequence[Tensor]], AbstractContextManager[None]]
BACKWARDS = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT})
_TO_WEIGHTS = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT})
_Key = tuple[int, int, int]  # from stage, to stage, microbatch


@dataclass
class _SavedForward:
    """The data kept for one microbatch in one stage from its forward to its backward.

    Attributes:
        inputs: the leaf tensors that need gradients, by producer.
        outputs: the graph edges where gradients enter, by consumer; None for gradients that are not needed.
        loss: loss of the last stage, divided by the number of microbatches.
    """

    inputs: dict[int, list[Tensor]]
    outputs: dict[int, list[GradientEdge | None]] = field(default_factory=dict)
    loss: Tensor | None = None


@dataclass
class _Run:
    """The data of one run of a schedule.

    Attributes:
        microbatches: the model's inputs of each microbatch.
        read_output: function that selects from the model's output; in training the loss.
        loss_scale: factor of the gradients.
        results: what `read_output` returned, by microbatch.
        saved: what backward needs, by stage and microbatch.
        weight_halves: backwards whose gradients of weights are still to be computed, by stage and microbatch.
        values: values computed here for other stages.
        gradients: gradients computed here for other stages.
        incoming: messages on their way, by the receive.
        incoming_layouts: layouts of the values among them.
    """

    microbatches: Sequence[Mapping[str, Any]]
    read_output: Callable[[Any], Any]
    loss_scale: float
    results: dict[int, Any] = field(default_factory=dict)
    saved: dict[tuple[int, int], _SavedForward] = field(default_factory=dict)
    weight_halves: dict[tuple[int, int], SplitBackward] = field(default_factory=dict)
    values: dict[_Key, Any] = field(default_factory=dict)
    gradients: dict[_Key, list[Tensor]] = field(default_factory=dict)
    incoming: dict[Action, Pending[list[Tensor]]] = field(default_factory=dict)
    incoming_layouts: dict[Action, ValueLayout] = field(default_factory=dict)


class Executor:
    """Runs one schedule repeatedly."""

    def __init__(
        self, modules: Mapping[int, nn.Module], wiring: Wiring, schedule: Schedule, p2p: P2PCommunicator
    ) -> None:
        """Take this rank's modules by stage, and the wiring of all stages.

        Raises:
            ValueError: the schedule cannot be executed.
        """
        verify_schedule(schedule, wiring.edges)
        self._modules = modules
        self._wiring = wiring
        self._schedule = schedule
        self._dataflow = Dataflow(schedule, wiring.edges)
        self._receives: dict[Action, list[Action]] = {}  # of each computation, once they have been looked up
        self._p2p = p2p
        self._shapes = _Shapes(schedule.is_forward_only)
        self._indivisible: set[int] = set()  # stages whose backward is not split, see SplitBackward
        self._handlers = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
            ActionKind.SEND_ACTIVATION: self._send_activation,
            ActionKind.RECV_ACTIVATION: self._receive_activation,
            ActionKind.SEND_GRADIENT: self._send_gradient,
            ActionKind.RECV_GRADIENT: self._receive_gradient,
        }

    def run(
        self,
        rank: int,
        microbatches: Sequence[Mapping[str, Any]],
        read_output: Callable[[Any], Any],
        record: Record | None = None,
        backward_of: BackwardOf | None = None,
        loss_scale: float = 1.0,
    ) -> list[Any]:
        """Run the schedule once; gradients are added to those that parameters have.

        Args:
            rank: this rank's index in the pipeline-parallel group.
            microbatches: the model's inputs of each microbatch.
            read_output: function that selects from the model's output; in training the loss, a scalar.
            record: called after each action with it and its start and end by `time.perf_counter_ns()`. The span of a
                receive is the time for which the computation that needs it waited, right before that computation.
            backward_of: a context around each backward that adds to parameters' gradients, called with these parameters
                and those that get their last gradient in it.
            loss_scale: factor of the gradients.

        Returns:
            The results of `read_output` for each microbatch, on the rank of the last stage; empty elsewhere.
        """
        run = _Run(microbatches, read_output, loss_scale)
        self._shapes.describe(microbatches)
        trained = {} if backward_of is None else self._modules
        parameters = {stage: list(module.parameters()) for stage, module in trained.items()}
        completed = self._completed_parameters(rank, parameters) if parameters else {}
        with torch.set_grad_enabled(not self._schedule.is_forward_only):
            for action in self._schedule.actions[rank]:
                self._await_inputs(run, action, record)
                start = perf_counter_ns()
                with ExitStack() as contexts:
                    if action.kind in BACKWARDS:
                        contexts.enter_context(without_autocast())
                    if backward_of is not None and action.kind in _TO_WEIGHTS:
                        contexts.enter_context(backward_of(parameters[action.stage], completed.get(action, [])))
                    self._handlers[action.kind](run, action)
                if record is not None and action.kind not in RECEIVES:
                    record(action, start, perf_counter_ns())
        self._p2p.finish()
        step_boundary()  # a loss read from now on is already computed
        return [run.results[microbatch] for microbatch in sorted(run.results)]

    def _completed_parameters(
        self, rank: int, parameters: Mapping[int, Sequence[Tensor]]
    ) -> dict[Action, list[Tensor]]:
        """Return the parameters that get their last gradient in an action, by action."""
        completed: dict[Action, list[Tensor]] = {}
        stages: set[int] = set()
        found: set[Tensor] = set()
        for action in reversed(self._schedule.actions[rank]):
            if action.kind in _TO_WEIGHTS and action.stage not in stages:
                completed[action] = [p for p in parameters[action.stage] if p not in found]
                stages.add(action.stage)
                found.update(completed[action])
        return completed

    def _await_inputs(self, run: _Run, action: Action, record: Record | None) -> None:
        if action not in self._receives:
            self._receives[action] = self._dataflow.receives(action)
        for receive in self._receives[action]:
            start = perf_counter_ns()
            run.incoming[receive].wait()
            if record is not None:
                record(receive, start, perf_counter_ns())

    def _forward(self, run: _Run, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        saved = _SavedForward({})
        values = dict(run.microbatches[microbatch])
        for producer in self._wiring.producers(stage):
            layout, tensors = self._take_value(run, producer, stage, microbatch)
            leaves = detached_leaves(layout.tensors, tensors)
            saved.inputs[producer] = [leaf for leaf in leaves if leaf.requires_grad]
            entries = layout.fill(map(after_leaf, leaves))
            values.update(zip(self._wiring.carried(producer, stage), entries, strict=True))
        with forward_of(microbatch):
            output = self._modules[stage](*(values[name] for name in self._wiring.inputs[stage]))
        results = self._wiring.named_values(stage, output)
        for consumer in self._wiring.consumers(stage):
            names = self._wiring.carried(stage, consumer)
            run.values[stage, consumer, microbatch] = tuple(results[name] for name in names)
        if stage == self._schedule.num_stages - 1:
            result = run.read_output(output)
            run.results[microbatch] = result.detach() if isinstance(result, Tensor) else result
            if not self._schedule.is_forward_only:
                saved.loss = result / len(run.microbatches)
        if not self._schedule.is_forward_only:
            run.saved[stage, microbatch] = saved

    def _take_value(self, run: _Run, producer: int, stage: int, microbatch: int) -> tuple[ValueLayout, list[Tensor]]:
        """Return a value of another stage, received or computed here."""
        receive = Action(ActionKind.RECV_ACTIVATION, stage, microbatch, producer)
        if receive in run.incoming:
            return run.incoming_layouts.pop(receive), run.incoming.pop(receive).wait()
        value = run.values.pop((producer, stage, microbatch))
        layout, tensors = describe_value(value)
        self._keep_outputs(run, producer, stage, microbatch, layout, tensors)
        return layout, tensors

    def _keep_outputs(
        self, run: _Run, stage: int, consumer: int, microbatch: int, layout: ValueLayout, tensors: Sequence[Tensor]
    ) -> None:
        """Keep the graph edges where gradients of a value enter, not its tensors, so that their memory can be freed."""
        if not self._schedule.is_forward_only:
            run.saved[stage, microbatch].outputs[consumer] = [
                get_gradient_edge(tensor) if tensor.requires_grad else None
                for expected, tensor in zip(layout.tensors, tensors, strict=True)
                if expected.needs_gradient
            ]

    def _backward(self, run: _Run, action: Action) -> None:
        saved, roots, gradients = self._roots(run, action)
        if roots:
            torch.autograd.backward(roots, gradients)
        self._keep_gradients(run, action, saved)

    def _backward_input(self, run: _Run, action: Action) -> None:
        if action.stage in self._indivisible:
            self._backward(run, action)
            return
        saved, roots, gradients = self._roots(run, action)
        leaves = [leaf for tensors in saved.inputs.values() for leaf in tensors]
        halves = SplitBackward(roots, gradients, leaves)
        if halves.is_indivisible:
            self._indivisible.add(action.stage)
        run.weight_halves[action.stage, action.microbatch] = halves
        self._keep_gradients(run, action, saved)

    def _backward_weight(self, run: _Run, action: Action) -> None:
        halves = run.weight_halves.pop((action.stage, action.microbatch), None)
        if halves is not None:
            with whole_parameters(self._modules[action.stage].parameters()):
                halves.compute_weights()

    def _roots(self, run: _Run, action: Action) -> tuple[_SavedForward, list[GradientEdge], list[Tensor]]:
        """Return the roots of a backward and their gradients."""
        saved = run.saved.pop((action.stage, action.microbatch))
        roots: list[GradientEdge] = []
        gradients: list[Tensor] = []
        if saved.loss is not None:
            roots.append(get_gradient_edge(saved.loss))
            gradients.append(torch.full_like(saved.loss, run.loss_scale))
        for consumer, edges in saved.outputs.items():
            for edge, gradient in zip(edges, self._take_gradients(run, action, consumer), strict=True):
                if edge is not None:
                    roots.append(edge)
                    gradients.append(gradient)
        return saved, roots, gradients

    def _take_gradients(self, run: _Run, action: Action, consumer: int) -> list[Tensor]:
        """Return the gradients of a consumer's inputs, received or computed here."""
        receive = Action(ActionKind.RECV_GRADIENT, action.stage, action.microbatch, consumer)
        if receive in run.incoming:
            gradients = run.incoming.pop(receive).wait()
            if gradients:
                key = (action.stage, consumer, self._shapes.of(action.microbatch))
                self._p2p.release(key, action.microbatch)
            return gradients
        return run.gradients.pop((consumer, action.stage, action.microbatch))

    def _keep_gradients(self, run: _Run, action: Action, saved: _SavedForward) -> None:
        """Keep the gradients of the stage's inputs, until they are sent or used here."""
        for producer, leaves in saved.inputs.items():
            run.gradients[action.stage, producer, action.microbatch] = [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
            ]

    def _send_activation(self, run: _Run, action: Action) -> None:
        stage, microbatch, consumer = action.stage, action.microbatch, self._peer(action)
        value = run.values.pop((stage, consumer, microbatch))
        key = (stage, consumer, self._shapes.of(microbatch))
        layout, tensors = self._p2p.send_value(value, self._schedule.rank_of_stage[consumer], key, microbatch)
        self._keep_outputs(run, stage, consumer, microbatch, layout, tensors)

    def _receive_activation(self, run: _Run, action: Action) -> None:
        producer = self._peer(action)
        key = (producer, action.stage, self._shapes.of(action.microbatch))
        source = self._schedule.rank_of_stage[producer]
        run.incoming_layouts[action], run.incoming[action] = self._p2p.receive_value(source, key)

    def _send_gradient(self, run: _Run, action: Action) -> None:
        stage, microbatch, producer = action.stage, action.microbatch, self._peer(action)
        gradients = run.gradients.pop((stage, producer, microbatch))
        key = (producer, stage, self._shapes.of(microbatch))
        self._p2p.send_gradients(gradients, self._schedule.rank_of_stage[producer], key, microbatch)

    def _receive_gradient(self, run: _Run, action: Action) -> None:
        consumer = self._peer(action)
        key = (action.stage, consumer, self._shapes.of(action.microbatch))
        run.incoming[action] = self._p2p.receive_gradients(self._schedule.rank_of_stage[consumer], key)

    @staticmethod
    def _peer(action: Action) -> int:
        assert action.peer is not None  # see Action
        return action.peer


class _Shapes:
    """Keys of the microbatches' shapes: all ranks know them, and layouts between stages depend on nothing else."""

    def __init__(self, is_forward_only: bool) -> None:
        self._is_forward_only = is_forward_only
        self._of_microbatch: list[Hashable] = []
        self._structure: tuple[TreeSpec, str] | None = None  # the last one, and its text, which is slow to make

    def describe(self, microbatches: Sequence[Mapping[str, Any]]) -> None:
        """Describe the inputs of a run."""
        self._of_microbatch = [self._describe(microbatch) for microbatch in microbatches]

    def of(self, microbatch: int) -> Hashable:
        """Return a key, equal for inputs of the same structure, shapes, dtypes and Python values under one autocast."""
        return self._of_microbatch[microbatch]

    def _describe(self, inputs: Mapping[str, Any]) -> Hashable:
        layout, _ = describe_value(dict(inputs))
        if self._structure is None or self._structure[0] != layout.structure:
            self._structure = (layout.structure, repr(layout.structure))
        leaves = (leaf if isinstance(leaf, TensorLayout) else repr(leaf) for leaf in layout.leaves)
        return (self._is_forward_only, _autocast(), self._structure[1], *leaves)


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the current dtypes of torch.autocast, by device."""
    return tuple((device, torch.get_autocast_dtype(device)) for device in autocast_devices())


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable the caller's autocast for a backward, which computes in the dtypes of its forward."""
    with ExitStack() as contexts:
        for device, _ in _autocast():
            contexts.enter_context(torch.autocast(device, enabled=False))
        yield
