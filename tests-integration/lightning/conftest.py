"""A tiny Llama in float64, trained by `nxd train` and by a Trainer on the same text."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

STEPS = 6
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Layout:
    """How a run is spread over its ranks, and how its batches come."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero_stage: int = 0
    microbatches: int = 2  # of a pipeline
    grad_accum_steps: int = 1
    manual_opt: bool = True
    loss_scaling: bool = False

    def nxd_config(self) -> dict[str, Any]:
        from nxd_engine.models import LlamaDecoderLayer

        pipeline = {
            "num_microbatches": self.microbatches,
            "auto_partition": True,
            "transformer_layer_cls": LlamaDecoderLayer,
            "input_names": ["input_ids", "labels"],
        }
        return {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "pipeline_config": pipeline if self.pp > 1 else None,
            "optimizer_config": {"zero_stage": self.zero_stage},
            "mixed_precision_config": {"use_loss_scaling": self.loss_scaling},
        }


@dataclass(frozen=True)
class Fitted:
    """What a rank has seen: losses as logged at each step, and what the Trainer knows at its end."""

    losses: list[float]
    global_step: int
    metrics: dict[str, float]
    best_model_path: str = ""


def fit_llama(text: Path, folder: Path, layout: Layout, options: dict[str, Any]) -> Fitted:
    """Train on this rank. `options` are the Trainer's, besides `ckpt_path` and `checkpoint` (of ModelCheckpoint)."""
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from nxd_engine.models import LlamaConfig, LlamaForCausalLM
    from nxd_lightning import NeuronLTModule, NeuronXLAPrecisionPlugin, NeuronXLAStrategy, TextDataModule
    from nxd_trainer.lr_schedule import lr_multiplier

    class Losses(Callback):
        def __init__(self) -> None:
            self.logged: list[float] = []

        def on_train_batch_end(self, trainer, pl_module, *batch) -> None:
            if pl_module.should_print and "loss" in trainer.callback_metrics:  # not with barebones
                self.logged.append(float(trainer.callback_metrics["loss"]))

    given = dict(options)
    ckpt_path, checkpoint = given.pop("ckpt_path", None), given.pop("checkpoint", None)
    callbacks = [Losses(), *given.pop("callbacks", [])]
    if checkpoint is not None:
        callbacks.append(ModelCheckpoint(dirpath=folder / "checkpoints", **checkpoint))
    lightning.seed_everything(3)
    config = layout.nxd_config()
    data = TextDataModule(
        text,
        sequence_length=16,
        global_batch_size=8,
        grad_accum_steps=layout.grad_accum_steps,
        eval_batches=2,
        cache_folder=folder / "tokens",
        seed=3,
    )
    module = NeuronLTModule(
        LlamaForCausalLM,
        config,
        torch.optim.AdamW,
        torch.optim.lr_scheduler.LambdaLR,
        model_args=(LlamaConfig(vocab_size=data.vocab_size, **SIZES),),
        model_kwargs={"dtype": torch.float64},
        opt_kwargs={"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1},
        scheduler_args=(lambda step: lr_multiplier(step, total_steps=STEPS, warmup_steps=2, min_lr_ratio=0.1),),
        grad_accum_steps=layout.grad_accum_steps,
        manual_opt=layout.manual_opt,
    )
    trainer = lightning.Trainer(
        **{
            "accelerator": "cpu",
            "devices": layout.world,
            "strategy": NeuronXLAStrategy(config),
            "plugins": [NeuronXLAPrecisionPlugin()],
            "max_steps": STEPS,
            "logger": False,
            "enable_checkpointing": checkpoint is not None,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
        }
        | given,
        callbacks=callbacks,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return Fitted(
        callbacks[0].logged,
        trainer.global_step,
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        getattr(trainer.checkpoint_callback, "best_model_path", ""),
    )


def train_by_recipe(text: Path, folder: Path) -> list[float]:
    """The losses of `nxd train` in one process."""
    from nxd_state import initialize_model_parallel
    from nxd_trainer.recipe import load_recipe
    from nxd_trainer.report import read_records
    from nxd_trainer.training import train

    settings = {
        "data.path": text,
        "data.sequence_length": 16,
        "output": folder,
        **{f"model.{name}": size for name, size in SIZES.items()},
        "train.dtype": "float64",
        "train.seed": 3,
        "train.steps": STEPS,
        "train.global_batch_size": 8,
        "train.log_every": 1,
        "train.eval_every": 0,
        "optimizer.lr": LEARNING_RATE,
        "optimizer.warmup_steps": 2,
        "checkpoint.save_every": 0,
    }
    initialize_model_parallel()
    train(load_recipe(None, [f"{name}={value}" for name, value in settings.items()]))
    return [record.loss for record in read_records(folder / "metrics.jsonl")]


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A few files of made-up words."""
    folder = tmp_path_factory.mktemp("text")
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 7))) for _ in range(50)]
    for number in range(4):
        (folder / f"{number}.txt").write_text(" ".join(generator.choices(words, k=400)))
    return folder


@pytest.fixture(scope="session")
def reference(text, tmp_path_factory) -> list[float]:
    """The losses of `nxd train`, once for all tests."""
    from nxd_testing import run_on_ranks

    [losses] = run_on_ranks(train_by_recipe, 1, text, tmp_path_factory.mktemp("reference"))
    return losses


@pytest.fixture
def layout() -> type[Layout]:
    """The class of layouts."""
    return Layout


@pytest.fixture
def fit(run_ranks, text, tmp_path) -> Callable[..., list[Fitted]]:
    """`fit(layout, max_steps=3)`: train on the layout's ranks, and what each has seen."""

    def run(layout: Layout, **options: Any) -> list[Fitted]:
        return run_ranks(fit_llama, layout.world, text, tmp_path, layout, options)

    return run
