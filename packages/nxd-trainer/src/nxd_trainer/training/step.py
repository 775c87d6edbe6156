"""One optimizer step, and one evaluation: computation and communication, in order.

`StepsInFlight` starts a step before the values of the last one are read, so that an accelerator stays busy.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from nxd_data import Batch, concatenate, held_out_batches
from nxd_layers.experts import RouterStatistics
from nxd_optim import LossScaleTooSmallError
from nxd_state import (
    all_reduce,
    get_device,
    get_mesh,
    get_world_group,
    is_cpu,
    read_later,
    report_step,
    send_to_device,
    step_boundary,
    widest_float,
)
from torch import Tensor

from nxd_trainer.dpo import REFERENCE, model_of_reference, reference_log_probs
from nxd_trainer.forward import autocast, model_inputs
from nxd_trainer.optimizers import learning_rate_on, scheduled_rate
from nxd_trainer.training.run_state import RunState
from nxd_trainer.training.saving import diverged

# A rank that should stop adds one of these to a sum over ranks; all that can wait add up to less than one that cannot.
URGENT, CAN_WAIT = 1.0, 2.0**-20


def take_step(state: RunState, *, stopping: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """Take an optimizer step without waiting for its values. On XLA it is one graph, which is sent to the device.

    Args:
        stopping: `URGENT` or `CAN_WAIT` if this rank has been asked to stop.

    Returns:
        A tensor `[2]`, in the device's widest float, the same on every rank: the mean loss over the ranks that have
        one, and the sum of `stopping`; then the gradient norm before clipping, 0-d (None without clipping).
    """
    rank_loss = compute_gradients(state)
    device = get_device()
    # Not 0-d: torch-xla treats the scalars 0 and 1 as constants.
    request = send_to_device(torch.tensor([stopping], dtype=widest_float(device)), device)
    sums = all_reduce(torch.cat([loss_to_add(rank_loss).view(1), request]), get_world_group())  # one message for both
    return sums, update_weights(state)


def compute_gradients(state: RunState) -> Tensor | None:
    """Run forward and backward over the next step's microbatches, and average gradients.

    Returns:
        The mean loss of this rank's microbatches, 0-d; None on a rank without the last stage.
    """
    batch = state.train_batches.next_step()
    if state.model.router_balance is not None:
        state.model.router_balance.padding_mask = batch.is_token
    with autocast(state.recipe):
        loss = state.model.run_train(**_inputs(state, batch))
    assert not isinstance(loss, list)  # only with return_mb_loss
    return loss


def _inputs(state: RunState, batch: Batch) -> dict[str, Any]:
    """Return a batch as the model's inputs; with preferences, also the reference model's outputs."""
    inputs = model_inputs(state.input_names, batch)
    if REFERENCE in state.input_names:
        with model_of_reference(state.model, state.reference) as model:
            absent = {REFERENCE: None} if state.reference is None else {}
            inputs[REFERENCE] = reference_log_probs(model, {**inputs, **absent})
    return inputs


def update_weights(state: RunState) -> Tensor | None:
    """Clip the gradients and apply them with this step's learning rate.

    Returns:
        The gradient norm before clipping, 0-d; None without clipping.

    Raises:
        TrainingDiverged: gradients are not finite at any loss scale.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate_on(get_device(), learning_rate(state))
    before = _skipped_steps(state)
    try:
        state.optimizer.step()
    except LossScaleTooSmallError as error:
        raise diverged(state, str(error)) from error
    state.optimizer.zero_grad()
    if state.average is not None and _skipped_steps(state) == before:
        state.average.update()
    if state.model.router_balance is not None:
        state.model.router_balance.update_biases()
    step_boundary()
    state.step += 1
    return state.optimizer.grad_norm


def _skipped_steps(state: RunState) -> int:
    scaler = state.optimizer.loss_scaler
    return 0 if scaler is None else scaler.skipped_steps


def learning_rate(state: RunState) -> float:
    """Return the learning rate of the next step; it depends only on the step, so there is no state to save."""
    return scheduled_rate(state.recipe.optimizer, state.step, total_steps=state.recipe.train.steps)


