"""One optimizer step, and one evaluation: what is computed and what is communicated, in order."""

from contextlib import nullcontext

import torch
from nxd_optim import clip_grad_norm, reduce_sequence_parallel_gradients
from nxd_state import all_reduce, get_device, get_world_group, step_boundary
from torch import Tensor

from nxd_trainer.data import Batch
from nxd_trainer.lr_schedule import lr_multiplier
from nxd_trainer.training.run_state import RunState


def compute_gradients(state: RunState) -> tuple[Tensor, Tensor | None]:
    """Forward and backward over the next step's microbatches; average and clip. The weights stay as they are.

    Returns:
        The mean loss of this rank's microbatches and the gradient norm before clipping (None without clipping), 0-d.
    """
    batches = state.train_loader.next_step()
    losses = []
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        # Gradients leave while the last backward is running; until then they are only accumulated.
        with state.reducer.overlap_backward() if is_last else nullcontext():
            loss = _loss(state, batch)
            (loss / len(batches)).backward()
        losses.append(loss.detach())
    state.reducer.finish()
    reduce_sequence_parallel_gradients(state.model.parameters())
    norm = None
    if state.recipe.train.max_grad_norm > 0:
        norm = clip_grad_norm(state.model.parameters(), state.recipe.train.max_grad_norm)
    return torch.stack(losses).mean(), norm


def update_weights(state: RunState) -> None:
    """Apply the gradients, at this step's learning rate."""
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(state)
    state.optimizer.step()
    state.reducer.zero_grad()
    step_boundary()
    state.step += 1


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
    state.model.eval()
    losses = torch.stack([_loss(state, batch) for batch in state.held_out_loader])
    state.model.train()
    return float(all_reduce(losses.mean(), get_world_group(), op="avg"))


def _loss(state: RunState, batch: Batch) -> Tensor:
    device = get_device()
    autocast = (
        torch.autocast(device.type, dtype=torch.bfloat16)
        if state.recipe.train.autocast == "bfloat16"
        else nullcontext()
    )
    with autocast:
        loss: Tensor = state.model(batch.input_ids.to(device), batch.labels.to(device))
    return loss
