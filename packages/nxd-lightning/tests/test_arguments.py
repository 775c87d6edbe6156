"""The documented arguments, and errors about wrong ones; on one rank."""

import copy
import inspect
import os
import re
import warnings

import lightning
import nxd_lightning
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from nxd_engine import CheckpointError, initialize_parallel_model, initialize_parallel_optimizer
from nxd_lightning import (
    NeuronCheckpointIO,
    NeuronLTModule,
    NeuronTensorBoardLogger,
    NeuronXLAPrecisionPlugin,
    NeuronXLAStrategy,
)
from nxd_state import destroy_model_parallel
from torch.utils.data import DataLoader

pytestmark = pytest.mark.smoke

DOCUMENTED = {
    NeuronLTModule: (
        "model_fn nxd_config opt_cls scheduler_cls model_args model_kwargs opt_args opt_kwargs scheduler_args "
        "scheduler_kwargs grad_accum_steps log_rank0 manual_opt"
    ),
    NeuronXLAStrategy: "nxd_config tensor_parallel_size pipeline_parallel_size save_load_xser",
    NeuronXLAPrecisionPlugin: "",
    NeuronTensorBoardLogger: "save_dir",
}


@pytest.fixture(autouse=True)
def mesh_of_the_test(monkeypatch):
    """Ends with the test, and so does the number of threads that Lightning chooses."""
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    yield
    destroy_model_parallel()


class Fitting(NeuronLTModule):
    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()


def linear(**changes):
    arguments = {"model_args": (2, 2), "opt_kwargs": {"lr": 0.1}, "manual_opt": False} | changes
    return Fitting(torch.nn.Linear, {}, torch.optim.SGD, **arguments)


def fit(module, folder, batches=2, ckpt_path=None, **changes):
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "devices": 1, "strategy": NeuronXLAStrategy(), "default_root_dir": folder}
        | options
        | changes
    )
    trainer.fit(module, DataLoader(torch.ones(2 * batches, 2), batch_size=2), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("cls", DOCUMENTED, ids=lambda cls: cls.__name__)
def test_documented_arguments_come_first_and_in_order(cls):
    names = list(inspect.signature(cls.__init__).parameters)[1:]
    documented = DOCUMENTED[cls].split()

    assert names[: len(documented)] == documented


class WithSetupOfItsOwn(Fitting):
    def setup(self, stage=None):
        self.print_pp_rank += 0 if self.log_rank0 else 5  # as scripts set it
        self.model = initialize_parallel_model(self.nxd_config, torch.nn.Linear, *self.model_args)


def test_script_with_a_setup_of_its_own_gives_the_config_first_and_no_model_function(tmp_path):
    module = WithSetupOfItsOwn(
        {},
        torch.optim.SGD,
        None,
        (2, 2),
        opt_kwargs={"lr": 0.1},
        train_batch_size=2,
        logging_interval=5,
        manual_opt=False,
    )

    fit(module, tmp_path)

    assert module.global_step == 2
    assert module.print_pp_rank == 5
    assert (module.train_batch_size, module.logging_interval, module.loss, module.global_norm) == (2, 5, None, None)


def test_module_without_model_function_and_setup_says_what_to_give(tmp_path):
    module = Fitting(nxd_config={}, opt_cls=torch.optim.SGD)

    with pytest.raises(ValueError, match="model_fn is missing: pass the function that returns the model, or override"):
        fit(module, tmp_path)


def test_documented_defaults_hold():
    parameters = inspect.signature(NeuronLTModule).parameters

    assert (parameters["grad_accum_steps"].default, parameters["manual_opt"].default) == (1, True)
    assert NeuronXLAStrategy().checkpoint_io.save_load_xser is True
    assert NeuronXLAStrategy(debug=True, sync_module_states=True).checkpoint_io.save_load_xser is True
    assert NeuronCheckpointIO(False, True).save_load_xser is False
    assert NeuronXLAPrecisionPlugin(mixed_precision_enabled=True).precision == NeuronXLAPrecisionPlugin().precision


def test_unknown_name_says_which_there_are():
    with pytest.raises(AttributeError, match="there are NeuronLTModule, NeuronXLAStrategy"):
        _ = nxd_lightning.NeuronModule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear(grad_accum_steps=0), "grad_accum_steps=0 must be an integer, 1 or more"),
        (lambda: NeuronXLAStrategy(pipeline_parallel_size=0), "pipeline_parallel_size=0 must be"),
        (lambda: NeuronXLAStrategy({"tensor_parallel_size": 2}, 4), "tensor_parallel_size=4 differs from nxd_config"),
        (lambda: NeuronXLAStrategy({}, expert_parallel_size=2), "expert_parallel_size=2 differs from nxd_config"),
        (lambda: NeuronXLAStrategy(context_parallel_size=0), "context_parallel_size=0 must be"),
        (lambda: NeuronXLAStrategy({"tensor_paralel_size": 2}), "did you mean tensor_parallel_size"),
        (lambda: setattr(NeuronXLAStrategy(), "checkpoint_io", object()), "use NeuronCheckpointIO"),
        (lambda: NeuronXLAStrategy(checkpoint_io=TorchCheckpointIO()), "is a TorchCheckpointIO, which would save"),
    ],
    ids=[
        "grad_accum_steps",
        "pipeline",
        "twice",
        "experts-twice",
        "context",
        "unknown",
        "checkpoint_io",
        "checkpoint_io-of-strategy",
    ],
)
def test_wrong_argument_is_refused_with_advice(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class TwoOptimizers(Fitting):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ModelOfInit(Fitting):
    def __init__(self):
        super().__init__(nxd_config={}, opt_cls=torch.optim.SGD, manual_opt=False)
        self.model = torch.nn.Linear(2, 2)


class ModelElsewhere(Fitting):
    def __init__(self):
        super().__init__(nxd_config={}, opt_cls=torch.optim.SGD, manual_opt=False)
        self.network = torch.nn.Linear(2, 2)

    def setup(self, stage=None):
        pass


class Plain(lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        return batch.mean()

    def configure_optimizers(self):
        return None


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (linear, {"strategy": "auto"}, RuntimeError, "create the Trainer with strategy=NeuronXLAStrategy"),
        (linear, {"gradient_clip_val": 1.0}, ValueError, "max_grad_norm"),
        (linear, {"strategy": NeuronXLAStrategy({"tensor_parallel_size": 1}, pipeline_parallel_size=1)}, None, ""),
        (
            lambda: linear(grad_accum_steps=2),
            {"accumulate_grad_batches": 3},
            ValueError,
            "grad_accum_steps=2, but the Trainer has accumulate_grad_batches=3",
        ),
        (
            lambda: TwoOptimizers(torch.nn.Linear, {}, torch.optim.SGD, model_args=(2, 2), manual_opt=False),
            {},
            ValueError,
            r"return one optimizer of nxd_engine\.initialize_parallel_optimizer\(self\.nxd_config",
        ),
        (ModelOfInit, {}, TypeError, "self.model is a Linear, which nxd has not split.*model_fn instead of setting"),
        (ModelElsewhere, {}, TypeError, "there is no self.model, which nxd has not split.*make it in setup"),
        (Plain, {}, TypeError, "Plain is not a NeuronLTModule"),
    ],
    ids=["strategy", "clipping", "fits", "accumulation", "optimizer", "model", "no-model", "module"],
)
def test_trainer_that_does_not_fit_the_module_is_refused(tmp_path, module, options, error, message):
    options = copy.deepcopy(options)  # a strategy keeps its run
    if error is None:
        assert fit(module(), tmp_path, **options).global_step == 2
        return
    with pytest.raises(error, match=message):
        fit(module(), tmp_path, **options)