@torch.no_grad()
def evaluate(state: RunState) -> float | None:
    """Return the mean loss over the held-out batches, the same on every rank; None if nothing is held out.

    With `train.ema_decay` it is the loss of the averaged weights.
    """
    if not len(state.held_out_loader):
        return None
    state.model.eval()
    with nullcontext() if state.average is None else state.average.applied():
        loss = _held_out_loss(state)
    state.model.train()
    mean = all_reduce(loss_to_add(loss), get_world_group())
    step_boundary()
    return float(mean)


def loss_to_add(rank_loss: Tensor | None) -> Tensor:
    """Scale a rank's loss so that the sum over the world is the mean loss, in the device's widest float.

    Args:
        rank_loss: loss of this rank; None on a rank without the last pipeline stage.
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
                batch = concatenate(group)
                losses.append(state.model.run_eval(**_inputs(state, batch)))
    return None if losses[0] is None else torch.stack(losses).mean()


@dataclass(frozen=True)
class FinishedStep:
    """A step that has been computed; the same on every rank."""

    number: int  # the step's number, from 1
    learning_rate: float  # learning rate of the step
    tokens: int  # tokens that the loss has counted since the run began
    tokens_seen: int  # tokens read since the run began, without padding
    loss: float  # mean over all counted tokens of the step
    grad_norm: float | None  # gradient norm before clipping; None without clipping
    loss_scale: float | None  # the loss scale of the step; None without loss scaling
    # steps skipped since the run began, because gradients overflowed; None without loss scaling
    skipped_steps: int | None
    is_skipped: bool  # whether this step was skipped
    stopping: float  # sum over ranks of `URGENT` or `CAN_WAIT`, for those that had been asked to stop
    routing: RouterStatistics | None  # router statistics of a model with experts


class StepsInFlight:
    """Starts steps of a run and finishes them in order, late enough that an accelerator never waits for this process.

    Attributes:
        stopping: whether a finished step reports that a rank was asked to stop.
        is_urgent: whether stopping cannot wait for an evaluation.
    """

    def __init__(self, state: RunState) -> None:
        self.stopping = self.is_urgent = False
        self._state = state
        self._begun: deque[Callable[[], FinishedStep]] = deque()
        self._num_in_flight = 0 if is_cpu() else 1  # on the CPU, a started step is already computed

    def begin(self, *, stopping: float) -> None:
        """Start a step, see `take_step`; when this returns, the state in this process is that after the step."""
        state, rate = self._state, learning_rate(self._state)
        scaler = state.optimizer.loss_scaler
        scale, before = None if scaler is None else scaler.scale_factor, _skipped_steps(state)
        report_step(state.step + 1)
        try:
            sums, norm = take_step(state, stopping=stopping)
        except Exception as error:
            error.add_note(f"in step {state.step + 1}")
            raise
        number, tokens, tokens_seen = state.step, state.train_loader.tokens_learned, state.train_loader.tokens_seen
        read_sums, read_norm = read_later(sums), None if norm is None else read_later(norm)
        skipped = _skipped_steps(state)
        routing = None if state.model.router_balance is None else state.model.router_balance.statistics

        def finish() -> FinishedStep:
            loss, of_ranks = read_sums().tolist()
            grad_norm = None if read_norm is None else float(read_norm())
            return FinishedStep(
                number=number,
                learning_rate=rate,
                tokens=tokens,
                tokens_seen=tokens_seen,
                loss=loss,
                grad_norm=grad_norm,
                loss_scale=scale,
                skipped_steps=None if scaler is None else skipped,
                is_skipped=skipped > before,
                stopping=of_ranks,
                routing=routing,
            )

        self._begun.append(finish)

    def finish(self, *, all_of_them: bool) -> Iterator[FinishedStep]:
        """Wait for steps; on an accelerator not for the newest, unless `all_of_them` is set or ranks should stop."""
        while len(self._begun) > (0 if all_of_them or self.stopping else self._num_in_flight):
            step = self._begun.popleft()()
            self.stopping = self.stopping or step.stopping > 0
            self.is_urgent = self.is_urgent or step.stopping >= URGENT
            yield step
