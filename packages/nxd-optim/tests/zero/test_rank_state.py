"""`state_dict` and the sharded files: going on after loading is bitwise going on, and what does not fit raises."""

import copy
import os

import pytest
import torch
from nxd_optim.zero import NeuronZero1Optimizer
from nxd_state import active_group, initialize_model_parallel
from torch import nn


def make(small_model, dtype=torch.float64, **arguments):
    parameters = small_model.make_parameters(dtype)
    optimizer = NeuronZero1Optimizer(small_model.grouped(parameters), torch.optim.AdamW, lr=0.02, **arguments)
    return parameters, optimizer


def train(small_model, parameters, optimizer, steps):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in steps:
        small_model.take_step(optimizer, parameters, step)
        schedule.step()


def copy_weights(source, target):
    with torch.no_grad():
        for name, parameter in target.items():
            parameter.copy_(source[name])


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 1), (4, 2)])
def test_training_goes_on_bitwise_from_a_state_dict_and_from_files(run_ranks, small_model, tmp_path, ranks, tp, dtype):
    def save_and_go_on():
        initialize_model_parallel(tp)
        parameters, optimizer = make(small_model, dtype, save_master_weights=True)
        train(small_model, parameters, optimizer, range(5))
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.save_sharded_state_dict(str(tmp_path))
        weights = {name: p.detach().clone() for name, p in parameters.items()}
        train(small_model, parameters, optimizer, range(5, 10))
        expected = [p.detach().clone() for p in parameters.values()]

        resumed = []
        for from_files in (False, True):
            again, other = make(small_model, dtype, save_master_weights=True)
            copy_weights(weights, again)
            if from_files:
                other.load_sharded_state_dict(str(tmp_path), num_workers_per_step=1)
            else:
                other.load_state_dict(copy.deepcopy(state))
            assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in state["param_groups"]]
            train(small_model, again, other, range(5, 10))
            resumed.append([p.detach().clone() for p in again.values()])
        return expected, resumed

    for expected, resumed in run_ranks(save_and_go_on, ranks):
        for found in resumed:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    names = {f"dp_rank_{r // tp:02d}_tp_rank_{r % tp:02d}_pp_rank_00.pt" for r in range(ranks)}
    assert set(os.listdir(tmp_path / "optim")) == names


def test_without_master_weights_in_the_state_training_goes_on_from_the_rounded_parameters():
    def master_of(optimizer):
        return optimizer.sharded_state()[0].shards[0].tensor

    first = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = NeuronZero1Optimizer([first], torch.optim.SGD, grad_clipping=False, lr=2.0**-9)
    first.grad = -torch.ones_like(first)
    optimizer.step()
    second = nn.Parameter(first.detach().clone())
    other = NeuronZero1Optimizer([second], torch.optim.SGD, grad_clipping=False, save_master_weights=True, lr=1.0)

    other.load_state_dict(optimizer.state_dict())

    assert "master_weights" not in optimizer.state_dict()
    assert master_of(other).tolist() == [1.0] * 3


def test_skipped_steps_are_counted_on_after_loading():
    parameter, again = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, other = (NeuronZero1Optimizer([p], torch.optim.SGD) for p in (parameter, again))
    optimizer.skip_non_finite_steps = True
    parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 0.5)

    other.load_state_dict(optimizer.state_dict())

    other.step()
    scheduler.step()
    assert other.skipped_steps == 1


def test_files_hold_this_ranks_part_only_and_load_without_running_code(run_ranks, tmp_path):
    def save():
        initialize_model_parallel()
        parameter = nn.Parameter(torch.ones(40_000))
        optimizer = NeuronZero1Optimizer([parameter], torch.optim.AdamW)
        parameter.sum().backward()
        optimizer.step()
        optimizer.save_sharded_state_dict(tmp_path, save_serially=False)

    run_ranks(save, 4)

    for rank in range(4):
        file = tmp_path / "optim" / f"dp_rank_{rank:02d}_tp_rank_00_pp_rank_00.pt"
        state = torch.load(file, weights_only=True)
        assert state["ranges"] == {0: (10_000 * rank, 10_000 * (rank + 1), 40_000)}
        assert file.stat().st_size < 2 * 10_000 * 4 * 1.1


