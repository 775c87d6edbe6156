"""One optimizer step, and one evaluation: computation and communication, in order.

`StepsUnderWay` begins a step before the values of the last one are read, so that an accelerator stays busy.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from nxd_layers.experts import RouterStatistics
from nxd_state import (
    all_reduce,
    get_device,
    get_mesh,
    get_world_group,
    is_host,
    read_later,
    report_step,
    send_to_device,
    step_boundary,
    widest_float,
)
from torch import Tensor

from nxd_trainer.data import Batch
from nxd_trainer.dpo import REFERENCE, model_of_reference, reference_log_probs
from nxd_trainer.from_recipe import autocast, model_inputs
from nxd_trainer.lr_schedule import lr_multiplier
from nxd_trainer.optimizers import learning_rate_on
from nxd_trainer.training.run_state import RunState, concatenated, held_out_batches

# What a rank that is to stop adds to a sum over ranks: all that can wait are less than one that cannot.
IN_HASTE, CAN_WAIT = 1.0, 2.0**-20


def take_step(state: RunState, *, stopping: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """A whole optimizer step, without waiting for its values. On XLA it is one graph, which is sent to the device.

    Args:
        stopping: `IN_HASTE` or `CAN_WAIT` where this rank has been asked to stop.

    Returns:
        `[2]`, in the device's widest float, the same on every rank: the mean loss over the ranks that have one, and the
        sum of `stopping`; then the norm of the gradients before clipping, 0-d (None without clipping).
    """
    rank_loss = compute_gradients(state)
    device = get_device()
    # Not 0-d: torch-xla takes the scalars 0 and 1 for constants.
    request = send_to_device(torch.tensor([stopping], dtype=widest_float(device)), device)
    sums = all_reduce(torch.cat([loss_to_add(rank_loss).view(1), request]), get_world_group())  # one message for both
    return sums, update_weights(state)


def compute_gradients(state: RunState) -> Tensor | None:
    """Forward and backward over the next step's microbatches; gradients are averaged on the way.

    Returns:
        The mean loss of this rank's microbatches, 0-d; None on a rank without the last stage.
    """
    batch = state.train_batches.next_step()
    if state.model.router_balance is not None:
        state.model.router_balance.padding_mask = batch.is_token
    with autocast(state.recipe):
        loss = state.model.run_train(**_inputs(state, batch))
    assert not isinstance(loss, list)  # that is what return_mb_loss asks for
    return loss


def _inputs(state: RunState, batch: Batch) -> dict[str, Any]:
    """A batch as the model takes it; with preferences also what the reference model says of it."""
    inputs: dict[str, Any] = model_inputs(state.input_names, batch)
    if REFERENCE in state.input_names:
        with model_of_reference(state.model, state.reference) as model:
            absent = {REFERENCE: None} if state.reference is None else {}
            inputs[REFERENCE] = reference_log_probs(model, {**inputs, **absent})
    return inputs


def update_weights(state: RunState) -> Tensor | None:
    """Clip the gradients and apply them, at this step's learning rate.

    Returns:
        Their norm before clipping, 0-d; None without clipping.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate_on(get_device(), learning_rate(state))
    state.optimizer.step()
    state.optimizer.zero_grad()
    if state.model.router_balance is not None:
        state.model.router_balance.update_biases()
    step_boundary()
    state.step += 1
    return state.optimizer.grad_norm


def learning_rate(state: RunState) -> float:
    """The learning rate of the next step: a function of the step alone, so nothing of it needs saving."""
    options = state.recipe.optimizer
    return options.lr * lr_multiplier(
        state.step,
        total_steps=state.recipe.train.steps,
        warmup_steps=options.warmup_steps,
        min_lr_ratio=options.min_lr_ratio,
        schedule=options.schedule,
        num_decay_steps=options.num_decay_steps,
        decay_type=options.decay_type,
        num_cycles=options.num_cycles,
        power=options.power,
    )


