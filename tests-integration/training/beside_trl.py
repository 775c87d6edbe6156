"""Supervised fine-tuning by TRL in one process, to compare runs with."""

from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", reason="the comparison needs TRL: pip install trl")


class _InThisOrder(trl.SFTTrainer):
    """Takes the rows as they come, and keeps each step's loss, of which the trainer logs four digits."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.losses: list[float] = []

    def _get_train_sampler(self, *arguments: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *arguments: Any, **settings: Any) -> Any:
        loss = super().training_step(*arguments, **settings)
        self.losses.append(loss.item())
        return loss


def losses_of_sft(model: Any, train_dataset: Any, processing_class: Any, **arguments: Any) -> list[float]:
    """The loss of each step with AdamW at a constant learning rate; `arguments` are further ones of `SFTConfig`."""
    config = trl.SFTConfig(
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **arguments,
    )
    trainer = _InThisOrder(model=model, args=config, train_dataset=train_dataset, processing_class=processing_class)
    trainer.train()
    return trainer.losses
