"""What the ranks of a program show when one of them fails, and how long they wait for one that does not answer."""

import errno
import os
import sys

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_testing import deadline, run_torchrun

PROGRAM = """
import sys
import torch
from nxd_state import all_reduce, get_group, get_world_group, initialize_model_parallel

class Wide(torch.nn.Module):
    def forward(self, x):
        if get_group("tp").rank == 1:
            raise ValueError("made to fail")
        return all_reduce(x, get_group("tp"))

initialize_model_parallel(2)
Wide()(torch.ones(2))
"""


@pytest.mark.parametrize("shared_memory", ["0", "1"])
def test_script_shows_the_failure_of_one_rank_and_a_line_of_the_other(tmp_path, shared_memory):
    (tmp_path / "script.py").write_text(PROGRAM)

    result = run_torchrun([str(tmp_path / "script.py")], 2, env={"NXD_SHM": shared_memory})

    assert result.returncode != 0
    shown = [line for line in result.stderr.splitlines() if line.startswith(("rank ", "Traceback", "ValueError"))]
    assert shown[:3] == ["rank 1 failed:", "Traceback (most recent call last):", "ValueError: made to fail"]
    of_peer = next(line for line in shown if line.startswith("rank 0 ended: "))
    where = f"[all_reduce of group tp [0, 1]; forward of Wide; {tmp_path}/script.py:10 in forward]"
    assert of_peer.endswith(where), of_peer


@pytest.mark.parametrize(
    "text",
    [
        "NCCL communicator was aborted on rank 1.",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27.3",
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)",
    ],
)
def test_error_of_nccl_that_another_rank_caused_is_one_line(capsys, text):
    assert nxd_state.report_failure(torch.distributed.DistBackendError(text)) == nxd_state.EXIT_PEER_FAILED

    assert capsys.readouterr().err == f"rank 0 ended: DistBackendError: {text}\n"


def test_exception_that_is_its_own_cause_is_shown(capsys):
    kept = OSError("No space left on device")
    told = OSError("metrics cannot be written")
    told.__cause__, kept.__context__ = kept, told

    assert nxd_state.report_failure(told) == 1

    assert "metrics cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ValueError, nxd_state.PeerError])
def test_failure_whose_message_would_steer_a_terminal_is_shown_escaped(capsys, kind):
    nxd_state.report_failure(kind("a name \x1b]0;title\x07 of a file\x9b2J"))

    told = capsys.readouterr().err
    assert "\\x1b]0;title" in told
    assert all(it.isprintable() or it == "\n" for it in told)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_storage_that_fails_is_one_line(capsys, number):
    with pytest.raises(OSError, match="run/metrics") as raised:
        raise OSError(number, os.strerror(number), "run/metrics.jsonl")

    assert nxd_state.report_failure(raised.value) == 1

    shown = capsys.readouterr().err
    assert shown.startswith(f"rank 0 failed: OSError: [Errno {number}] {os.strerror(number)}: 'run/metrics.jsonl' [")
    assert shown.endswith("in test_storage_that_fails_is_one_line]\n")
    assert shown.count("\n") == 1


FORKS = """
import os
import sys
import torch
from nxd_state import all_reduce, get_world_group, initialize_model_parallel

initialize_model_parallel(2)
if get_world_group().rank == 1:
    child = os.fork()
    if child == 0:
        try:
            raise ValueError("of the child alone")
        except ValueError:
            sys.excepthook(*sys.exc_info())
        os._exit(0)
    os.waitpid(child, 0)
sys.stdout.write(f"sum {all_reduce(torch.ones(1), get_world_group()).item()}\\n")  # in one piece: two ranks print
"""


def test_process_forked_from_a_rank_fails_for_itself(tmp_path):
    (tmp_path / "script.py").write_text(FORKS)

    result = run_torchrun([str(tmp_path / "script.py")], 2)

    assert (result.returncode, result.stdout.count("sum 2.0")) == (0, 2), result.stderr
    assert "ValueError: of the child alone" in result.stderr
    assert "rank 1 failed" not in result.stderr


def test_peer_failure_is_told_from_a_failure_of_this_rank(run_ranks):
    def fail() -> tuple[bool, str]:
        nxd_state.initialize_model_parallel(2)
        group = nxd_state.get_group("tp")
        try:
            nxd_state.on_every_rank("writing", lambda: 1 // group.rank, group)
        except RuntimeError as error:
            return isinstance(error, nxd_state.PeerError), str(error)
        raise AssertionError

    first, second = run_ranks(fail, 2)

    assert first[1] == second[1]
    assert (first[0], second[0]) == (False, True)


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf"])
def test_timeout_that_is_no_number_of_seconds_is_refused(run_ranks, text):
    def initialize() -> None:
        with pytest.raises(ValueError, match=f"NXD_TIMEOUT='{text}' must be a number of seconds above 0"):
            nxd_state.initialize_model_parallel()

    run_ranks(initialize, 1, env={"NXD_TIMEOUT": text})


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
def test_rank_that_does_not_come_is_given_up_after_the_timeout(run_ranks):
    seconds = str(deadline(2))

    def wait() -> str:
        nxd_state.initialize_model_parallel(2)
        group = nxd_state.get_group("tp")
        store = torch.distributed.distributed_c10d._get_default_store()
        if group.rank == 1:
            store.wait(["given up"])
            return ""
        with pytest.raises(nxd_state.PeerError) as raised:
            nxd_state.all_reduce(torch.ones(2), group)
        store.set("given up", "")
        return str(raised.value)

    text, _ = run_ranks(wait, 2, env={"NXD_TIMEOUT": seconds})

    assert f"rank 1 of group tp [0, 1] did not reach what rank 0 waits for in {float(seconds):g} s" in text


class Ended(dist.Store):
    """A store that lets nobody wait any more, as that of an elastic run whose ranks have parted."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]

    def wait(self, keys: list[str], timeout: object = None) -> None:
        assert set(keys) <= set(self.values)

    def check(self, keys: list[str]) -> bool:
        raise nxd_state.PeerError("the generation is over")


def test_rank_whose_store_has_ended_shows_its_failure(run_ranks):
    def report() -> int:
        dist.destroy_process_group()
        store = Ended()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return nxd_state.report_failure(nxd_state.PeerError("rank 1 timed out: no answer within 5 seconds"))

    assert run_ranks(report, 1) == [nxd_state.EXIT_PEER_FAILED]
