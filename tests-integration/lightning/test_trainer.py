"""What users of Lightning know: checks, callbacks, loggers, evaluation and checkpoints, on a mesh of ranks."""

import inspect
from pathlib import Path

import pytest
import torch
from nxd_testing import RankFailure

pytestmark = pytest.mark.sample(4)  # each takes its time


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": 2},
        {"num_sanity_val_steps": 2, "limit_val_batches": 2, "val_check_interval": 2, "max_steps": 2},
        {"limit_train_batches": 3, "max_steps": -1, "max_epochs": 2},
        {"barebones": True, "max_steps": 2, "enable_checkpointing": False, "logger": None},
        {"overfit_batches": 2, "max_steps": 2},
        {"detect_anomaly": True, "max_steps": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_trainer_work_with_tensor_and_pipeline_parallelism(fit, layout, options):
    if "barebones" in options:
        options = options | dict.fromkeys(("enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"))

    ranks = fit(layout(world=2, pp=2), **options)

    expected = {"fast_dev_run": 2, "limit_train_batches": 6}.get(next(iter(options)), options.get("max_steps", 0))
    assert [rank.global_step for rank in ranks] == [expected] * 2


def test_every_hook_of_a_callback_is_called(run_ranks, fit, layout, tmp_path):
    def recorder(folder: Path):
        from lightning.pytorch import Callback

        def record(name):
            def hook(self, *arguments, **keywords):
                (folder / name).touch()
                return {} if name == "state_dict" else None

            return hook

        hooks = [name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if not name.startswith("_")]
        return type("Recorder", (Callback,), {name: record(name) for name in hooks})(), hooks

    called = tmp_path / "called"
    called.mkdir()
    callback, hooks = recorder(called)

    fit(
        layout(world=2, tp=2, manual_opt=False),
        callbacks=[callback],
        limit_val_batches=1,
        num_sanity_val_steps=1,
        max_epochs=1,
        max_steps=2,
        limit_train_batches=2,
        checkpoint={"save_last": True},
    )

    elsewhere = {"load_state_dict", "on_load_checkpoint", "on_exception"}
    missing = set(hooks) - {path.name for path in called.iterdir()} - elsewhere
    assert {name for name in missing if "test" not in name and "predict" not in name} == set()


def test_checkpoints_kept_are_the_best_and_the_last(fit, layout, tmp_path):
    ranks = fit(
        layout(world=2, tp=2),
        limit_val_batches=1,
        val_check_interval=2,
        checkpoint={"monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{step}"},
    )

    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.suffix == ".ckpt")
    assert kept == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert {Path(rank.best_model_path).name for rank in ranks} == {"step=6.ckpt"}


def test_training_that_does_not_improve_is_stopped_on_all_ranks_at_once(fit, layout):
    from lightning.pytorch.callbacks import EarlyStopping

    stopping = EarlyStopping("val_loss", min_delta=100.0, patience=1)

    ranks = fit(layout(world=2, pp=2), callbacks=[stopping], limit_val_batches=1, val_check_interval=2)

    assert [rank.global_step for rank in ranks] == [4, 4]


def test_random_streams_of_the_ranks_follow_from_the_seed_of_lightning(fit, layout, tmp_path):
    from lightning.pytorch import Callback
    from nxd_state import rng_stream, seed_model_parallel

    class Drawing(Callback):
        def on_train_start(self, trainer, pl_module):
            def draw():
                with rng_stream("tp"):  # that of dropout in what tensor-parallel ranks split
                    return torch.rand(3).tolist()

            drawn = draw()
            seed_model_parallel(3)  # of `seed_everything`
            torch.save((drawn, draw()), tmp_path / f"drawn-{trainer.global_rank}")

    fit(layout(world=2, tp=2), callbacks=[Drawing()], max_steps=1)

    (first, first_of_seed), (second, second_of_seed) = (torch.load(tmp_path / f"drawn-{rank}") for rank in range(2))
    assert (first, second) == (first_of_seed, second_of_seed)
    assert first != second


