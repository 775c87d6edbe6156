"""DPO (Rafailov et al. 2023): a model learns to prefer one answer to another, more than a reference model does.

A batch has pairs of sequences, the chosen answer and then the rejected one. The reference model is the model as it was
before the run, or with LoRA the base model. Log-probabilities are exact at any layout: logits stay split.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, assert_never

import torch
from nxd_engine import NxDModel
from nxd_engine.models.llama import IGNORED_LABEL
from nxd_layers import token_log_probs
from nxd_layers.hf import parallelize
from nxd_lora import adapters_off
from nxd_state import all_reduce, get_group, get_mesh, is_transformers_model
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_trainer.recipe import Recipe
from nxd_trainer.recipe.sections import DpoLossName, DpoSection

REFERENCE = "reference_log_probs"  # an input of the trained model


class DpoLoss:
    """The DPO loss function of a transformers model or our Llama.

    Args:
        options: the loss and its parameters.
    """

    def __init__(self, options: DpoSection) -> None:
        self._options = options

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        *,
        shift_labels: Tensor | None = None,
        reference_log_probs: Tensor | None = None,
        **further: Any,
    ) -> Tensor:
        """Return the mean loss of the pairs, 0-d; without a reference, the log-probability of each answer, `[2 pairs]`.

        Args:
            logits: `[2 pairs, seq, vocab/tp]`.
            labels, shift_labels: `[2 pairs, seq]`, next tokens, -100 outside answers; the latter has precedence.
            vocab_size: number of tokens, if the logits' dim is padded.
            reference_log_probs: the answers' log-probabilities under the reference model, `[2 pairs]`.
            **further: other arguments that transformers models pass to their loss.
        """
        tokens = labels if shift_labels is None else shift_labels
        assert tokens is not None, "a model computes its loss when it has labels"
        log_probs: Tensor = token_log_probs(logits, tokens, vocab_size=vocab_size).sum(dim=1)
        if reference_log_probs is None:
            return log_probs
        gain = log_probs - reference_log_probs
        if self._options.loss == "ipo":  # per token, so that long answers do not count more
            gain = gain / (tokens != IGNORED_LABEL).sum(dim=1).clamp(min=1)
        rewards = self._options.beta * gain
        return _losses(rewards[0::2], rewards[1::2], self._options).mean()


def _losses(chosen: Tensor, rejected: Tensor, options: DpoSection) -> Tensor:
    """Return the losses for the rewards of each pair's answers, `[pairs]`."""
    margin, swapped = chosen - rejected, options.label_smoothing
    loss: DpoLossName = options.loss
    match loss:
        case "sigmoid":
            return -(1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)
        case "robust":  # Chowdhury et al. 2024: unbiased if that fraction of pairs is swapped
            return (swapped * F.logsigmoid(-margin) - (1 - swapped) * F.logsigmoid(margin)) / (1 - 2 * swapped)
        case "hinge":  # Zhao et al. 2023 (SLiC)
            return F.relu(1 - margin)
        case "ipo":  # Azar et al. 2023
            return ((margin - 0.5) / options.beta) ** 2
        case "apo_zero":  # D'Oosterlinck et al. 2024: the chosen answer more likely, the rejected one less likely
            return F.sigmoid(-chosen) + F.sigmoid(rejected)
        case "apo_down":  # same paper: both less likely, the rejected one even less
            return F.sigmoid(chosen) + F.sigmoid(-margin)
    assert_never(loss)


def with_dpo_loss(make: Callable[[], nn.Module], recipe: Recipe) -> Callable[[], nn.Module]:
    """Return a function that makes the same model with the DPO loss."""

    def made() -> nn.Module:
        module: Any = make()
        if is_transformers_model(module) and recipe.parallel.degrees.splits_layers:  # first, as it also sets the loss
            splits_experts = recipe.parallel.degrees.splits_experts
            parallelize(module, expert_parallel=splits_experts, sequence_parallel=recipe.parallel.sequence_parallel)
        module.loss_function = DpoLoss(recipe.dpo)
        whole: nn.Module = module
        return whole

    return made


@torch.no_grad()
def reference_log_probs(model: NxDModel, inputs: Mapping[str, Any]) -> Tensor:
    """Return the log-probabilities `[2 pairs]` of a batch's answers on every pipeline rank, by `model_of_reference`."""
    found = model.run_eval(**inputs)
    ids: Tensor = inputs["input_ids"]
    dtype = torch.promote_types(model.dtype, torch.float32)
    if found is None:  # the last stage is on another rank
        log_probs = torch.zeros(len(ids), dtype=dtype, device=ids.device)
    else:
        log_probs = torch.cat([it if isinstance(it, Tensor) else it.loss for it in found]).to(dtype)
    return all_reduce(log_probs, get_group("pp")) if get_mesh().pp > 1 else log_probs


@contextmanager
def model_of_reference(model: NxDModel, reference: NxDModel | None) -> Iterator[NxDModel]:
    """Yield the reference model, without dropout; without a separate one, the model without its adapters."""
    chosen = model if reference is None else reference
    was_training = chosen.training
    chosen.eval()
    try:
        if reference is None:
            with adapters_off(model):
                yield model
        else:
            yield reference
    finally:
        chosen.train(was_training)
