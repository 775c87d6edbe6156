"""TRL's trainers at a layout: their losses and norms are those of one process."""

import pytest
import torch
from nxd_testing import run_on_ranks

KINDS = {
    "SFT": ("SFTTrainer", "SFTConfig", "LlamaForCausalLM", ("prompt", "completion")),
    "DPO": ("DPOTrainer", "DPOConfig", "LlamaForCausalLM", ("prompt", "chosen", "rejected")),
    "KTO": ("KTOTrainer", "KTOConfig", "LlamaForCausalLM", ("prompt", "completion", "label")),
    "reward": ("RewardTrainer", "RewardConfig", "LlamaForSequenceClassification", ("prompt", "chosen", "rejected")),
}


def rows(tools, columns):
    generator = torch.Generator().manual_seed(1)
    lengths = {"prompt": lambda number: 3, "chosen": lambda number: 4 + number % 3, "rejected": lambda number: 3}
    return [
        {
            column: number % 2 == 0
            if column == "label"
            else tools.words(generator, lengths.get(column, lambda number: 4 + number % 4)(number)) + " "
            for column in columns
        }
        for number in range(16)
    ]


def train(tools, folder, kind, layout=None):
    import trl
    from datasets import Dataset

    trainer_class, config_class, _, columns = KINDS[kind]
    with tools.at(layout):
        replicas = 1 if layout is None else layout.replicas
        # SGD: a wrong scale of gradients does not show with Adam.
        settings = {"learning_rate": 1e-2, "optim": "sgd", "max_steps": 4, "logging_steps": 1, "bf16": False}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
        trainer = getattr(trl, trainer_class)(
            f"{folder}/model",
            args=getattr(trl, config_class)(
                f"{folder}/out", per_device_train_batch_size=4 // replicas, **settings, **quiet
            ),
            train_dataset=Dataset.from_list(rows(tools, columns)),
            processing_class=tools.make_tokenizer(),
        )
        trainer.train()
        # Not KTO's "kl", an estimate from pairs that TRL takes within the batch of a replica.
        kept = {"loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins", "logps/chosen", "margin"}
        return [{key: float(log[key]) for key in log.keys() & kept} for log in trainer.state.log_history]


@pytest.mark.parametrize("name", ["TP 2", "TP 2 x DP 2 with ZeRO-3", "PP 2", "PP 2 x TP 2"])
@pytest.mark.parametrize("kind", KINDS)
def test_trainer_of_trl_at_a_layout_is_that_of_one_process(kind, name, tmp_path, tools):
    tools.save_llama(tmp_path / "model", KINDS[kind][2], dtype=torch.float32)
    layout = tools.layouts[name]
    [expected] = run_on_ranks(lambda: train(tools, tmp_path, kind), 1)

    results = run_on_ranks(lambda: train(tools, tmp_path, kind, layout), layout.ranks)

    for logs in results:
        for mine, theirs in zip(logs, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert "grad_norm" in expected[0]