@torch.no_grad()
def evaluate(state: RunState) -> float | None:
    """Mean loss over the held-out batches, the same on every rank; None where nothing is held out."""
    if not len(state.held_out_loader):
        return None
    state.model.eval()
    loss = _held_out_loss(state)
    state.model.train()
    mean = all_reduce(loss_to_add(loss), get_world_group())
    step_boundary()
    return float(mean)


def loss_to_add(rank_loss: Tensor | None) -> Tensor:
    """What a rank gives to a sum over the world, so that it is the mean of the losses, in the device's widest float.

    Args:
        rank_loss: None on a rank without the last pipeline stage, which sees no loss.
    """
    reporting = get_world_group().size // get_mesh().pp
    loss = torch.zeros(()) if rank_loss is None else rank_loss.detach()
    device = get_device()
    return loss.to(device, widest_float(device)) / reporting


def _held_out_loss(state: RunState) -> Tensor | None:
    batches = held_out_batches(state.held_out_loader)
    losses = []
    with autocast(state.recipe):
        if get_mesh().pp == 1:
            for batch in batches:
                output = state.model(**_inputs(state, batch))
                losses.append(output if isinstance(output, Tensor) else output.loss)
                step_boundary()  # one small graph for all batches
        else:
            while group := list(islice(batches, state.recipe.train.gradient_accumulation_steps)):
                batch = concatenated(group)
                losses.append(state.model.run_eval(**_inputs(state, batch)))
    return None if losses[0] is None else torch.stack(losses).mean()


@dataclass(frozen=True)
class FinishedStep:
    """A step that has been computed; the same on every rank.

    Attributes:
        number: optimizer steps taken with it, from 1.
        learning_rate: that it was taken with.
        tokens: that the loss has counted since the run began.
        tokens_seen: read since the run began, without padding.
        loss: mean over all tokens of the step that it counts.
        grad_norm: before clipping; None without clipping.
        stopping: the sum over ranks of `IN_HASTE` and `CAN_WAIT`, of those that had been asked to stop when it began.
        routing: what the routers of a model with experts did.
    """

    number: int
    learning_rate: float
    tokens: int
    tokens_seen: int
    loss: float
    grad_norm: float | None
    stopping: float
    routing: RouterStatistics | None


class StepsUnderWay:
    """Begins steps of a run, and finishes them in order, so late that an accelerator need not wait for this process.

    Attributes:
        stopping: whether a finished step tells that a rank has been asked to stop.
        in_haste: whether it tells that this cannot wait for an evaluation.
    """

    def __init__(self, state: RunState) -> None:
        self.stopping = self.in_haste = False
        self._state = state
        self._begun: deque[Callable[[], FinishedStep]] = deque()
        self._may_be_under_way = 0 if is_host() else 1  # the CPU has computed a step that has begun

    def begin(self, *, stopping: float) -> None:
        """Take a step as far as this process has to do with it: the run's state is then that after the step.

        Args:
            stopping: see `take_step`.
        """
        state, rate = self._state, learning_rate(self._state)
        report_step(state.step + 1)
        try:
            sums, norm = take_step(state, stopping=stopping)
        except Exception as error:
            error.add_note(f"in step {state.step + 1}")
            raise
        number, tokens, tokens_seen = state.step, state.train_loader.tokens_learned, state.train_loader.tokens_seen
        read_sums, read_norm = read_later(sums), None if norm is None else read_later(norm)
        routing = None if state.model.router_balance is None else state.model.router_balance.statistics

        def finish() -> FinishedStep:
            loss, of_ranks = read_sums().tolist()
            grad_norm = None if read_norm is None else float(read_norm())
            return FinishedStep(number, rate, tokens, tokens_seen, loss, grad_norm, of_ranks, routing)

        self._begun.append(finish)

    def finish(self, *, all_of_them: bool) -> Iterator[FinishedStep]:
        """Wait for steps: but for the newest on an accelerator, which may still be computed while the next is begun.

        Args:
            all_of_them: also for the newest; in any case so once ranks are to stop.
        """
        while len(self._begun) > (0 if all_of_them or self.stopping else self._may_be_under_way):
            step = self._begun.popleft()()
            self.stopping = self.stopping or step.stopping > 0
            self.in_haste = self.in_haste or step.stopping >= IN_HASTE
            yield step
