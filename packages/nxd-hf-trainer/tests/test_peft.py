"""PEFT's LoRA models at a layout: training, the reference of DPO, and the adapter's folder are those of one process."""

import pytest
import torch
from nxd_testing import RankFailure, run_on_ranks
from safetensors import safe_open

LAYOUTS = ["TP 2", "TP 2 x DP 2 with ZeRO-1", "DP 2 with ZeRO-3", "PP 2", "PP 2 x TP 2"]
TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj"]


def lora(**settings):
    from peft import LoraConfig

    torch.manual_seed(9)
    return LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **{"target_modules": TARGETS, **settings})


def arguments_of(folder, layout, config_class):
    settings = {"learning_rate": 0.1, "optim": "sgd", "max_steps": 4, "logging_steps": 1, "save_steps": 2}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
    batch = 4 // (1 if layout is None else layout.replicas)
    return config_class(f"{folder}/out", per_device_train_batch_size=batch, **settings, **quiet)


def logs_of(trainer):
    kept = {"loss", "grad_norm", "rewards/margins", "logps/rejected"}
    return [{key: float(log[key]) for key in log.keys() & kept} for log in trainer.state.log_history]


def train(tools, folder, layout=None, resume=None, **settings):
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    with tools.at(layout):
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(f"{folder}/model"), lora(**{"init_lora_weights": False, **settings})
        )
        trainer = Trainer(model, arguments_of(folder, layout, TrainingArguments), train_dataset=tools.token_rows(16))
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{folder}/final")
        return logs_of(trainer)


def prefer(tools, folder, layout=None):
    import trl
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)
    rows = [
        {
            "prompt": tools.words(generator, 3),
            "chosen": tools.words(generator, 4),
            "rejected": tools.words(generator, 5),
        }
        for _ in range(16)
    ]
    with tools.at(layout):
        trainer = trl.DPOTrainer(
            f"{folder}/model",
            args=arguments_of(folder, layout, trl.DPOConfig),
            train_dataset=Dataset.from_list(rows),
            processing_class=tools.make_tokenizer(),
            peft_config=lora(),
        )
        trainer.train()
        return logs_of(trainer)


def adapter(folder):
    from safetensors.torch import load_file

    return load_file(f"{folder}/adapter_model.safetensors")


def assert_same_run(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_are_trained_and_saved_as_in_one_process(name, tmp_path, tools):
    layout, (one, several) = tools.layouts[name], (tmp_path / "one", tmp_path / "several")
    for folder in (one, several):
        tools.save_llama(folder / "model")
    [expected] = run_on_ranks(lambda: train(tools, one), 1)

    results = run_on_ranks(lambda: train(tools, several, layout), layout.ranks)

    for logs in results:
        assert_same_run(logs, expected)
    torch.testing.assert_close(adapter(several / "final"), adapter(one / "final"), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        adapter(several / "out/checkpoint-4"), adapter(one / "out/checkpoint-4"), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("other", ["DP 2 with ZeRO-3", "PP 2"])
def test_adapters_resume_at_another_layout(other, tmp_path, tools):
    tools.save_llama(tmp_path / "model")
    first, second = tools.layouts["TP 2"], tools.layouts[other]
    expected, _ = run_on_ranks(lambda: train(tools, tmp_path, first), first.ranks)
    trained = adapter(tmp_path / "final")

    logs, _ = run_on_ranks(lambda: train(tools, tmp_path, second, f"{tmp_path}/out/checkpoint-2"), second.ranks)

    assert_same_run(logs, expected)
    torch.testing.assert_close(adapter(tmp_path / "final"), trained, rtol=1e-5, atol=1e-7)
    files = (tmp_path / "out/checkpoint-2/nxd").rglob("*.safetensors")
    stored = {name for file in files for name in safe_open(file, "pt").keys()}  # noqa: SIM118 - not a dict
    assert stored
    assert all("lora_" in name for name in stored)


@pytest.mark.parametrize("name", LAYOUTS)
def test_reference_without_adapters_is_that_of_one_process(name, tmp_path, tools):
    tools.save_llama(tmp_path / "model", dtype=torch.float32)
    layout = tools.layouts[name]
    [expected] = run_on_ranks(lambda: prefer(tools, tmp_path), 1)

    results = run_on_ranks(lambda: prefer(tools, tmp_path, layout), layout.ranks)

    for logs in results:
        assert_same_run(logs, expected)
    assert expected[-2]["rewards/margins"] != 0.0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "lora_magnitude_vector.*use LoRA without DoRA"),
        ({"modules_to_save": ["lm_head"]}, "the adapter of lm_head .*leave modules_to_save out"),
    ],
)
def test_adapters_that_cannot_be_split_are_refused(settings, reason, tmp_path, tools):
    tools.save_llama(tmp_path / "model")
    layout = tools.layouts["TP 2"]

    with pytest.raises(RankFailure, match=reason):
        run_on_ranks(lambda: train(tools, tmp_path, layout, **settings), layout.ranks)