def test_state_of_another_layout_or_rank_raises(run_ranks, small_model, tmp_path):
    def save():
        initialize_model_parallel()
        make(small_model)[1].save_sharded_state_dict(tmp_path)

    def load():
        initialize_model_parallel()
        with pytest.raises(
            RuntimeError, match=r"failed on 2 of 2 ranks\n  rank 0: ValueError: .* another rank, layout"
        ):
            make(small_model)[1].load_sharded_state_dict(tmp_path)

    run_ranks(save, 4)
    run_ranks(load, 2)


def test_state_dict_of_another_optimizer_raises():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = NeuronZero1Optimizer([parameter], torch.optim.AdamW)

    with pytest.raises(ValueError, match=r"lacks \['ranges'\]; pass one of NeuronZero1Optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW([parameter]).state_dict())


@pytest.mark.parametrize("serially", [True, False])
def test_rank_that_cannot_write_raises_everywhere_and_leaves_the_old_files(run_ranks, tmp_path, serially):
    def save_and_fail():
        initialize_model_parallel()
        parameter = nn.Parameter(torch.ones(8))
        optimizer = NeuronZero1Optimizer([parameter], torch.optim.SGD, lr=1.0)
        optimizer.save_sharded_state_dict(tmp_path, save_serially=serially)
        optimizer.param_groups[0]["lr"] = 2.0
        if active_group("dp").rank == 1:
            fsync, os.fsync = os.fsync, lambda fd: (_ for _ in ()).throw(OSError(28, os.strerror(28)))
        try:
            with pytest.raises(RuntimeError, match=r"failed on 1 of 2 ranks\n  rank 1: OSError: .* No space left"):
                optimizer.save_sharded_state_dict(tmp_path, save_serially=serially)
        finally:
            if active_group("dp").rank == 1:
                os.fsync = fsync
        optimizer.load_sharded_state_dict(tmp_path)
        return optimizer.param_groups[0]["lr"]

    assert run_ranks(save_and_fail, 2) == [1.0, 1.0]
    assert len(os.listdir(tmp_path / "optim")) == 2


def test_rank_that_cannot_rename_its_file_raises_everywhere_and_the_mixture_does_not_load(run_ranks, tmp_path):
    def save_and_fail():
        initialize_model_parallel()
        optimizer = NeuronZero1Optimizer([nn.Parameter(torch.ones(8))], torch.optim.SGD)
        optimizer.save_sharded_state_dict(tmp_path)
        replace = os.replace
        if active_group("dp").rank == 1:
            os.replace = lambda *_: (_ for _ in ()).throw(PermissionError(13, os.strerror(13)))
        try:
            with pytest.raises(RuntimeError, match="failed on 1 of 2 ranks\n  rank 1: PermissionError"):
                optimizer.save_sharded_state_dict(tmp_path)
        finally:
            os.replace = replace
        with pytest.raises(RuntimeError, match="the files come from several saves"):
            optimizer.load_sharded_state_dict(tmp_path)

    run_ranks(save_and_fail, 2)
    assert len(os.listdir(tmp_path / "optim")) == 2


def test_files_of_two_saves_or_missing_files_raise_on_all_ranks(run_ranks, tmp_path):
    def mix():
        initialize_model_parallel()
        rank = active_group("dp").rank
        optimizer = NeuronZero1Optimizer([nn.Parameter(torch.ones(8))], torch.optim.SGD)
        for folder in ("a", "b"):
            optimizer.save_sharded_state_dict(tmp_path / folder)
        name = f"optim/dp_rank_{rank:02d}_tp_rank_00_pp_rank_00.pt"
        if rank == 1:
            os.replace(tmp_path / "a" / name, tmp_path / "b" / name)
        with pytest.raises(RuntimeError, match="the files come from several saves"):
            optimizer.load_sharded_state_dict(tmp_path / "b")
        with pytest.raises(RuntimeError, match="failed on 1 of 2 ranks\n  rank 1: FileNotFoundError"):
            optimizer.load_sharded_state_dict(tmp_path / "a")

    run_ranks(mix, 2)


def test_bad_number_of_workers_raises():
    optimizer = NeuronZero1Optimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD)
    with pytest.raises(ValueError, match="num_workers_per_step=0 must be positive"):
        optimizer.load_sharded_state_dict("anywhere", num_workers_per_step=0)
