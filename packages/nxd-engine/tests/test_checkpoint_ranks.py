"""Ranks that do not do the same in a checkpoint call: all of them raise, and none waits for another."""

import pytest
import torch
from nxd_ckpt.store_coordinator import StoreCoordinator
from nxd_engine import finalize_checkpoint, load_checkpoint, neuronx_distributed_config, save_checkpoint
from nxd_engine.checkpoints.shard_files import load, save
from torch import nn


def error_of(call, *args, **arguments):
    with pytest.raises(ValueError, match="failed") as raised:
        call(*args, **arguments)
    return str(raised.value)


def disagree(root):
    neuronx_distributed_config()
    is_first = torch.distributed.get_rank() == 0
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_checkpoint(root, "a", model, optimizer)

    class Scheduler:
        def state_dict(self):
            return {} if is_first else {}["lr"]

    return [
        error_of(save_checkpoint, root, "b", model if is_first else None),
        error_of(save_checkpoint, root, "b", model, optimizer if is_first else optimizer.state_dict()),
        error_of(save_checkpoint, root, "b", async_save=is_first),
        error_of(save_checkpoint, root, "b", num_kept_ckpts=1 if is_first else 2),
        error_of(save_checkpoint, root, "b", scheduler=Scheduler()),
        error_of(load_checkpoint, root, "a", model if is_first else None),
        error_of(load_checkpoint, root, "a", model, strict=is_first),
        error_of(save if is_first else load, {} if is_first else root, root),
        error_of(save, {}, root, save_serially=is_first),
        error_of(load, root, model if is_first else None),
    ]


def test_ranks_that_call_differently_all_hear_what_differs(run_ranks, tmp_path):
    first, second = run_ranks(disagree, 2, str(tmp_path))

    assert first == second
    for found, expected in zip(
        first,
        [
            "model is 'a model' on rank 0 and None on rank 1",
            "optimizer is 'an optimizer' on rank 0 and 'a state_dict' on rank 1",
            "async_save is True on rank 0 and False on rank 1",
            "num_kept_ckpts is 1 on rank 0 and 2 on rank 1",
            "rank 1: KeyError: 'lr'",
            "model is 'a model' on rank 0 and None on rank 1",
            "strict is True on rank 0 and False on rank 1",
            "call is 'checking the arguments of parallel_layers.save' on rank 0",
            "save_serially is True on rank 0 and False on rank 1",
            "model_or_optimizer is 'a model or an optimizer' on rank 0 and None on rank 1",
        ],
        strict=True,
    ):
        assert expected in found


def test_path_of_the_first_rank_counts(run_ranks, tmp_path):
    def run():
        is_first = torch.distributed.get_rank() == 0
        save_checkpoint(tmp_path if is_first else None, "a", user_content=7)
        return load_checkpoint(tmp_path if is_first else None)

    assert run_ranks(run, 2) == [7, 7]


def test_buffers_are_those_of_the_first_replica(run_ranks, tmp_path):
    def run():
        neuronx_distributed_config()
        rank = torch.distributed.get_rank()
        model = nn.ModuleList(nn.BatchNorm1d(2) for _ in range(4))
        for norm in model:
            norm(torch.randn(8, 2, generator=torch.Generator().manual_seed(rank)))
        own = model.state_dict()
        save_checkpoint(tmp_path, "a", model)
        load_checkpoint(tmp_path, model=model)
        return {name: value.clone() for name, value in own.items()} if rank == 0 else None, model.state_dict()

    (own, first), (_, second) = run_ranks(run, 2)

    for name, expected in own.items():
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], expected)


def gathers_per_save(root, in_background, num_kept_ckpts):
    neuronx_distributed_config()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    calls = []
    gather = StoreCoordinator.all_gather_object
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StoreCoordinator, "all_gather_object", lambda *args: calls.append(1) or gather(*args))
        counts = []
        for tag in ("a", "b", "c"):
            calls.clear()
            save_checkpoint(root, tag, model, optimizer, async_save=in_background, num_kept_ckpts=num_kept_ckpts)
            finalize_checkpoint()
            counts.append(len(calls))
    return counts


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_of_a_model_and_an_optimizer_takes_five_gathers(run_ranks, tmp_path, in_background):
    """Prepare, compare the requests, begin, write, commit; it was 12. A new layout takes one more, for the tensors."""
    found = run_ranks(gathers_per_save, 2, str(tmp_path), in_background, None)

    assert [(first <= 6, later) for first, *later in found] == [(True, [5, 5])] * 2


def test_dropping_old_checkpoints_takes_one_more_gather(run_ranks, tmp_path):
    found = run_ranks(gathers_per_save, 2, str(tmp_path), False, 2)

    assert [(first <= 7, later) for first, *later in found] == [(True, [6, 6])] * 2
