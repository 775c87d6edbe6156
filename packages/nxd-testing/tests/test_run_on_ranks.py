"""What a job sees and gives back."""

import os
import random
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_testing import RankFailure, RankPool, deadline, run_on_ranks
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.overrides import _get_current_function_mode_stack


@dataclass
class Point:
    """A class that only the module of this test defines."""

    x: int


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def rank() -> int:
    return dist.get_rank()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_run_on_ranks_any_world_size_returns_values_by_rank(world_size):
    def ranks_and_sum():
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), total.item()

    results = run_on_ranks(ranks_and_sum, world_size)

    assert results == [(r, world_size, sum(range(world_size))) for r in range(world_size)]


def test_run_on_ranks_function_of_this_test_module_is_called():
    assert run_on_ranks(rank, 2) == [0, 1]


def test_run_on_ranks_lambda_with_arguments_gets_them():
    assert run_on_ranks(lambda a, b: a - b, 2, 5, 3) == [2, 2]


def test_run_on_ranks_class_of_this_test_module_travels_both_ways():
    results = run_on_ranks(lambda point: Point(point.x + dist.get_rank()), 2, Point(10))

    assert results == [Point(10), Point(11)]
    assert isinstance(results[0], Point)


def test_run_on_ranks_autograd_function_of_this_test_module_has_gradient():
    def gradient():
        x = torch.ones(2, requires_grad=True)
        Doubled.apply(x).sum().backward()
        return x.grad

    assert torch.equal(run_on_ranks(gradient, 1)[0], torch.full((2,), 2.0))


def test_run_on_ranks_module_as_argument_keeps_requires_grad():
    def flags(layer):
        return [parameter.requires_grad for parameter in layer.parameters()]

    assert run_on_ranks(flags, 2, nn.Linear(2, 2)) == [[True, True], [True, True]]


def test_run_on_ranks_function_of_a_module_found_by_sys_path_is_called(tmp_path, monkeypatch):
    (tmp_path / "helper_found_by_path.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import helper_found_by_path

    assert run_on_ranks(helper_found_by_path.answer, 1) == [42]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_run_on_ranks_tensor_result_comes_back_equal(dtype):
    (tensor,) = run_on_ranks(lambda: torch.arange(6).reshape(2, 3).to(dtype), 1)

    assert tensor.dtype == dtype
    assert torch.equal(tensor, torch.arange(6).reshape(2, 3).to(dtype))


def test_run_on_ranks_tensor_result_that_needs_gradients_comes_back_plain():
    def parameter_and_view():
        parameter = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        return {"parameter": parameter, "view": (2 * parameter).t()[1]}

    (result,) = run_on_ranks(parameter_and_view, 1)

    assert type(result["parameter"]) is torch.Tensor
    assert not result["parameter"].requires_grad
    assert result["view"].tolist() == [2.0, 8.0]
    assert result["view"].untyped_storage().nbytes() == 8


def test_run_on_ranks_later_job_runs_on_the_same_processes():
    first = run_on_ranks(os.getpid, 2)
    second = run_on_ranks(os.getpid, 3)
    third = run_on_ranks(os.getpid, 2)

    assert len(set(second)) == 3
    assert second[:2] == first
    assert third == first


def test_run_on_ranks_environment_is_that_of_torchrun():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]

    environments = run_on_ranks(lambda: [os.environ[name] for name in names], 2)

    assert environments == [["0", "0", "2", "2", "127.0.0.1"], ["1", "1", "2", "2", "127.0.0.1"]]


def test_run_on_ranks_function_that_initializes_from_the_environment_succeeds():
    def initialize_again():
        dist.barrier()  # until then another rank may still be connecting
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    for _ in range(2):
        assert run_on_ranks(initialize_again, 2) == [2.0, 2.0]


def test_run_on_ranks_env_is_seen_by_its_job_only():
    def read_and_write():
        seen = os.environ.get("NXD_TESTING_EXAMPLE"), os.environ.get("NXD_TESTING_OWN")
        os.environ["NXD_TESTING_OWN"] = "set by the job"
        return seen

    with_env = run_on_ranks(read_and_write, 2, env={"NXD_TESTING_EXAMPLE": "yes"})
    without = run_on_ranks(read_and_write, 2)

    assert with_env == [("yes", None)] * 2
    assert without == [(None, None)] * 2


