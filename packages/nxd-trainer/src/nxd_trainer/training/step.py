"""One optimizer step, and one evaluation: what is computed and what is communicated, in order."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from nxd_optim import GradientReducer, NeuronZero1Optimizer, clip_grad_norm, reduce_sequence_parallel_gradients
from nxd_pipeline import NxDPPModel
from nxd_state import all_reduce, get_device, get_mesh, get_world_group, send_to_device, step_boundary
from torch import Tensor

from nxd_trainer.data import Batch
from nxd_trainer.lr_schedule import lr_multiplier
from nxd_trainer.models import LlamaForCausalLM
from nxd_trainer.training.batches import held_out_batches
from nxd_trainer.training.optimizer import learning_rate_on
from nxd_trainer.training.pipeline import evaluate_on, train_on
from nxd_trainer.training.precision import autocast
from nxd_trainer.training.run_state import RunState


def take_step(state: RunState, *, stopping: bool = False) -> tuple[Tensor, Tensor | None]:
    """A whole optimizer step, for whose values nothing here waits. On XLA it is one graph, which goes to the device.

    Args:
        stopping: whether this rank has been asked to stop.

    Returns:
        float64 [2], the same on every rank: the mean loss over the ranks that have one, and how many ranks are to stop;
        then the norm of the gradients before clipping, 0-d (None without clipping).
    """
    rank_loss = compute_gradients(state)
    # Not 0-d: torch-xla takes the scalars 0 and 1 for constants.
    request = send_to_device(torch.tensor([float(stopping)], dtype=torch.float64), get_device())
    sums = all_reduce(torch.cat([loss_to_add(rank_loss).view(1), request]), get_world_group())  # one message for both
    return sums, update_weights(state)


def compute_gradients(state: RunState) -> Tensor | None:
    """Forward and backward over the next step's microbatches.

    Returns:
        The mean loss of this rank's microbatches, 0-d; None on a rank without the last stage.
    """
    batches = state.train_batches.next_step()
    if isinstance(state.model, NxDPPModel):
        # Every microbatch adds to every gradient, so that none is complete before the schedule is at its end.
        return train_on(state.model, batches)
    return _accumulate_gradients(state, state.model, batches)


def _accumulate_gradients(state: RunState, model: LlamaForCausalLM, batches: Sequence[Batch]) -> Tensor:
    losses = []
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        # Gradients leave while the last backward is running; until then they are only accumulated.
        with state.reducer.overlap_backward() if is_last else nullcontext():
            loss = _loss(state, model, batch)
            (loss / len(batches)).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def update_weights(state: RunState) -> Tensor | None:
    """Average the gradients over the replicas, clip and apply them, at this step's learning rate.

    Returns:
        Their norm before clipping, 0-d; None without clipping.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate_on(get_device(), learning_rate(state))
    if isinstance(state.optimizer, NeuronZero1Optimizer):
        state.optimizer.step()  # averages and clips, too
        norm = state.optimizer.grad_norm
    else:
        norm = _average_and_clip(state)
        state.optimizer.step()
    state.reducer.zero_grad()
    step_boundary()
    state.step += 1
    return norm


def _average_and_clip(state: RunState) -> Tensor | None:
    assert isinstance(state.reducer, GradientReducer)  # as for every optimizer that does not average by itself
    state.reducer.finish()
    reduce_sequence_parallel_gradients(state.model.parameters())
    if state.recipe.train.max_grad_norm == 0:
        return None
    return clip_grad_norm(state.model.parameters(), state.recipe.train.max_grad_norm)


def learning_rate(state: RunState) -> float:
    """The learning rate of the next step: a function of the step alone, so nothing of it needs saving."""
    options = state.recipe.optimizer
    return options.lr * lr_multiplier(
        state.step,
        total_steps=state.recipe.train.steps,
        warmup_steps=options.warmup_steps,
        min_lr_ratio=options.min_lr_ratio,
        schedule=options.schedule,
    )


@torch.no_grad()
def evaluate(state: RunState) -> float | None:
    """Mean loss over the held-out batches, the same on every rank; None where nothing is held out."""
    if not len(state.held_out_loader):
        return None
    model = state.model
    batches = held_out_batches(state.held_out_loader)
    model.eval()
    if isinstance(model, NxDPPModel):
        loss = evaluate_on(model, batches, state.recipe.train.gradient_accumulation_steps)
    else:
        loss = torch.stack([_evaluate_batch(state, model, batch) for batch in batches]).mean()
    model.train()
    mean = all_reduce(loss_to_add(loss), get_world_group())
    step_boundary()
    return float(mean)


def loss_to_add(rank_loss: Tensor | None) -> Tensor:
    """What a rank gives to a sum over the world, so that it is the mean of the losses, float64.

    Args:
        rank_loss: None on a rank without the last pipeline stage, which sees no loss.
    """
    reporting = get_world_group().size // get_mesh().pp
    loss = torch.zeros(()) if rank_loss is None else rank_loss.detach()
    return loss.double().to(get_device()) / reporting


def _evaluate_batch(state: RunState, model: LlamaForCausalLM, batch: Batch) -> Tensor:
    loss = _loss(state, model, batch)
    step_boundary()  # one small graph for all batches
    return loss


def _loss(state: RunState, model: LlamaForCausalLM, batch: Batch) -> Tensor:
    with autocast(state.recipe):
        loss: Tensor = model(batch.input_ids, batch.labels)
    return loss