def test_step_of_ones_own_that_nothing_steps_is_warned_of_early_and_at_the_end(tmp_path):
    module = linear(manual_opt=True)
    steps = rf"{type(module).__name__}.training_step has run (\d+) batches, and nothing has stepped the optimizer.*"

    with pytest.warns(UserWarning, match=steps + "Pass manual_opt=False") as warned:
        fit(module, tmp_path, max_epochs=4)

    counts = [found.group(1) for it in warned if (found := re.match(steps, str(it.message)))]
    assert counts == ["8"]

    with pytest.warns(UserWarning, match=steps) as warned:
        fit(linear(manual_opt=True), tmp_path, batches=11)

    counts = [found.group(1) for it in warned if (found := re.match(steps, str(it.message)))]
    assert counts == ["10", "11"]


def test_steps_of_the_optimizer_beneath_lightnings_are_steps(tmp_path):
    class Beneath(Fitting):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx).backward()
            self.optimizers(use_pl_optimizer=False).step()

    module = Beneath(torch.nn.Linear, {}, torch.optim.SGD, model_args=(2, 2), opt_kwargs={"lr": 0.1})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit(module, tmp_path, batches=12, max_epochs=2)

    assert not [it for it in warned if "stepped" in str(it.message)]


def test_epochs_without_a_step_are_not_repeated_for_ever(tmp_path):
    steps = "has run 10 batches, and nothing has stepped .* max_steps is never reached"

    with pytest.raises(RuntimeError, match=steps):
        fit(linear(manual_opt=True), tmp_path, max_epochs=-1, max_steps=3)


def test_optimizer_class_is_needed_by_the_default_configure_optimizers_only(tmp_path):
    class WithOptimizer(Fitting):
        def configure_optimizers(self):
            return initialize_parallel_optimizer(self.nxd_config, torch.optim.SGD, self.parameters(), lr=0.1)

    arguments = {"nxd_config": {}, "model_args": (2, 2), "manual_opt": False}

    assert fit(WithOptimizer(torch.nn.Linear, **arguments), tmp_path).global_step == 2
    with pytest.raises(ValueError, match="opt_cls is missing: pass an optimizer class, or override configure_opt"):
        fit(Fitting(torch.nn.Linear, **arguments), tmp_path)


def test_module_that_only_changed_its_base_class_says_what_to_give():
    class Moved(NeuronLTModule):
        def __init__(self):
            super().__init__()

    with pytest.raises(TypeError, match=r"Moved has no nxd_config; .* call super\(\)\.__init__\(model_fn, nxd_config"):
        Moved()


