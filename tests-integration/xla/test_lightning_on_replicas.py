"""A Trainer on XLA with several ranks, on replicas, beside the same Trainer over gloo.

The loader has no length: Lightning adds lengths up over the ranks before it trains, and looks at the sum at once, which
costs a device one small graph and is refused on replicas.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from nxd_testing import run_on_ranks, run_on_replicas
from nxd_testing.replicas import executed_graphs

pytestmark = [pytest.mark.xla, pytest.mark.slow]

STEPS = 4
LAYOUTS = {"tp2": (2, False), "tp2-dp2-zero1": (4, True)}


class WithoutLength:
    """Batches of a loader."""

    def __init__(self, loader):
        self._loader = loader

    def __iter__(self) -> Iterator:
        return iter(self._loader)


def fit(folder: Path, world_size: int, zero1: bool) -> list[float]:
    """The losses that are logged."""
    import lightning
    import torch
    from nxd_engine.models import LlamaConfig, LlamaForCausalLM
    from nxd_lightning import NeuronLTModule, NeuronXLAPrecisionPlugin, NeuronXLAStrategy, TextDataModule

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, *batch) -> None:
            losses.append(float(trainer.callback_metrics["loss"]))

    class Data(TextDataModule):
        def train_dataloader(self):
            return WithoutLength(super().train_dataloader())

    losses: list[float] = []
    lightning.seed_everything(0)
    data = Data(folder / "text", sequence_length=16, global_batch_size=4, cache_folder=folder / "tokens")
    sizes = LlamaConfig(
        vocab_size=data.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = {"tensor_parallel_size": 2, "optimizer_config": {"zero_one_enabled": zero1}}
    settings = {"lr": 1e-2, "eps": 1e-5}
    module = NeuronLTModule(LlamaForCausalLM, config, torch.optim.AdamW, model_args=(sizes,), opt_kwargs=settings)
    trainer = lightning.Trainer(
        devices=world_size,
        strategy=NeuronXLAStrategy(config),
        plugins=[NeuronXLAPrecisionPlugin()],
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, data)
    return losses


def fit_and_count(folder: Path, world_size: int, zero1: bool) -> tuple[list[float], list[bool]]:
    """Also of each graph that ranks ran together, whether it was compiled for it."""
    return fit(folder, world_size, zero1), [graph.is_new for graph in executed_graphs()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_on_replicas_computes_what_it_computes_over_gloo_by_one_graph_a_step(tmp_path, layout):
    world_size, zero1 = LAYOUTS[layout]
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)

    over_gloo = run_on_ranks(fit, world_size, tmp_path, world_size, zero1, env={"NXD_DEVICE": "cpu"})
    on_xla = run_on_replicas(fit_and_count, world_size, tmp_path, world_size, zero1)

    for (found, _), expected in zip(on_xla, over_gloo, strict=True):
        assert len(found) == STEPS
        assert found == pytest.approx(expected, rel=1e-5)
    for _, is_new in on_xla:
        assert is_new == [True, True, *[False] * (STEPS - 2)]  # one a step; the second finds the optimizer's state