def test_number_that_the_last_stage_lacks_is_an_error_that_says_so(fit, layout):
    from lightning.pytorch import Callback

    class Asking(Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.from_last_stage(None)

    with pytest.raises(RankFailure, match="the last stage logs None"):
        fit(layout(world=2, pp=2), callbacks=[Asking()])


def test_checkpoint_of_a_trainer_and_of_nxd_read_each_other(run_ranks, fit, layout, text, tmp_path):
    fit(layout(world=2, tp=2), max_steps=3, checkpoint={"save_last": True, "every_n_train_steps": 3})
    sizes = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}

    def copy_by_nxd(folder: Path) -> int:
        import neuronx_distributed as nxd
        from nxd_engine.models import LlamaConfig, LlamaForCausalLM

        config = nxd.neuronx_distributed_config()
        model = nxd.initialize_parallel_model(config, LlamaForCausalLM, LlamaConfig(**sizes), dtype=torch.float64)
        groups = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() <= 1]]
        optimizer = nxd.initialize_parallel_optimizer(
            config, torch.optim.AdamW, [{"params": group} for group in groups], lr=1.0
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        content = nxd.load_checkpoint(folder / "last.ckpt", model=model, optimizer=optimizer, scheduler=scheduler)
        nxd.save_checkpoint(folder / "copies", "copy", model=model, optimizer=optimizer, scheduler=scheduler)
        return content["global_step"]

    assert run_ranks(copy_by_nxd, 1, tmp_path / "checkpoints") == [3]
    [direct] = fit(layout(), ckpt_path=str(tmp_path / "checkpoints/last.ckpt"), max_steps=4)
    # Of a checkpoint without loops the Trainer begins to count anew; the data, too, so the model's loss is the proof.
    [copied] = fit(layout(), ckpt_path=str(tmp_path / "checkpoints/copies/copy"), max_steps=1)
    [fresh] = fit(layout(), max_steps=1)
    assert direct.global_step == 4
    assert copied.global_step == 1
    assert copied.losses[0] < fresh.losses[0] - 0.1


def test_logs_are_written_by_the_last_stage_or_by_rank_zero_if_asked(run_ranks, text, tmp_path):
    def fit_with_loggers(text: Path, folder: Path, log_rank0: bool) -> tuple[list[str], bool, float]:
        import lightning
        from lightning.pytorch.callbacks import LearningRateMonitor
        from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
        from nxd_lightning import (
            NeuronLTModule,
            NeuronTensorBoardLogger,
            NeuronTQDMProgressBar,
            NeuronXLAStrategy,
            TextDataModule,
        )

        pipeline = {
            "num_microbatches": 2,
            "auto_partition": True,
            "transformer_layer_cls": LlamaDecoderLayer,
            "input_names": ["input_ids", "labels"],
        }
        config = {"pipeline_parallel_size": 2, "pipeline_config": pipeline}

        class Module(NeuronLTModule):
            def validation_step(self, batch, batch_idx):
                loss = self.model.run_eval(*batch)
                self.log_dict({"one": loss, "two": None if loss is None else 2 * loss})

        sizes = LlamaConfig(
            vocab_size=320,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        module = Module(
            LlamaForCausalLM,
            config,
            torch.optim.SGD,
            torch.optim.lr_scheduler.ConstantLR,
            model_args=(sizes,),
            opt_args=(0.1,),
            log_rank0=log_rank0,
        )
        bar = NeuronTQDMProgressBar()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=NeuronXLAStrategy(config),
            logger=NeuronTensorBoardLogger(folder, name="logs", log_rank0=log_rank0),
            callbacks=[bar, LearningRateMonitor()],
            max_steps=2,
            limit_val_batches=1,
            val_check_interval=1,
            log_every_n_steps=1,
            enable_checkpointing=False,
        )
        trainer.fit(module, TextDataModule(text, sequence_length=16, cache_folder=folder / "tokens"))
        metrics = trainer.callback_metrics
        writer = type(trainer.logger.experiment).__name__
        return [writer, trainer.logger.log_dir], bar.is_enabled, float(metrics["two"] / metrics["one"])

    for log_rank0 in (False, True):
        ranks = run_ranks(fit_with_loggers, 2, text, tmp_path / str(log_rank0), log_rank0)

        writes = [written[0] == "SummaryWriter" for written, _, _ in ranks]
        assert writes == [shown for _, shown, _ in ranks] == ([True, False] if log_rank0 else [False, True])
        assert ranks[0][0][1] == ranks[1][0][1]  # one folder
        assert [ratio for _, _, ratio in ranks] == pytest.approx([2.0, 2.0])
        assert len(list((tmp_path / str(log_rank0)).glob("logs/version_0/events*"))) == 1


def test_loader_of_a_dataset_is_shared_out_to_replicas_only_and_predictions_are_of_all_samples(run_ranks, tmp_path):
    def predict(folder: Path) -> tuple[list[list[float]], float, float]:
        import lightning
        from nxd_layers import ColumnParallelLinear
        from nxd_lightning import NeuronLTModule, NeuronXLAStrategy
        from torch.utils.data import DataLoader

        config = {"tensor_parallel_size": 2}
        samples = torch.arange(8.0)[:, None].expand(8, 4).contiguous()

        class Module(NeuronLTModule):
            def training_step(self, batch, batch_idx):
                loss = self.model(batch).square().mean()
                self.log("loss", loss)
                return loss

            def validation_step(self, batch, batch_idx):
                self.log("value", batch.mean(), sync_dist=True)

            test_step = validation_step

            def predict_step(self, batch, batch_idx):
                return batch[:, 0].tolist()

        module = Module(
            ColumnParallelLinear, config, torch.optim.SGD, model_args=(4, 4), opt_kwargs={"lr": 0.1}, manual_opt=False
        )
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=4,
            strategy=NeuronXLAStrategy(config),
            max_epochs=1,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = DataLoader(samples, batch_size=2)
        trainer.fit(module, loader)
        [validated] = trainer.validate(module, loader)
        [tested] = trainer.test(module, loader, ckpt_path=trainer.checkpoint_callback.best_model_path)
        return trainer.predict(module, loader), validated["value"], tested["value"]

    ranks = run_ranks(predict, 4, tmp_path)

    seen = [[sample for batch in predictions for sample in batch] for predictions, _, _ in ranks]
    assert seen == [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]
    assert {(validated, tested) for _, validated, tested in ranks} == {(3.5, 3.5)}


def test_predictions_of_a_pipeline_are_those_of_one_process_on_every_rank(run_ranks, tmp_path):
    def predict(pp: int, folder: Path):
        import lightning
        from nxd_lightning import NeuronLTModule, NeuronXLAStrategy
        from torch import nn
        from torch.utils.data import DataLoader

        class Model(nn.Sequential):
            def forward(self, x):
                hidden = super().forward(x)
                return {"hidden": hidden, "is_positive": (hidden > 0, "as it is")}

        def make() -> nn.Module:
            return Model(nn.Linear(4, 4), nn.Linear(4, 3)).double()

        cut = {"pipeline_cuts": ["0"], "num_microbatches": 2} if pp > 1 else None
        config = {"pipeline_parallel_size": pp, "pipeline_config": cut}
        lightning.seed_everything(1)
        module = NeuronLTModule(make, config, torch.optim.SGD)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(
            accelerator="cpu", devices=pp, strategy=NeuronXLAStrategy(config), default_root_dir=folder, **quiet
        )
        samples = [{"x": row} for row in torch.arange(16.0, dtype=torch.float64).view(4, 4)]
        predictions = trainer.predict(module, DataLoader(samples, batch_size=2))
        if pp > 1:
            with pytest.raises(TypeError, match="output cannot be sent to the other stages"):
                module.output_of_last_stage([lambda: None])
        return predictions if pp == 1 else [microbatch for batch in predictions for microbatch in batch]

    [whole] = run_ranks(predict, 1, 1, tmp_path)
    first, last = run_ranks(predict, 2, 2, tmp_path)

    assert all(isinstance(batch, dict) for batch in whole)  # without a pipeline what the model returned

    for ranks_predictions in (first, last):
        assert len(ranks_predictions) == 4  # microbatches
        assert {it["is_positive"][1] for it in ranks_predictions} == {"as it is"}
        for name, values in (("hidden", lambda it: it["hidden"]), ("is_positive", lambda it: it["is_positive"][0])):
            found, expected = (torch.cat([values(it) for it in them]) for them in (ranks_predictions, whole))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=0.0, msg=name)
