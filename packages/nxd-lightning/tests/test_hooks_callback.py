"""`NeuronHooksCallback`, and the import paths of NeuronX Distributed for this package's classes."""

import importlib
from types import SimpleNamespace

import nxd_lightning
import pytest
import torch
from nxd_lightning.lightning_package import lightning
from nxd_state import destroy_model_parallel, initialize_model_parallel
from torch import nn

PATHS = {
    "accelerator": "NeuronXLAAccelerator",
    "checkpoint_io": "NeuronCheckpointIO",
    "logger": "NeuronTensorBoardLogger",
    "module": "NeuronLTModule",
    "neuron_hooks_callback": "NeuronHooksCallback",
    "precision_plugin": "NeuronXLAPrecisionPlugin",
    "progress_bar": "NeuronTQDMProgressBar",
    "strategy": "NeuronXLAStrategy",
}


@pytest.mark.parametrize("module", PATHS)
def test_each_class_has_its_import_path(module):
    found = importlib.import_module(f"neuronx_distributed.lightning.{module}")

    assert getattr(found, PATHS[module]) is getattr(nxd_lightning, PATHS[module])
    with pytest.raises(AttributeError, match=f"it has {PATHS[module]}"):
        _ = found.something_else


@pytest.fixture(autouse=True)
def _one_rank():
    initialize_model_parallel()
    yield
    destroy_model_parallel()


def options(folder, **changed):
    switches = ("enable_activation_dumps", "enable_grad_dumps", "dump_only_norms", "dump_only_master_rank")
    logs = ("enable_tb_logging_master_rank_activation_norms", "enable_tb_logging_master_rank_grad_norms")
    given = {
        **dict.fromkeys((*switches, *logs), True),
        "hooks": True,
        "target_layers": "0, not.here",
        "hooks_interval": 2,
        "master_print_model_layers": False,
        "hooks_dump_base_directory": str(folder),
    }
    return SimpleNamespace(**given | changed)


class Tiny(lightning().LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
        nn.init.constant_(self.model[0].weight, 1.1)

    def training_step(self, batch, index):
        return self.model(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(folder, callback):
    data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning().Trainer(
        max_steps=4,
        callbacks=[callback],
        accelerator="cpu",
        default_root_dir=folder,
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(Tiny(), data)
    return trainer


def test_layers_inputs_outputs_and_gradients_are_written_at_every_so_many_steps(tmp_path):
    trainer = fit(tmp_path, nxd_lightning.NeuronHooksCallback(options(tmp_path / "dumps")))

    found = sorted(path.relative_to(tmp_path / "dumps" / "0").as_posix() for path in (tmp_path / "dumps").rglob("*.pt"))
    kinds = ["grad_output", "layer_input", "layer_output"]  # the input needs no gradient
    assert found == [f"global_step_{step}/DP_0_TP_0_PP_0_{kind}_norm.pt" for step in (1, 3) for kind in kinds]
    assert torch.load(tmp_path / "dumps/0/global_step_1/DP_0_TP_0_PP_0_layer_output_norm.pt") == pytest.approx(4.4)
    assert trainer.callback_metrics["activation_input_norm"] == pytest.approx(2.0)


def test_nothing_is_written_where_hooks_are_off(tmp_path):
    fit(tmp_path, nxd_lightning.NeuronHooksCallback(SimpleNamespace(hooks=False)))

    assert not (tmp_path / "dumps").exists()


def test_an_interval_of_no_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hooks_interval=0 is not a number of steps"):
        nxd_lightning.NeuronHooksCallback(options(tmp_path, hooks_interval=0))
