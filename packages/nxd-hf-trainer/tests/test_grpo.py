"""TRL's GRPO at a layout: the same samples, losses and rewards, and rewards that rise."""

import pytest
import torch
from nxd_testing import RankFailure, run_on_ranks


def share_of_low_words(completions, **_):
    """Reward: the share of the words w0 to w9."""
    words = [completion.split() for completion in completions]
    return [
        sum(word[1:].isdecimal() and int(word[1:]) < 10 for word in of_one) / max(1, len(of_one)) for of_one in words
    ]


def train(tools, folder, layout=None, replicas=1, **settings):
    import trl
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)
    with tools.at(layout):
        generated = {"num_generations": 4, "max_completion_length": 8, "temperature": 1.0}
        training = {"learning_rate": 1e-2, "optim": "sgd", "max_steps": 4, "logging_steps": 1, "bf16": False}
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "seed": 3}
        trainer = trl.GRPOTrainer(
            f"{folder}/model",
            reward_funcs=share_of_low_words,
            args=trl.GRPOConfig(
                f"{folder}/out",
                per_device_train_batch_size=8 // replicas,
                **generated,
                **{**training, **quiet, **settings},
            ),
            train_dataset=Dataset.from_list([{"prompt": tools.words(generator, 3)} for _ in range(16)]),
            processing_class=tools.make_tokenizer(),
        )
        trainer.train()
        kept = {"loss", "grad_norm", "reward", "entropy", "completions/mean_length"}
        return [{key: float(log[key]) for key in log.keys() & kept} for log in trainer.state.log_history]


@pytest.fixture
def model(tmp_path, tools):
    tools.save_llama(tmp_path / "model", dtype=torch.float32)
    return tmp_path


LAYOUTS = [("TP 2", 1), ("PP 2", 1), ("TP 2 x DP 2 with ZeRO-1", 2), ("DP 2 with ZeRO-3", 2)]


@pytest.mark.parametrize(("name", "replicas"), LAYOUTS)
def test_samples_losses_and_rewards_are_those_of_plain_processes(name, replicas, model, tools):
    layout = tools.layouts[name]
    expected, *_ = run_on_ranks(lambda: train(tools, model, None, replicas), replicas)

    results = run_on_ranks(lambda: train(tools, model, layout, replicas), layout.ranks)

    for logs in results:
        for mine, theirs in zip(logs, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert expected[0]["grad_norm"] > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "replicas"), [("TP 2", 1), ("TP 2 x DP 2 with ZeRO-1", 2)])
def test_rewards_rise(name, replicas, model, tools):
    layout = tools.layouts[name]

    logs, *_ = run_on_ranks(
        lambda: train(tools, model, layout, replicas, learning_rate=3e-2, optim="adamw_torch", max_steps=16),
        layout.ranks,
    )

    rewards = [log["reward"] for log in logs if "reward" in log]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2


def test_head_of_parts_of_sequences_is_refused(model, tools):
    layout = tools.layouts["CP 2"]

    with pytest.raises(RankFailure, match="leave sequence_parallel and context_parallel_size out"):
        run_on_ranks(lambda: train(tools, model, layout), layout.ranks)
