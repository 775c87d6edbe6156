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
from nxd_layers.hf import is_transformers_model, parallelize
from nxd_lora import adapters_off
from nxd_state import all_reduce, get_group, get_mesh
from torch import Tensor, nn
from torch.nn import functional as F

from nxd_trainer.recipe import Recipe
from nxd_trainer.recipe.sections import DpoLossName, DpoSection

REFERENCE = "reference_log_probs"  # the input of a model that is trained


class DpoLoss:
    """The loss function of a model, of transformers or our Llama.

    Args:
        options: which loss, and its numbers.
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
        """The mean loss of the pairs, 0-d; without a reference the log-probability of each answer, `[2 pairs]`.

        Args:
            logits: `[2 pairs, seq, vocab/tp]`.
            labels: `[2 pairs, seq]`, the next tokens, -100 where they are no answer, unless `shift_labels` has them.
            vocab_size: number of tokens, if the logits' dim is padded.
            shift_labels: `[2 pairs, seq]`, as `labels`.
            reference_log_probs: of the answers by the reference model, `[2 pairs]`.
            **further: what models of transformers pass to their loss besides.
        """
        tokens = labels if shift_labels is None else shift_labels
        assert tokens is not None, "a model computes its loss when it has labels"
        log_probs: Tensor = token_log_probs(logits, tokens, vocab_size=vocab_size).sum(dim=1)
        if reference_log_probs is None:
            return log_probs
        gain = log_probs - reference_log_probs
        if self._options.loss == "ipo":  # of a token, so that long answers do not count for more
            gain = gain / (tokens != IGNORED_LABEL).sum(dim=1).clamp(min=1)
        rewards = self._options.beta * gain
        return _losses(rewards[0::2], rewards[1::2], self._options).mean()


def _losses(chosen: Tensor, rejected: Tensor, options: DpoSection) -> Tensor:
    """Of the rewards of each pair's answers, `[pairs]`."""
    margin, swapped = chosen - rejected, options.label_smoothing
    loss: DpoLossName = options.loss
    match loss:
        case "sigmoid":
            return -(1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)
        case "robust":  # Chowdhury et al. 2024: unbiased where so many pairs are swapped
            return (swapped * F.logsigmoid(-margin) - (1 - swapped) * F.logsigmoid(margin)) / (1 - 2 * swapped)
        case "hinge":  # Zhao et al. 2023 (SLiC)
            return F.relu(1 - margin)
        case "ipo":  # Azar et al. 2023
            return ((margin - 0.5) / options.beta) ** 2
        case "apo_zero":  # D'Oosterlinck et al. 2024: the chosen answer likelier, the rejected one less likely
            return F.sigmoid(-chosen) + F.sigmoid(rejected)
        case "apo_down":  # of the same: both less likely, the rejected one more so
            return F.sigmoid(chosen) + F.sigmoid(-margin)
    assert_never(loss)


def with_dpo_loss(make: Callable[[], nn.Module], recipe: Recipe) -> Callable[[], nn.Module]:
    """Makes the same model, with the loss of preferences."""

    def made() -> nn.Module:
        module: Any = make()
        if is_transformers_model(module) and recipe.parallel.degrees.splits_layers:  # first, as it sets the loss, too
            splits_experts = recipe.parallel.degrees.splits_experts
            parallelize(module, expert_parallel=splits_experts, sequence_parallel=recipe.parallel.sequence_parallel)
        module.loss_function = DpoLoss(recipe.dpo)
        whole: nn.Module = module
        return whole

    return made


@torch.no_grad()
def reference_log_probs(model: NxDModel, inputs: Mapping[str, Any]) -> Tensor:
    """The log-probabilities of a batch's answers by a reference model, `[2 pairs]`, on every rank of the pipeline.

    Args:
        model: `model_of_reference` gives it.
        inputs: of the batch.
    """
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
    """The reference model, without dropout, while the block runs.

    Args:
        model: that is trained.
        reference: another one; None: the same model without its adapters.
    """
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