def test_step_of_ones_own_that_steps_is_not_warned_of(tmp_path):
    class Stepping(Fitting):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.optimizers().step()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit(Stepping(torch.nn.Linear, {}, torch.optim.SGD, model_args=(2, 2), opt_kwargs={"lr": 0.1}), tmp_path)

    assert not [it for it in warned if "stepped" in str(it.message)]


def test_file_of_a_plain_trainer_is_refused_with_the_way_to_begin_from_it(tmp_path):
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6"}, tmp_path / "plain.ckpt")

    with pytest.raises(
        CheckpointError, match=r"plain\.ckpt is a file, as a plain Trainer writes.*in your model_fn, load"
    ):
        fit(linear(), tmp_path, ckpt_path=tmp_path / "plain.ckpt")


def test_automatic_optimisation_of_an_own_step_is_that_of_plain_torch(tmp_path):
    torch.manual_seed(0)
    plain = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.ones(2, 2)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    torch.manual_seed(0)
    module = linear(opt_kwargs={"lr": 0.1, "weight_decay": 0.0})

    fit(module, tmp_path)

    torch.testing.assert_close(module.model.local_module().weight, plain.weight)


def test_checkpoint_keeps_plain_hyperparameters_and_metrics_of_the_module(tmp_path):
    class WithBuffer(Fitting):
        def __init__(self, width):
            super().__init__(torch.nn.Linear, {}, torch.optim.SGD, model_args=(2, width), manual_opt=False)
            self.save_hyperparameters()
            self.hparams["activation"] = torch.nn.functional.relu
            self.register_buffer("seen", torch.zeros(()))

        def on_train_batch_end(self, *batch):
            self.seen += 1

    trainer = fit(WithBuffer(3), tmp_path, max_steps=2)
    with pytest.warns(UserWarning, match="hyperparameters activation are not plain values"):
        trainer.save_checkpoint(tmp_path / "own.ckpt")

    loaded = WithBuffer.load_from_checkpoint(tmp_path / "own.ckpt")
    assert loaded.hparams["width"] == 3
    torch.testing.assert_close(loaded.model.local_module().weight, trainer.model.model.local_module().weight)
    assert float(NeuronCheckpointIO().load_checkpoint(tmp_path / "own.ckpt")["state_dict"]["seen"]) == 2


def test_link_to_the_last_checkpoint_is_followed_and_removed_alone(tmp_path):
    trainer = fit(linear(), tmp_path)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    io = NeuronCheckpointIO()

    assert io.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2
    io.remove_checkpoint(tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 2
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_checkpoint_that_lightning_hides_by_a_dot_is_written_read_and_removed(tmp_path):
    hidden = tmp_path / ".moment.ckpt"
    io = NeuronCheckpointIO()

    fit(linear(), tmp_path).save_checkpoint(hidden)

    assert io.load_checkpoint(hidden)["global_step"] == 2
    io.remove_checkpoint(hidden)
    assert not list(tmp_path.glob("*moment*"))


def test_learning_rates_are_logged_once_under_the_name_of_the_optimizer(tmp_path):
    module = linear(scheduler_cls=torch.optim.lr_scheduler.ConstantLR)

    trainer = fit(module, tmp_path, logger=CSVLogger(tmp_path), callbacks=[LearningRateMonitor()], log_every_n_steps=1)

    assert {name for name in trainer.callback_metrics if "lr" in name} == {"lr-SGD/pg1", "lr-SGD/pg2"}


def test_checkpoint_of_an_exception_is_removed_when_there_is_none(tmp_path):
    kept = fit(linear(), tmp_path, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)

    assert kept.state.finished


def test_exception_on_the_only_rank_leaves_the_checkpoint_that_was_asked_for(tmp_path):
    class Failing(Fitting):
        def on_train_batch_end(self, *batch):
            raise ValueError("told to fail")

    module = Failing(torch.nn.Linear, {}, torch.optim.SGD, model_args=(2, 2), manual_opt=False)

    with pytest.raises(ValueError, match="told to fail"):
        fit(module, tmp_path, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)

    assert NeuronCheckpointIO().load_checkpoint(tmp_path / "on_exception.ckpt")["global_step"] == 1


def test_precision_beside_the_plugin_says_which_to_leave_out():
    with pytest.raises(ValueError, match=r"precision=bf16-mixed.*remove NeuronXLAPrecisionPlugin or precision="):
        lightning.Trainer(precision="bf16-mixed", plugins=[NeuronXLAPrecisionPlugin()])


def test_precision_without_the_plugin_computes_in_it(tmp_path):
    class Recording(Fitting):
        def training_step(self, batch, batch_idx):
            self.found = self.model(batch).dtype
            return super().training_step(batch, batch_idx)

    module = Recording(torch.nn.Linear, {}, torch.optim.SGD, model_args=(2, 2), manual_opt=False)

    fit(module, tmp_path, precision="bf16-mixed")

    assert module.found == torch.bfloat16
