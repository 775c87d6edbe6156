"""`save_checkpoint` and `load_checkpoint` in real ranks: bitwise at the same layout, equal at any other one."""

import warnings

import pytest
import torch
from neuronx_distributed.trainer import (
    finalize_checkpoint,
    has_checkpoint,
    initialize_parallel_model,
    initialize_parallel_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from nxd_ckpt import list_checkpoints, open_checkpoint
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from resumable_llama import VOCABULARY, config_of, train

pytestmark = pytest.mark.sample(1)  # each takes its time

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
USER_CONTENT = {"total_steps": 3, "betas": (0.9, 0.95), "by_number": {1: torch.arange(3)}}


def build(tp, pp, zero, seed):
    """Model, optimizer and scheduler of the documented API; `zero` is the stage, "3/2" that over groups of 2 ranks."""
    stage, _, group = str(zero).partition("/")
    sharding = {"zero_stage": int(stage), "shard_group_size": int(group) if group else None}
    config = config_of(tp, pp, optimizer_config={"grad_clipping": True, "max_grad_norm": 1.0, **sharding})
    torch.manual_seed(seed)
    model = initialize_parallel_model(config, lambda: LlamaForCausalLM(CONFIG, dtype=torch.float64))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    return model, optimizer, scheduler


def save_and_resume(root, tp, pp, zero, async_save):
    """Losses after the save, of the run itself and of one that was resumed from it; and what else came back."""
    tag = f"tp{tp}-pp{pp}-zero-{str(zero).replace('/', '-')}"
    model, optimizer, scheduler = build(tp, pp, zero, seed=0)
    train(model, optimizer, scheduler, range(3))
    save_checkpoint(root, tag, model, optimizer, scheduler, USER_CONTENT, async_save=async_save)
    expected = train(model, optimizer, scheduler, range(3, 5))
    model, optimizer, scheduler = build(tp, pp, zero, seed=1)
    content = load_checkpoint(root, tag, model, optimizer, scheduler)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert content["betas"] == USER_CONTENT["betas"]
    assert torch.equal(content["by_number"][1], torch.arange(3))
    return expected, train(model, optimizer, scheduler, range(3, 5)), rates


def resume_at(root, tag, layouts, again):
    """Losses after loading at each layout; what was loaded is saved again."""
    losses = {}
    for tp, pp, zero in layouts:
        model, optimizer, scheduler = build(tp, pp, zero, seed=2)
        load_checkpoint(root, tag, model=model, optimizer=optimizer, scheduler=scheduler)
        save_checkpoint(again, f"tp{tp}-pp{pp}-{str(zero).replace('/', '-')}", model=model, optimizer=optimizer)
        losses[tp, pp, zero] = train(model, optimizer, scheduler, range(3, 5))
    return losses


def save_at_all_layouts(root):
    return {
        layout: save_and_resume(root, *layout)
        for layout in [
            *((2, 2, 0, False), (2, 1, 1, True), (2, 2, 1, True), (1, 1, 1, False)),
            *((2, 1, 3, True), (1, 2, 3, False), (1, 1, "3/2", False), (1, 1, 2, True)),
        ]
    }


def test_checkpoint_resumes_bitwise_at_its_layout_and_equally_at_others(run_ranks, tmp_path):
    root, again = str(tmp_path / "runs"), str(tmp_path / "again")

    results = run_ranks(save_at_all_layouts, 4, root)

    for of_rank in results:
        for expected, resumed, rates in of_rank.values():
            assert resumed == expected
            assert rates == pytest.approx([0.05 * 0.9**3] * 2, rel=1e-12)
    expected = results[0][2, 2, 0, False][0]
    for tag, at_four in {
        "tp2-pp2-zero-0": [(4, 1, 0), (1, 1, 1), (1, 2, 3), (1, 1, "3/2")],
        "tp1-pp1-zero-3-2": [(2, 1, 3), (1, 1, 3), (1, 2, 1), (2, 2, 0)],
    }.items():
        others = run_ranks(resume_at, 4, root, tag, at_four, f"{again}/{tag}")
        alone = run_ranks(resume_at, 1, root, tag, [(1, 1, 0)], f"{again}/{tag}")
        for of_rank in others + alone:
            for losses in of_rank.values():
                assert losses == pytest.approx(expected, rel=1e-10)
        assert_equal_checkpoints(f"{again}/{tag}", open_checkpoint(root, tag), count=5)


def assert_equal_checkpoints(folder, saved, *, count):
    """What was loaded at other layouts and saved there: weights and the optimizer's states, bit by bit."""
    infos = list_checkpoints(folder)
    assert len(infos) == count
    for info in infos:
        copy = open_checkpoint(folder, info.tag)
        assert copy.tensors.keys() == saved.tensors.keys()
        assert any(name.endswith("/exp_avg_sq") for name in saved.tensors)
        for name in saved.tensors:
            assert torch.equal(copy.read(name), saved.read(name)), (info.tag, name)


def save_on_eight_ranks(root):
    parts = build(2, 2, 1, seed=0)
    train(*parts, range(3))
    save_checkpoint(root, "eight", *parts)
    return train(*parts, range(3, 5))


@pytest.mark.slow  # 8 ranks
def test_checkpoint_of_all_axes_loads_with_each_of_them_alone(run_ranks, tmp_path):
    root, again = str(tmp_path / "runs"), str(tmp_path / "again")

    expected = run_ranks(save_on_eight_ranks, 8, root)[0]  # TP 2 x PP 2 x DP 2 with ZeRO-1

    of_ranks = run_ranks(resume_at, 4, root, "eight", [(4, 1, 1), (1, 4, 0), (1, 1, 3)], again)
    of_ranks += run_ranks(resume_at, 1, root, "eight", [(1, 1, 0)], again)
    for losses in of_ranks:
        for found in losses.values():
            assert found == pytest.approx(expected, rel=1e-10)
    assert_equal_checkpoints(again, open_checkpoint(root, "eight"), count=4)


def save_in_background(root):
    model, *_ = build(2, 1, 0, seed=0)
    for step in range(4):
        save_checkpoint(root, f"step_{step}", model=model, num_kept_ckpts=2, async_save=True)
    finalize_checkpoint()
    tags = [info.tag for info in list_checkpoints(root)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(root, model=model)
    return tags, has_checkpoint(root)


def test_saves_in_background_keep_the_newest_and_load_waits_for_them(run_ranks, tmp_path):
    for tags, found in run_ranks(save_in_background, 2, str(tmp_path)):
        assert tags == ["step_2", "step_3"]
        assert found


def fail_in_background(root, blocked):
    model, *_ = build(2, 1, 0, seed=0)
    save_checkpoint(root, blocked, model=model, async_save=True)
    with pytest.raises(Exception, match="not a checkpoint") as raised:
        finalize_checkpoint()
    finalize_checkpoint()
    save_checkpoint(root, "after", model=model)
    return str(raised.value), load_checkpoint(root, model=model)


def test_failed_save_in_background_is_raised_on_all_ranks_once(run_ranks, tmp_path):
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "mine.txt").write_text("not a checkpoint's")

    messages = run_ranks(fail_in_background, 2, str(tmp_path), "blocked")

    assert len(set(messages)) == 1
    assert (tmp_path / "blocked" / "mine.txt").exists()


def load_with_differences(root):
    model, optimizer, _ = build(2, 2, 0, seed=0)
    save_checkpoint(root, "a", model=model)
    problems = []
    for arguments in (
        {"optimizer": optimizer, "model": model},
        {"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "model": model},
        {"tag": "missing", "model": model},
    ):
        with pytest.raises(Exception, match=r"checkpoint|it holds") as raised:
            load_checkpoint(root, **arguments)
        problems.append(str(raised.value))
    return problems


def test_what_a_checkpoint_lacks_is_said_on_every_rank_alike(run_ranks, tmp_path):
    problems = run_ranks(load_with_differences, 4, str(tmp_path))

    assert all(of_rank == problems[0] for of_rank in problems)
    no_optimizer, no_scheduler, no_tag = problems[0]
    assert "holds no optimizer state" in no_optimizer
    assert "holds no scheduler" in no_scheduler
    assert "'missing'" in no_tag
