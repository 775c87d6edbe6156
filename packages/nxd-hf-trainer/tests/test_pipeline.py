"""Models that are cut into pipeline stages under transformers' Trainer, TRL's reward trainer and Accelerate."""

import pytest
import torch
from nxd_testing import RankFailure, run_on_ranks

pytestmark = pytest.mark.sample(2)  # together they take a minute

NAMES = ["PP 2", "PP 2 with 3 microbatches", "PP 2 x TP 2", "PP 2 x DP 2 with ZeRO-3"]


def train(tools, folder, layout=None, resume=None, **arguments):
    """Train a Llama with dropout in its attention off; returns logs, and leaves the model in `folder/final`."""
    import numpy as np
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    def metrics(found):
        return {"likely": float(np.mean(found.predictions.argmax(-1) == found.label_ids))}

    with tools.at(layout):
        replicas = 1 if layout is None else layout.replicas
        settings = {"learning_rate": 1e-2, "optim": "sgd", "max_steps": 6, "logging_steps": 1, "save_steps": 3}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "eval_strategy": "steps", "eval_steps": 3}
        sizes = {"per_device_train_batch_size": 4 // replicas, "per_device_eval_batch_size": 4 // replicas}
        trainer = Trainer(
            AutoModelForCausalLM.from_pretrained(folder / "model"),
            TrainingArguments(
                folder / "out",
                gradient_accumulation_steps=2,
                max_grad_norm=0.5,
                **{**settings, **quiet, **sizes, **arguments},
            ),
            train_dataset=tools.token_rows(20),
            eval_dataset=tools.token_rows(8, generator_seed=2),
            compute_metrics=metrics,
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(folder / "final")
        kept = {"loss", "grad_norm", "eval_loss", "eval_likely", "learning_rate", "total_flos"}
        return [{key: float(log[key]) for key in log.keys() & kept} for log in trainer.state.log_history]


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "final/model.safetensors")


def assert_same_run(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.fixture
def folders(tmp_path, tools):
    for name in ("one", "several"):
        tools.save_llama(tmp_path / name / "model")
    return tmp_path / "one", tmp_path / "several"


@pytest.mark.parametrize("name", NAMES)
def test_training_and_evaluation_are_those_of_one_process(name, folders, tools):
    (one, several), layout = folders, tools.layouts[name]
    [expected] = run_on_ranks(lambda: train(tools, one), 1)

    results = run_on_ranks(lambda: train(tools, several, layout), layout.ranks)

    for logs in results:
        assert_same_run(logs, expected)
    torch.testing.assert_close(weights(several), weights(one), rtol=1e-6, atol=1e-9)


def test_run_resumes_at_another_layout(folders, tools):
    (one, several), first, second = folders, tools.layouts["PP 2"], tools.layouts["TP 2"]
    [expected] = run_on_ranks(lambda: train(tools, one), 1)
    run_on_ranks(lambda: train(tools, several, first), first.ranks)

    logs, _ = run_on_ranks(lambda: train(tools, several, second, several / "out/checkpoint-3"), second.ranks)

    assert_same_run(logs, expected)
    torch.testing.assert_close(weights(several), weights(one), rtol=1e-6, atol=1e-9)


def test_dropout_of_both_passes_is_the_same(tmp_path, tools):
    """The second pass draws the first one's numbers: otherwise a step down the gradient would not lower the loss."""
    layout = tools.layouts["PP 2"]
    tools.save_llama(tmp_path / "model", attention_dropout=0.5)

    def losses():
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(layout):
            accelerator = Accelerator(cpu=True)
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").train()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            model, optimizer = accelerator.prepare(model, optimizer)
            batch = {"input_ids": torch.arange(32).view(2, 16), "labels": torch.arange(32).view(2, 16)}
            found = []
            for _ in range(2):
                torch.manual_seed(3)  # the same mask in both steps
                loss = model(**batch).loss
                accelerator.backward(loss)
                found.append((loss.item(), accelerator.clip_grad_norm_(model.parameters(), float("inf")).item()))
                optimizer.step()
                optimizer.zero_grad()
            return found

    (before, norm), (after, _) = run_on_ranks(losses, layout.ranks)[0]

    assert after - before == pytest.approx(-1e-4 * norm**2, rel=1e-2)


def test_backward_without_the_accelerator_trains_the_stages(tmp_path, tools):
    tools.save_llama(tmp_path / "model")

    def losses(layout):
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(layout):
            accelerator = Accelerator(cpu=True)
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            batch = {"input_ids": torch.arange(32).view(2, 16), "labels": torch.arange(32).view(2, 16)}
            found = []
            for _ in range(3):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found

    [expected] = run_on_ranks(lambda: losses(None), 1)

    for found in run_on_ranks(lambda: losses(tools.layouts["PP 2"]), 2):
        assert found == pytest.approx(expected, rel=1e-6)


def test_loss_of_the_routers_is_refused(tmp_path, tools):
    tools.save_mixtral(tmp_path)

    def prepare():
        from accelerate import Accelerator
        from transformers import AutoModelForCausalLM

        with tools.at(tools.layouts["PP 2"]):
            Accelerator(cpu=True).prepare(AutoModelForCausalLM.from_pretrained(tmp_path, output_router_logits=True))

    with pytest.raises(RankFailure, match="set output_router_logits=False, or use --expert-parallel-size"):
        run_on_ranks(prepare, 2)


def test_reward_model_is_trained_as_in_one_process(tmp_path, tools):
    tools.save_llama(tmp_path / "model", "LlamaForSequenceClassification", dtype=torch.float32)
    layout = tools.layouts["PP 2"]

    def reward(at):
        import trl
        from datasets import Dataset

        generator = torch.Generator().manual_seed(1)
        rows = [
            {
                column: tools.words(generator, length)
                for column, length in (("prompt", 3), ("chosen", 4), ("rejected", 5))
            }
            for _ in range(16)
        ]
        with tools.at(at):
            settings = {"learning_rate": 1e-2, "optim": "sgd", "max_steps": 3, "logging_steps": 1, "bf16": False}
            quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
            trainer = trl.RewardTrainer(
                f"{tmp_path}/model",
                args=trl.RewardConfig(f"{tmp_path}/out", per_device_train_batch_size=4, **settings, **quiet),
                train_dataset=Dataset.from_list(rows),
                processing_class=tools.make_tokenizer(),
            )
            trainer.train()
            kept = {"loss", "grad_norm", "margin"}
            return [{key: float(log[key]) for key in log.keys() & kept} for log in trainer.state.log_history]

    [expected] = run_on_ranks(lambda: reward(None), 1)

    for logs in run_on_ranks(lambda: reward(layout), layout.ranks):
        for mine, theirs in zip(logs, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_fused_head_of_trl_is_refused(tmp_path, tools):
    tools.save_llama(tmp_path / "model", dtype=torch.float32)
    layout = tools.layouts["PP 2"]

    def sft():
        import trl
        from datasets import Dataset

        with tools.at(layout):
            quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
            trl.SFTTrainer(
                f"{tmp_path}/model",
                trl.SFTConfig(f"{tmp_path}/out", max_steps=1, **quiet),
                train_dataset=Dataset.from_list([{"prompt": "w1 w2", "completion": "w3 w4"}] * 8),
                processing_class=tools.make_tokenizer(),
            ).train()

    with pytest.raises(RankFailure, match="the script has replaced the forward of its LlamaForCausalLM, as TRL's"):
        run_on_ranks(sft, layout.ranks)
