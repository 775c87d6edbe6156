"""transformers' Trainer at a layout: losses, norms, weights, folders and resumed runs are those of one process."""

import pytest
import torch
from nxd_testing import RankFailure, run_on_ranks

STEPS = 6
TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}  # transformers' own loss of float64 models is computed in float32


def train(tools, folder, layout=None, resume=None, compute_metrics=None, **arguments):
    """Train a Llama; returns Trainer's logs, and leaves the trained model in `folder/final`."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    with tools.at(layout):
        replicas = 1 if layout is None else layout.replicas
        settings = {"learning_rate": 1e-2, "optim": "sgd", "max_steps": STEPS, "logging_steps": 1, "seed": 3}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
        sizes = {"per_device_train_batch_size": 4 // replicas, "per_device_eval_batch_size": 4 // replicas}
        trainer = Trainer(
            AutoModelForCausalLM.from_pretrained(folder / "model"),
            TrainingArguments(folder / "out", **{**settings, **quiet, **sizes, **arguments}),
            train_dataset=tools.token_rows(20),
            eval_dataset=tools.token_rows(8, generator_seed=2),
            compute_metrics=compute_metrics,
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(folder / "final")
        return [{key: float(log[key]) for key in log if key in COMPARED} for log in trainer.state.log_history]


COMPARED = {"loss", "grad_norm", "eval_loss", "learning_rate", "epoch", "step", "total_flos"}


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "final/model.safetensors")


def assert_same_run(found, expected, rtol=1e-6):
    """Trainer keeps losses in float32, so logs are compared to its precision."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=rtol)


@pytest.fixture
def model(tmp_path, tools):
    tools.save_llama(tmp_path / "model")
    return tmp_path


@pytest.fixture
def plain(tmp_path_factory, tools):
    """One plain process: logs and trained weights by the arguments of the run."""

    def run(**arguments):
        folder = tmp_path_factory.mktemp("plain")
        tools.save_llama(folder / "model")
        [logs] = run_on_ranks(lambda: train(tools, folder, **arguments), 1)
        return logs, weights(folder)

    return run


NAMES = ["TP 2", "CP 2", "TP 2 with sequence parallelism", "DP 2 with ZeRO-1", "DP 2 with ZeRO-2", "DP 2 with ZeRO-3"]
NAMES += ["TP 2 x DP 2 with ZeRO-1", "TP 2 x DP 2 with ZeRO-3"]


@pytest.mark.parametrize("name", NAMES)
def test_training_at_a_layout_is_that_of_one_process(name, model, plain, tools):
    layout = tools.layouts[name]
    arguments = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 3}
    expected, trained = plain(**arguments)

    logs, *others = run_on_ranks(lambda: train(tools, model, layout, **arguments), layout.ranks)

    assert all(it == logs for it in others)
    assert_same_run(logs, expected)
    torch.testing.assert_close(weights(model), trained, **TOLERANCE)


def test_experts_on_several_ranks_are_trained_as_in_one_process(tmp_path, tools):
    layout = tools.layouts["EP 2"]
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        tools.save_mixtral(folder / "model")
    [expected] = run_on_ranks(lambda: train(tools, folders[0]), 1)

    logs, *_ = run_on_ranks(lambda: train(tools, folders[1], layout), layout.ranks)

    assert_same_run(logs, expected, rtol=1e-5)
    torch.testing.assert_close(weights(folders[1]), weights(folders[0]), rtol=0, atol=1e-5)


def test_predictions_with_context_parallelism_are_refused(model, tools):
    layout = tools.layouts["CP 2"]

    with pytest.raises(RankFailure, match="set prediction_loss_only=True, or leave compute_metrics out"):
        run_on_ranks(
            lambda: train(tools, model, layout, eval_strategy="steps", eval_steps=2, compute_metrics=lambda _: {}),
            layout.ranks,
        )


def test_run_resumed_at_another_layout_is_the_run_that_was_not_interrupted(model, plain, tools):
    saving = {"save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch"}
    expected, trained = plain(**saving)
    first, second = tools.layouts["TP 2"], tools.layouts["DP 2 with ZeRO-3"]
    run_on_ranks(lambda: train(tools, model, first, **saving), first.ranks)

    logs, *_ = run_on_ranks(lambda: train(tools, model, second, model / "out/checkpoint-3", **saving), second.ranks)

    assert_same_run(logs, expected)
    torch.testing.assert_close(weights(model), trained, rtol=0, atol=1e-5)  # Adam divides small gradients


