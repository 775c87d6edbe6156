"""A Trainer on torch-xla's device, a world of one, through Lightning's XLA classes."""

import os
import subprocess
import sys

import pytest
from nxd_testing import deadline

pytestmark = [pytest.mark.xla, pytest.mark.neuron]

PROGRAM = """
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from nxd_lightning import NeuronLTModule, NeuronXLAPrecisionPlugin, NeuronXLAStrategy, TextDataModule
from nxd_engine.models import LlamaConfig, LlamaForCausalLM

lightning.seed_everything(0)
data = TextDataModule("text", sequence_length=16, global_batch_size=4, eval_batches=1, cache_folder="tokens")
sizes = LlamaConfig(
    vocab_size=data.vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)
module = NeuronLTModule(LlamaForCausalLM, {}, torch.optim.AdamW, model_args=(sizes,), opt_kwargs={"lr": 1e-2})
trainer = lightning.Trainer(
    devices=1, strategy=NeuronXLAStrategy(), plugins=[NeuronXLAPrecisionPlugin()], max_steps=3, val_check_interval=3,
    logger=False, enable_progress_bar=False, callbacks=[ModelCheckpoint(dirpath="checkpoints", save_last=True)],
)
trainer.fit(module, data)
fitted = float(trainer.callback_metrics["val_loss"])
[validated] = trainer.validate(module, data, ckpt_path="checkpoints/last.ckpt")
bases = {cls.__name__ for part in (trainer.strategy, trainer.precision_plugin) for cls in type(part).__mro__}
print("result", next(module.parameters()).device.type, fitted, validated["val_loss"], sorted(bases), flush=True)
"""


def test_trainer_on_torch_xla_uses_its_classes_and_computes_what_it_computes_on_the_cpu(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)

    def run(device: str) -> list[str]:
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=tmp_path,
            env={"PJRT_DEVICE": "CPU"} | os.environ | {"NXD_DEVICE": device},
            capture_output=True,
            text=True,
            timeout=deadline(600),
            check=False,
        )
        assert result.returncode == 0, result.stderr
        [line] = [line for line in result.stdout.splitlines() if line.startswith("result ")]
        return line.split(maxsplit=4)

    _, on_cpu, cpu_loss, cpu_validated, cpu_bases = run("cpu")
    _, on_xla, xla_loss, xla_validated, xla_bases = run("xla")

    assert (on_cpu, on_xla) == ("cpu", "xla")
    assert "XLAStrategy'" not in cpu_bases.replace("NeuronXLAStrategy'", "")
    assert {"'XLAStrategy'", "'XLAPrecision'"} <= set(xla_bases.strip("[]").split(", "))
    assert float(xla_loss) == pytest.approx(float(cpu_loss), rel=1e-4)
    assert float(xla_validated) == pytest.approx(float(xla_loss), rel=1e-6)
    assert float(cpu_validated) == pytest.approx(float(cpu_loss), rel=1e-6)
