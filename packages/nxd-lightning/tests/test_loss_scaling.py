"""Scaled losses: by the Trainer's precision or by the config; the weights of unscaled training; resumed."""

import os

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from nxd_lightning import NeuronLTModule, NeuronXLAPrecisionPlugin, NeuronXLAStrategy
from nxd_state import destroy_model_parallel
from torch.utils.data import DataLoader

SCALED_BY_CONFIG = {"mixed_precision_config": {"use_loss_scaling": True}}


@pytest.fixture(autouse=True)
def mesh_of_the_test(monkeypatch):
    """Ends with the test, and so does the number of threads that Lightning chooses."""
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    yield
    destroy_model_parallel()


class Regression(NeuronLTModule):
    def setup(self, stage=None):
        torch.manual_seed(0)
        super().setup(stage)

    def training_step(self, batch, batch_idx):
        loss = self.model(batch).square().mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        if batch_idx == 1:
            self.model.weight.grad[0, 0] = float("inf")
        self.optimizers().step()
        self.optimizers().zero_grad()
        return loss.detach()


def fit(folder, config, *, manual_opt=False, plugin=None, ckpt_path=None, steps=4):
    torch.manual_seed(0)
    module = Regression(
        torch.nn.Linear, config, torch.optim.AdamW, model_args=(2, 2), opt_kwargs={"lr": 0.1}, manual_opt=manual_opt
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=NeuronXLAStrategy(config),
        plugins=[plugin or NeuronXLAPrecisionPlugin()],
        callbacks=[ModelCheckpoint(dirpath=folder, filename="last", every_n_train_steps=1)],
        logger=False,
        enable_progress_bar=False,
        max_steps=steps,
    )
    trainer.fit(module, DataLoader(torch.ones(8, 2), batch_size=2), ckpt_path=ckpt_path)
    return module.model.weight.detach().clone(), trainer.strategy.optimizers[0].loss_scaler


def scaler_of_lightning(**settings):
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **settings))


@pytest.mark.parametrize("zero1", [False, True])
def test_weights_of_scaled_training_are_those_of_unscaled_training(tmp_path, zero1):
    sharding = {"optimizer_config": {"zero_one_enabled": zero1}}
    expected, scaler = fit(tmp_path / "plain", sharding)
    assert scaler is None
    destroy_model_parallel()

    found, scaler = fit(tmp_path / "scaled", sharding | SCALED_BY_CONFIG)

    assert scaler.scale_factor == 2.0**16
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_precision_of_the_trainer_scales_by_the_optimizer_with_its_own_settings(tmp_path):
    plugin = scaler_of_lightning(init_scale=8.0, growth_interval=2)

    found, scaler = fit(tmp_path, {}, plugin=plugin)

    assert scaler.scale_factor == 32.0
    assert not torch.equal(found, torch.zeros(2, 2))


@pytest.mark.parametrize("by_trainer", [False, True])
def test_overflow_skips_the_step_and_the_scale_is_resumed(tmp_path, by_trainer):
    config = {} if by_trainer else SCALED_BY_CONFIG
    scale = 2.0**10 if by_trainer else 2.0**16

    def plugin():
        return scaler_of_lightning(init_scale=scale) if by_trainer else None

    _, scaler = fit(tmp_path, config, manual_opt=True, plugin=plugin())
    assert (scaler.scale_factor, scaler.skipped_steps) == (scale / 2, 1)
    destroy_model_parallel()

    _, resumed = fit(tmp_path, config, manual_opt=True, plugin=plugin(), ckpt_path=tmp_path / "last.ckpt", steps=5)

    assert (resumed.scale_factor, resumed.skipped_steps) == (scale / 2, 1)
