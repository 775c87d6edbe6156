"""Plays a schedule: computes this rank's stages in the order it says, and sends and receives what it says."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxd_pipeline.partition.stage import Wiring
from nxd_pipeline.runtime.layout import TensorLayout, differentiable, fill, layout_of, tensors_of
from nxd_pipeline.runtime.mailbox import Incoming, Mailbox
from nxd_pipeline.schedules import Action, ActionKind, Schedule, verify_schedule

_PLAYED = frozenset(ActionKind) - {ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT}


@dataclass
class _Passage:
    """What is kept of one microbatch in one stage from its forward to its backward."""

    incoming: dict[int, Any]  # by producer, with leaf tensors
    outgoing: dict[int, Any]  # by consumer
    loss: Tensor | None = None  # of the last stage, divided by the number of microbatches


class Executor:
    """Plays one schedule over and over; values come and go in dicts keyed by (producer, consumer, microbatch)."""

    def __init__(self, modules: Mapping[int, nn.Module], wiring: Wiring, schedule: Schedule, mailbox: Mailbox) -> None:
        """Takes the modules of this rank's stages and the wiring of all.

        Raises:
            ValueError: the schedule cannot be played, or splits the backward in two.
        """
        split = next((it for it in schedule.compute_actions() if it.kind not in _PLAYED), None)
        if split is not None:
            raise ValueError(
                f"schedule {schedule.name!r} splits the backward ({split}), which the runtime does not play; "
                "use gpipe, 1f1b or interleaved"
            )
        verify_schedule(schedule, wiring.edges)
        self._modules = modules
        self._wiring = wiring
        self._schedule = schedule
        self._mailbox = mailbox
        self._signature: Hashable = None
        self._microbatches: Sequence[Mapping[str, Any]] = ()
        self._read_output: Callable[[Any], Any] = _same
        self._results: dict[int, Any] = {}
        self._passages: dict[tuple[int, int], _Passage] = {}
        self._values: dict[tuple[int, int, int], Any] = {}  # made here, for other stages
        self._incoming_values: dict[tuple[int, int, int], Incoming] = {}
        self._gradients: dict[tuple[int, int, int], list[Tensor]] = {}  # made here, for other stages
        self._incoming_gradients: dict[tuple[int, int, int], Incoming] = {}

    def run(self, rank: int, microbatches: Sequence[Mapping[str, Any]], read_output: Callable[[Any], Any]) -> list[Any]:
        """Play the schedule once; gradients are added to those that parameters have.

        Args:
            rank: this rank's index in the pipeline-parallel group.
            microbatches: the model's inputs of each microbatch.
            read_output: what of the model's output is wanted; in training the loss, a scalar.

        Returns:
            What `read_output` gave for each microbatch, on the rank of the last stage; elsewhere nothing.
        """
        self._microbatches, self._read_output, self._results = microbatches, read_output, {}
        self._signature = (repr(layout_of(dict(microbatches[0]))), self._schedule.is_forward_only)
        play = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.SEND_ACTIVATION: self._send_activation,
            ActionKind.RECV_ACTIVATION: self._receive_activation,
            ActionKind.SEND_GRADIENT: self._send_gradient,
            ActionKind.RECV_GRADIENT: self._receive_gradient,
        }
        with torch.set_grad_enabled(not self._schedule.is_forward_only):
            for action in self._schedule.actions[rank]:
                play[action.kind](action)
        self._mailbox.finish()
        return [self._results[microbatch] for microbatch in sorted(self._results)]

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        incoming: dict[int, Any] = {}
        values = dict(self._microbatches[microbatch])
        for producer in self._wiring.producers(stage):
            incoming[producer] = self._take_value(producer, stage, microbatch)
            values.update(zip(self._wiring.carried(producer, stage), incoming[producer], strict=True))
        output = self._modules[stage](*(values[name] for name in self._wiring.inputs[stage]))
        passage = _Passage(incoming, self._outgoing(stage, output))
        for consumer, value in passage.outgoing.items():
            self._values[stage, consumer, microbatch] = value
        if stage == self._wiring.num_stages - 1:
            result = self._read_output(output)
            self._results[microbatch] = result.detach() if isinstance(result, Tensor) else result
            if not self._schedule.is_forward_only:
                passage.loss = result / len(self._microbatches)
        if not self._schedule.is_forward_only:
            self._passages[stage, microbatch] = passage

    def _outgoing(self, stage: int, output: Any) -> dict[int, Any]:
        names = self._wiring.outputs[stage]
        if len(names) > 1 and not (isinstance(output, tuple) and len(output) == len(names)):
            raise ValueError(
                f"stage {stage} returned a {type(output).__name__}; expected a tuple of the values {names}"
            )
        values = dict(zip(names, output if len(names) > 1 else (output,), strict=False))
        return {
            consumer: tuple(values[name] for name in self._wiring.carried(stage, consumer))
            for consumer in self._wiring.consumers(stage)
        }

    def _take_value(self, producer: int, stage: int, microbatch: int) -> Any:
        """A value from another stage, in which gradients stop and are collected."""
        key = (producer, stage, microbatch)
        if key in self._incoming_values:
            return self._incoming_values.pop(key).value()
        value = self._values.pop(key)
        return fill(layout_of(value), tensors_of(value))

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        passage = self._passages.pop((stage, microbatch))
        tensors: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if passage.loss is not None:
            tensors.append(passage.loss)
            gradients.append(None)
        for consumer, value in passage.outgoing.items():
            tensors += differentiable(value)
            gradients += self._take_gradients(consumer, stage, microbatch)
        if tensors:
            torch.autograd.backward(tensors, gradients)
        for producer, value in passage.incoming.items():
            self._gradients[stage, producer, microbatch] = [
                torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in differentiable(value)
            ]

    def _take_gradients(self, consumer: int, stage: int, microbatch: int) -> list[Tensor]:
        key = (consumer, stage, microbatch)
        if key in self._incoming_gradients:
            return self._incoming_gradients.pop(key).tensors()
        return self._gradients.pop(key)

    def _send_activation(self, action: Action) -> None:
        consumer = self._peer(action)
        value = self._values.pop((action.stage, consumer, action.microbatch))
        key = (action.stage, consumer, self._signature)
        self._mailbox.send_value(value, self._schedule.rank_of_stage[consumer], key)

    def _receive_activation(self, action: Action) -> None:
        producer = self._peer(action)
        key = (producer, action.stage, self._signature)
        incoming = self._mailbox.receive_value(self._schedule.rank_of_stage[producer], key)
        self._incoming_values[producer, action.stage, action.microbatch] = incoming

    def _send_gradient(self, action: Action) -> None:
        producer = self._peer(action)
        gradients = self._gradients.pop((action.stage, producer, action.microbatch))
        self._mailbox.send_tensors(gradients, self._schedule.rank_of_stage[producer])

    def _receive_gradient(self, action: Action) -> None:
        consumer = self._peer(action)
        sent = differentiable(self._passages[action.stage, action.microbatch].outgoing[consumer])
        layouts = [TensorLayout.of(tensor) for tensor in sent]
        incoming = self._mailbox.receive_tensors(layouts, self._schedule.rank_of_stage[consumer])
        self._incoming_gradients[consumer, action.stage, action.microbatch] = incoming

    @staticmethod
    def _peer(action: Action) -> int:
        assert action.peer is not None  # communication has one, see Action
        return action.peer


def _same(output: Any) -> Any:
    return output