def test_run_on_ranks_removed_environment_variable_is_back_for_the_next_job():
    run_on_ranks(lambda: os.environ.pop("PATH"), 1)

    assert run_on_ranks(lambda: os.environ["PATH"], 1) == [os.environ["PATH"]]


def test_run_on_ranks_state_changed_by_a_job_is_reset_for_the_next():
    def change():
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(2)
        os.chdir(tempfile.gettempdir())
        _get_default_store().set_timeout(timedelta(seconds=2))

    def state():
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.ones(1).device.type,
            torch.get_default_device().type,
            len(_get_current_function_mode_stack()),  # a default device by name is a mode
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            Path.cwd(),
            _get_default_store().timeout > timedelta(seconds=60),
        )

    run_on_ranks(change, 1)

    assert run_on_ranks(state, 1) == [(torch.float32, True, "cpu", "cpu", 0, False, 1, Path.cwd(), True)]


def test_run_on_ranks_random_numbers_are_equal_on_all_ranks_and_in_all_jobs():
    def draw():
        return torch.rand(3).tolist(), random.random()

    first, second = run_on_ranks(draw, 2)
    again, _ = run_on_ranks(draw, 2)

    assert first == second == again


def test_run_on_ranks_mesh_left_initialized_is_destroyed():
    def initialize():
        before = nxd_state.model_parallel_is_initialized()
        nxd_state.initialize_model_parallel(tensor_model_parallel_size=2)
        return before, nxd_state.get_tensor_model_parallel_size()

    assert run_on_ranks(initialize, 2) == [(False, 2)] * 2
    assert run_on_ranks(initialize, 2) == [(False, 2)] * 2


def test_run_on_ranks_start_that_failed_on_one_rank_leaves_nothing_to_the_next_job():
    def rank_1_waits_in_vain():
        dist.destroy_process_group()
        if os.environ["RANK"] == "1":
            dist.init_process_group("gloo", timeout=timedelta(seconds=0.2))

    with pytest.raises(RankFailure, match="rank 1"):
        run_on_ranks(rank_1_waits_in_vain, 2)

    assert run_on_ranks(dist.get_rank, 2, timeout=30.0) == [0, 1]


def test_run_on_ranks_output_is_printed_with_the_rank(capsys):
    def speak():
        print(f"hello\nfrom {dist.get_rank()}")
        os.write(2, b"and from C\n")

    run_on_ranks(speak, 2)

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[rank 0]")] == [
        "[rank 0] hello",
        "[rank 0] from 0",
        "[rank 0] and from C",
    ]
    assert "[rank 1] from 1" in lines


def test_run_on_ranks_output_of_a_job_is_printed_once(capsys):
    run_on_ranks(lambda: print("first"), 1)
    run_on_ranks(lambda: print("second"), 1)

    assert capsys.readouterr().out == "[rank 0] first\n[rank 0] second\n"


@pytest.mark.parametrize(("world_size", "timeout", "match"), [(0, 1.0, "world_size=0"), (1, 0.0, "timeout=0.0")])
def test_run_on_ranks_number_not_positive_raises(world_size, timeout, match):
    with pytest.raises(ValueError, match=match):
        run_on_ranks(rank, world_size, timeout=timeout)


def test_run_on_ranks_result_that_cannot_be_pickled_raises():
    import threading

    with pytest.raises(RankFailure, match="cannot pickle"):
        run_on_ranks(threading.Lock, 1)


def test_rank_pool_after_exit_has_no_processes_left():
    with RankPool() as pool:
        pids = pool.run(os.getpid, 2)

    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_deadlines_are_scaled_by_the_slowness_of_the_machine(monkeypatch):
    monkeypatch.setenv("NXD_TESTING_SLOWNESS", "2.5")
    scaled = deadline(10)
    monkeypatch.delenv("NXD_TESTING_SLOWNESS")

    assert (scaled, deadline(10)) == (25.0, 10.0)
