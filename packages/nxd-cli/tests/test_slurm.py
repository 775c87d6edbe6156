"""What torchrun would have said, from what Slurm says."""

import pytest
from nxd_cli.launch import advice_on_ranks, first_host, one_of_several_tasks, slurm_environment

TASK = {
    "SLURM_JOB_ID": "123456",
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "9",
    "SLURM_STEP_NODELIST": "trn[07-08]",
    "SLURM_STEP_NUM_TASKS": "16",
}


def test_task_of_a_step_gets_torchruns_variables():
    assert slurm_environment(TASK) == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "trn07",
        "MASTER_PORT": "23456",
    }


@pytest.mark.parametrize("environ", [{}, TASK | {"RANK": "0"}, TASK | {"SLURM_STEP_NUM_TASKS": "1"}])
def test_elsewhere_nothing_is_said(environ):
    assert slurm_environment(environ) == {}


def test_variables_that_are_set_stay():
    assert slurm_environment(TASK | {"MASTER_ADDR": "other"}).keys() == {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_PORT",
    }


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_STEP_NUM_TASKS=2 without SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NODELIST",
        ),
        (TASK | {"SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS='two' is not a number"),
    ],
)
def test_half_a_task_says_what_is_missing(environ, message):
    with pytest.raises(ValueError, match=f"{message}.* set RANK, WORLD_SIZE"):
        slurm_environment(environ)


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        ({}, "use --nproc 4"),
        ({"SLURM_NTASKS": "1"}, "use --nproc 4"),
        (TASK, "use --nproc 4"),
        (
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
            "start it with srun, whose tasks are the ranks (SLURM_NTASKS=4, but SLURM_STEP_NUM_TASKS is not set, so "
            "srun did not start this process), or use --nproc 4 on one host",
        ),
    ],
)
def test_ranks_of_a_job_are_started_by_srun(environ, advice):
    assert advice_on_ranks(4, environ) == advice


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("trn07", "trn07"), ("trn[07-12,15],login", "trn07"), ("a,b", "a"), ("rack1-[3,5]-gpu", "rack1-3-gpu")],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_first_host_of_nonsense_says_what_to_set():
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        first_host("")


@pytest.mark.parametrize(
    ("environ", "is_remarked"),
    [
        ({}, False),
        ({"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "32"}, True),
        ({"SLURM_NTASKS": "32", "SLURM_STEP_NUM_TASKS": "32"}, False),
    ],
)
def test_a_single_rank_in_a_job_of_several_tasks_is_remarked(environ, is_remarked):
    remark = one_of_several_tasks(environ)

    assert (remark is not None) is is_remarked
    assert remark is None or "SLURM_NTASKS=32 tasks: start it with srun" in remark