def test_best_model_is_loaded_at_the_end(model, plain, tools):
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 3.0}
    kept = {"load_best_model_at_end": True, "save_total_limit": 1}
    expected, trained = plain(**best, **kept)
    layout = tools.layouts["TP 2"]

    logs, *_ = run_on_ranks(lambda: train(tools, model, layout, **best, **kept), layout.ranks)

    assert_same_run(logs, expected, rtol=1e-5)
    torch.testing.assert_close(weights(model), trained, rtol=0, atol=1e-5)
    assert len(list((model / "out").glob("checkpoint-*"))) == 1


def test_saved_folder_is_loaded_by_transformers_with_the_same_logits(model, tools):
    layout = tools.layouts["TP 2"]

    def logits():
        from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

        with tools.at(layout):
            arguments = TrainingArguments(model / "out", max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True)
            whole = AutoModelForCausalLM.from_pretrained(model / "model")
            trainer = Trainer(whole, arguments, train_dataset=tools.token_rows(8))
            trainer.train()
            trainer.save_model(model / "final")
            trainer.save_model(model / "final")  # replaces what is there
            return trainer.predict(tools.token_rows(4)).predictions

    first, second = run_on_ranks(logits, layout.ranks)

    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model / "final", dtype=torch.float64)
    expected = loaded(torch.stack([row["input_ids"] for row in tools.token_rows(4)])).logits.detach().numpy()
    for found in (first, second):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)
    assert sorted(path.name for path in (model / "final").glob("*.safetensors*")) == ["model.safetensors"]


def test_checkpoint_of_the_plain_trainer_is_refused_with_what_to_do(model, plain, tools):
    run_on_ranks(lambda: train(tools, model, save_strategy="steps", save_steps=3), 1)
    layout = tools.layouts["TP 2"]

    with pytest.raises(RankFailure, match=r"checkpoint-3 was saved without a layout.*start anew from its weights"):
        run_on_ranks(lambda: train(tools, model, layout, model / "out/checkpoint-3"), layout.ranks)


@pytest.mark.parametrize("name", ["TP 2", "TP 2 with sequence parallelism", "DP 2 with ZeRO-3", "PP 2"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {"neftune_noise_alpha": 5.0},
        {"label_smoothing_factor": 0.2},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
@pytest.mark.sample(2)
def test_options_of_trainer_change_nothing_at_a_layout(name, arguments, model, plain, tools):
    layout = tools.layouts[name]
    if "neftune_noise_alpha" in arguments and layout.replicas > 1:
        pytest.skip("each replica draws noise of the size of its own batch, as with DistributedDataParallel")
    expected, trained = plain(**arguments)

    logs, *_ = run_on_ranks(lambda: train(tools, model, layout, **arguments), layout.ranks)

    assert_same_run(logs, expected)
    torch.testing.assert_close(weights(model), trained, **TOLERANCE)


def test_hook_at_a_layer_that_is_split_is_refused(model, tools):
    layout = tools.layouts["TP 2"]

    def prepare():
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(layout):
            whole = AutoModelForCausalLM.from_pretrained(model / "model")
            whole.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
            Accelerator(cpu=True).prepare(whole)

    with pytest.raises(RankFailure, match=r"hooks at model.layers.1.mlp.up_proj; .*after Accelerator.prepare"):
        run_on_ranks(prepare, layout.ranks)


def test_kernels_of_liger_are_refused_where_layers_are_split(tmp_path, tools):
    tools.save_llama(tmp_path)

    def prepare():
        import types

        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(tools.layouts["TP 2"]):
            model = AutoModelForCausalLM.from_pretrained(tmp_path)

            def lce_forward(self, **inputs): ...

            # As the library's own functions do, which needs a GPU.
            lce_forward.__module__ = "liger_kernel.transformers.model.llama"
            model.forward = types.MethodType(lce_forward, model)
            Accelerator(cpu=True).prepare(model)

    with pytest.raises(RankFailure, match=r"Liger's kernels replace forwards of this model.*use_liger_kernel=False"):
        run_on_ranks(prepare, 2)
