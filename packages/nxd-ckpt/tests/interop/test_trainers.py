"""Trainers of others go on from our checkpoints as if they had never stopped."""

import pytest
import torch
from nxd_ckpt import CheckpointError, end_async_saves, list_checkpoints, load, open_checkpoint, save
from nxd_ckpt.interop.accelerate import accelerator_state
from nxd_ckpt.interop.transformers_trainer import NxdCheckpoints
from torch import nn


class Model(nn.Module):
    """Rows of 4 numbers to their loss; dropout, so that random generators count, and a part that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(4, 8).requires_grad_(requires_grad=False)
        self.layers = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x, labels=None):
        loss = (self.layers(self.frozen(x)).squeeze(-1) - labels).square().mean()
        return {"loss": loss}


def data():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(24, 4, generator=generator)
    return [{"x": row, "labels": row.sum()} for row in rows]


def trainer(folder, *callbacks, **options):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Trainer(NxdCheckpoints, transformers.Trainer):
        nxd_background = options.pop("background", False)
        nxd_incremental = True

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        lr_scheduler_type="constant",
        **options,
    )
    return Trainer(Model(), arguments, train_dataset=data(), eval_dataset=data()[:4], callbacks=list(callbacks))


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("background", [False, True])
def test_trainer_of_transformers_goes_on_bit_by_bit(tmp_path, background):
    undisturbed = trainer(tmp_path / "a", save_total_limit=2)
    undisturbed.train()
    assert [info.tag for info in list_checkpoints(tmp_path / "a")] == ["checkpoint-10", "checkpoint-12"]

    first = trainer(tmp_path / "b", max_steps=8, background=background)
    first.train()
    second = trainer(tmp_path / "b", background=background)
    second.train(resume_from_checkpoint="checkpoint-8")
    end_async_saves()

    assert second.state.global_step == 12
    for name, tensor in weights(undisturbed.model).items():
        assert torch.equal(weights(second.model)[name], tensor)
    sizes = [info.num_bytes for info in list_checkpoints(tmp_path / "b")]
    assert sizes[1] < sizes[0]  # the frozen part is not written again


def evaluated(folder, losses, *, patience=9, scaler=None, **options):
    """A trainer with these losses of evaluations, by step."""
    transformers = pytest.importorskip("transformers")

    class Losses(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **_):
            metrics["eval_loss"] = losses[state.global_step]

    made = trainer(
        folder,
        Losses(),
        transformers.EarlyStoppingCallback(patience),
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        greater_is_better=False,
        restore_callback_states_from_checkpoint=True,
        **options,
    )
    made.accelerator.scaler = scaler
    return made


LOSSES = {2: 0.9, 4: 0.1, 6: 0.5, 8: 0.4, 10: 0.6, 12: 0.7}


@pytest.mark.parametrize(
    ("limit", "kept", "background"), [(1, [4], False), (2, [4, 12], True), (3, [4, 10, 12], False)]
)
def test_trainer_of_transformers_keeps_and_loads_the_best(tmp_path, limit, kept, background):
    made = evaluated(tmp_path, LOSSES, load_best_model_at_end=True, save_total_limit=limit, background=background)
    at_step = {}
    save_checkpoint = made._save_checkpoint

    def noted(model, trial):
        at_step[made.state.global_step] = weights(model)
        save_checkpoint(model, trial)

    made._save_checkpoint = noted
    made.train()
    end_async_saves()

    assert [info.step for info in list_checkpoints(tmp_path)] == kept
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert all(torch.equal(tensor, at_step[4][name]) for name, tensor in weights(made.model).items())
    assert not torch.equal(at_step[4]["layers.1.weight"], at_step[12]["layers.1.weight"])
    assert all(open_checkpoint(tmp_path, info.tag).damage() == [] for info in list_checkpoints(tmp_path))
    assert made.args.save_total_limit == limit


def test_trainer_of_transformers_resumes_patience_best_and_the_scaler(tmp_path):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    undisturbed = evaluated(tmp_path / "a", LOSSES, patience=3, scaler=scaler())
    undisturbed.train()
    evaluated(tmp_path / "b", LOSSES, patience=3, scaler=scaler(), max_steps=6).train()
    resumed = evaluated(tmp_path / "b", LOSSES, patience=3, scaler=torch.amp.GradScaler("cpu"))
    resumed.train(resume_from_checkpoint="checkpoint-6")

    assert resumed.state.global_step == undisturbed.state.global_step == 10  # 6, 8 and 10 were no better than 4
    assert resumed.state.best_model_checkpoint == str(tmp_path / "b" / "checkpoint-4")
    assert resumed.accelerator.scaler.state_dict() == undisturbed.accelerator.scaler.state_dict()
    assert resumed.accelerator.scaler.get_scale() == 64.0
    for name, tensor in weights(undisturbed.model).items():
        assert torch.equal(weights(resumed.model)[name], tensor)


def test_trainer_of_transformers_refuses_to_push_what_it_does_not_write(tmp_path):
    made = trainer(tmp_path)
    made.args.push_to_hub = True

    with pytest.raises(ValueError, match="use hub_strategy='end'"):
        made.train()


def test_trainer_of_transformers_without_a_checkpoint_to_resume_from_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .* to resume from"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("stateful", [False, True])
def test_accelerate_resumes_its_data_loader_and_its_step(tmp_path, stateful):
    accelerate = pytest.importorskip("accelerate")
    if stateful:
        pytest.importorskip("torchdata.stateful_dataloader")

    def prepared_loader():
        options = accelerate.DataLoaderConfiguration(use_stateful_dataloader=stateful)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=options, gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader(list(range(6)), batch_size=1)
        return accelerator, *accelerator.prepare(loader, nn.Linear(1, 1))

    accelerator, loader, model = prepared_loader()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
        with accelerator.accumulate(model):
            pass
    save(tmp_path, "a", accelerator_state(accelerator))
    resumed, loader, _ = prepared_loader()
    load(tmp_path, into=accelerator_state(resumed))

    assert resumed.step == accelerator.step == 3
    assert [int(batch) for batch in loader] == ([3, 4, 5] if stateful else [0, 1, 2, 3, 4, 5])


def prepared():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def train_steps(prepared_parts, steps):
    accelerator, model, optimizer, scheduler = prepared_parts
    for step in steps:
        row = data()[step]
        optimizer.zero_grad()
        accelerator.backward(model(row["x"][None], row["labels"][None])["loss"])
        optimizer.step()
        scheduler.step()


def test_accelerate_goes_on_bit_by_bit(tmp_path):
    undisturbed = prepared()
    torch.manual_seed(5)
    train_steps(undisturbed, range(3))
    save(tmp_path, "step-3", accelerator_state(undisturbed[0]), step=3)
    train_steps(undisturbed, range(3, 6))

    resumed = prepared()
    with torch.no_grad():
        for parameter in resumed[1].parameters():
            parameter.zero_()
    load(tmp_path, into=accelerator_state(resumed[0]))
    train_steps(resumed, range(3, 6))

    for name, tensor in weights(undisturbed[1]).items():
        assert torch.equal(weights(resumed[1])[name], tensor)
    assert resumed[3].get_last_lr() == undisturbed[3].get_last_lr()
    assert "model.layers.1.weight" in open_checkpoint(tmp_path).tensors


def lightning_module(lightning):
    class Module(lightning.LightningModule):
        def __init__(self, step=None):
            super().__init__()
            self.save_hyperparameters()
            self.model = Model()

        def on_train_batch_start(self, *_):
            torch.manual_seed(self.global_step)  # Lightning saves no random states

        def training_step(self, batch, _):
            return self.model(batch["x"], batch["labels"])["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.1)

    return Module


def fitted(lightning, folder, epochs, *, path=None, step=None):
    from nxd_ckpt.interop.lightning import NxdCheckpointIO

    saving = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving],
        plugins=[NxdCheckpointIO(incremental=True)],
    )
    module = lightning_module(lightning)(step)
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=4), ckpt_path=path, weights_only=False)
    return module


@pytest.mark.filterwarnings("ignore")
def test_lightning_with_a_strategy_of_its_own_goes_on_bit_by_bit(tmp_path):
    lightning = pytest.importorskip("lightning")
    torch.manual_seed(4)
    undisturbed = fitted(lightning, tmp_path / "a", 2)
    torch.manual_seed(4)
    fitted(lightning, tmp_path / "b", 1)

    resumed = fitted(lightning, tmp_path / "b", 2, path=str(tmp_path / "b" / "epoch=0.ckpt"))

    for name, tensor in weights(undisturbed).items():
        assert torch.equal(weights(resumed)[name], tensor)
    sizes = [info.num_bytes for info in list_checkpoints(tmp_path / "b")]
    assert sizes[1] < sizes[0]


@pytest.mark.filterwarnings("ignore:.*left out of the checkpoint")
def test_lightning_checkpoint_keeps_kinds_and_refuses_what_would_have_to_run(tmp_path):
    pytest.importorskip("lightning")
    from nxd_ckpt.interop.lightning import NxdCheckpointIO

    checkpoint = {
        "state_dict": {"w": torch.arange(3), "a.b": torch.zeros(2), "a": {"b": torch.ones(2)}},
        "of_steps": {1: torch.tensor(3), "1": torch.tensor(4)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"betas": (0.9, 0.5)}]}],
        "global_step": 5,
        "hyper_parameters": {"make": print},
    }
    io = NxdCheckpointIO()
    io.save_checkpoint(checkpoint, tmp_path / "x.ckpt")

    found = io.load_checkpoint(tmp_path / "x.ckpt")
    assert torch.equal(found["state_dict"]["w"], torch.arange(3))
    assert found["state_dict"]["a.b"].tolist() == [0.0, 0.0]
    assert found["state_dict"]["a"]["b"].tolist() == [1.0, 1.0]
    assert found["of_steps"] == {1: 3, "1": 4}
    assert found["optimizer_states"][0]["param_groups"] == [{"betas": (0.9, 0.5)}]
    assert found["optimizer_states"][0]["state"].keys() == {0}
    assert "hyper_parameters" not in found
    with pytest.raises(ValueError, match=r"callbacks\.x is a builtin_function_or_method, which could only"):
        io.save_checkpoint({"callbacks": {"x": print}}, tmp_path / "y.ckpt")
    save(tmp_path, "z.ckpt", {})
    with pytest.raises(CheckpointError, match=r"z\.ckpt was not written by NxdCheckpointIO"):
        io.load_checkpoint(tmp_path / "z.ckpt")
    io.remove_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "x.ckpt").exists()
