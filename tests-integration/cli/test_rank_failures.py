"""When a rank of `nxd train` fails, is killed or stops, the user sees which one, and why, once; then the run ends.

Nothing is left: no process, no file outside the output folder. `tools/fault_table.py` runs the slow tests here, and
makes a table of what they saw.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import nxd_ckpt
import pytest
from nxd_testing import deadline

PROGRAMS = Path(__file__).parent / "programs"
PLACES = {
    "tp": ("forward:21", ["parallel.tensor_parallel_size=2"]),
    "pp": ("forward:21", ["parallel.pipeline_parallel_size=2"]),
    "zero1": ("forward:21", ["parallel.zero_stage=1"]),
    "zero3": ("forward:21", ["parallel.zero_stage=3"]),
    "save": ("fsync:4", ["parallel.tensor_parallel_size=2", "checkpoint.save_every=2"]),
    "background save": (
        "forward:21",
        ["parallel.zero_stage=1", "checkpoint.save_every=1", "checkpoint.background=true"],
    ),
}
TRANSPORTS = ["shared memory", "gloo", "torchrun"]
LAST_STEP = 100_000
FAULTS = {"raise": "exception", "SIGKILL": "kill -9", "SIGSTOP": "SIGSTOP"}
SIGNALS = {"SIGTERM": "SIGTERM", "SIGINT,SIGINT": "Ctrl-C twice", "SIGKILL": "launcher -9"}
SECONDS_UNTIL_GIVEN_UP = 10
LOG_LINE = (f"{time.gmtime().tm_year // 100}", "step ", "[rank", "[W", "WARNING", "W1", "  ")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@dataclass
class Training:
    """`nxd train` on two ranks, in a folder of its own."""

    folder: Path
    place: str = "tp"
    transport: str = "shared memory"
    fault: str = "none"
    settings: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    fault_time: float = 0.0  # seconds since 1970; until something is done to it, when it was started
    seconds: float = 0.0  # from then until all processes had ended

    def start(self) -> "subprocess.Popen[bytes]":
        call, settings = PLACES[self.place]
        self.fault_time = time.time()
        (self.folder / "text").mkdir(exist_ok=True)
        (self.folder / "text/words.txt").write_text("words to be read again and again " * 500)
        (self.folder / "tmp").mkdir(exist_ok=True)
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        return subprocess.Popen(
            [
                *(sys.executable, "-m", *(torchrun if self.transport == "torchrun" else ())),
                *("nxd_trainer", "train", *(() if self.transport == "torchrun" else ("--nproc", "2"))),
                *("model.factory=failing_model:make", "data.path=text", "output=run", "data.sequence_length=16"),
                "pipeline.layer_class=transformers.models.llama.modeling_llama:LlamaDecoderLayer",
                *("train.global_batch_size=8", f"train.steps={LAST_STEP}", "train.eval_every=0"),
                *("train.log_every=1", "checkpoint.save_every=0", *settings, *self.settings),
            ],
            cwd=self.folder,
            stdout=(self.folder / "output.txt").open("ab"),
            stderr=(self.folder / "errors.txt").open("ab"),
            env=os.environ
            | {
                "FAULT": f"{self.fault}:{call}",
                "OMP_NUM_THREADS": "1",
                "NXD_SHM": "0" if self.transport == "gloo" else "1",
                "PYTHONPATH": str(PROGRAMS),
                "TMPDIR": str(self.folder / "tmp"),
                self.marker: "1",
            }
            | self.env,
        )

    @property
    def marker(self) -> str:
        """An environment variable by which this training's processes are found."""
        return f"NXD_TEST_MARKER_{abs(hash(self.folder))}"

    @property
    def errors(self) -> str:
        return (self.folder / "errors.txt").read_text()

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.marker.encode() in entry.read_bytes():
                    found.append(int(entry.parent.name))
            except OSError:  # it has ended, or is not ours
                continue
        return found

    def wait_for_step(self) -> None:
        self.wait_for(lambda: "\nstep" in self.errors)

    def wait_for(self, condition: Callable[[], object]) -> None:
        give_up = time.monotonic() + deadline(120)
        while not condition():
            assert time.monotonic() < give_up, self.errors
            time.sleep(0.05)

    def wait_for_end(self, process: "subprocess.Popen[bytes]", seconds: float) -> int:
        """The exit code; within the seconds, the processes of all ranks must have ended as well."""
        give_up = time.monotonic() + deadline(seconds)
        try:
            code = process.wait(deadline(seconds))
            while self.processes():
                assert time.monotonic() < give_up, self.errors
                time.sleep(0.05)
            self.seconds = time.time() - self._time_of_fault()
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            process.wait()
        return code

    def _time_of_fault(self) -> float:
        told = self.folder / "fault_time"
        return float(told.read_text()) if told.exists() else self.fault_time

    def files_left(self) -> list[str]:
        """What is in the folder for temporary files, but for torch's cache of kernels."""
        names = sorted(path.name for path in (self.folder / "tmp").iterdir())
        return [name for name in names if not name.startswith("torchinductor_")]

    def check_traces(self) -> None:
        """Nothing is left outside the output, and what is in it can be resumed."""
        assert self.files_left() == []
        if nxd_ckpt.list_checkpoints(self.folder / "run/checkpoints"):
            assert nxd_ckpt.open_checkpoint(self.folder / "run/checkpoints").damage() == []

    def lines_of_failure(self) -> list[str]:
        """What was written that is neither progress nor the inner lines of a traceback."""
        return [line for line in self.errors.splitlines() if line.strip() and not line.startswith(LOG_LINE)]

    def add_to_table(self, fault: str, code: int) -> None:
        """Write what was seen, a line of JSON, to the file that NXD_FAULT_TABLE names, if it does."""
        if (table := os.environ.get("NXD_FAULT_TABLE")) is None:
            return
        shown = (self.lines_of_failure() or [""])[0].replace(f"{self.folder}/", "")
        seen = {"seconds": round(self.seconds, 1), "exit code": code, "first line": shown, "files": self.files_left()}
        with Path(table).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"fault": fault, "during": self.place, "ranks": self.transport, **seen}) + "\n")


def test_rank_that_raises_in_a_pipeline_is_shown_first_and_the_others_in_one_line(tmp_path):
    training = Training(tmp_path, "pp", fault="raise")

    assert training.wait_for_end(training.start(), 120) == 1

    assert training.lines_of_failure() == [
        "rank 1 failed:",
        "Traceback (most recent call last):",
        "RuntimeError: made to fail",
        "in step 21",
        *[line for line in training.errors.splitlines() if line.startswith("rank 0 ended: PeerError")],
        "nxd: rank 1 failed first; the other ranks have ended",
    ]
    assert training.errors.count("rank 0 ended:") == 1
    training.check_traces()


def test_rank_that_is_killed_is_named_with_the_signal(tmp_path):
    training = Training(tmp_path, "tp", fault="SIGKILL")

    assert training.wait_for_end(training.start(), 120) == 1

    first, of_peer = training.lines_of_failure()
    assert first == "nxd: rank 1 was killed by SIGKILL (signal 9)"
    assert of_peer.startswith("rank 0 ended: LostPeerError: rank 1 has left group tp [0, 1]")
    assert "in step 11; all_reduce_ of group tp [0, 1]; forward of LlamaDecoderLayer > LlamaAttention" in of_peer
    training.check_traces()


@pytest.mark.pairs
@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", ["raise", "SIGKILL", "SIGSTOP"])
def test_fault_of_a_rank_ends_all_ranks_and_is_named(tmp_path, fault, place, transport):
    training = Training(tmp_path, place, transport, fault)
    if fault == "SIGSTOP" and place == "pp":
        training.settings = [f"parallel.timeout={deadline(SECONDS_UNTIL_GIVEN_UP)}"]
    elif fault == "SIGSTOP":
        training.env = {"NXD_TIMEOUT": str(deadline(SECONDS_UNTIL_GIVEN_UP))}

    code = training.wait_for_end(training.start(), 180)

    assert code not in (0, None)
    lines = training.lines_of_failure()
    if fault == "raise" and place == "save":
        assert lines[0].startswith("nxd train: saving checkpoint"), training.errors
        assert "  rank 1: RuntimeError: made to fail" in training.errors
    elif fault == "raise":
        assert lines[0] == "rank 1 failed:", training.errors
        assert training.errors.count("Traceback (most recent call last)") <= 1 or transport == "torchrun"
    elif fault == "SIGKILL":
        assert "rank 1 " in lines[0] or "local_rank: 1 " in lines[0], training.errors  # torchrun's own words
    else:
        assert (
            training.errors.count(
                "no heartbeat from rank 1: it has stopped or is cut off from the network; the last was"
            )
            == 1
        )
        assert not [line for line in lines if line.startswith("rank 1")]
    training.check_traces()
    training.add_to_table(FAULTS[fault], code)


@pytest.mark.pairs
@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("signals", [["SIGTERM"], ["SIGINT", "SIGINT"], ["SIGKILL"]], ids=",".join)
def test_signal_to_the_launcher_ends_all_ranks(tmp_path, signals, place, transport, fresh_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", fresh_python)
    training = Training(tmp_path, place, transport)
    process = training.start()
    training.wait_for_step()

    training.fault_time = time.time()
    for name in signals:
        process.send_signal(getattr(signal, name))

    code = training.wait_for_end(process, 120)
    assert code == -signal.SIGKILL if signals == ["SIGKILL"] else code != 0
    if signals != ["SIGKILL"]:
        training.check_traces()
    if signals == ["SIGTERM"] and transport != "torchrun":
        assert code == 143
        assert nxd_ckpt.latest(tmp_path / "run/checkpoints") is not None
    training.add_to_table(SIGNALS[",".join(signals)], code)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", ["tp", "background save"])
def test_ranks_and_writers_that_are_stopped_end_with_the_launcher(
    tmp_path, place, transport, fresh_python, monkeypatch
):
    monkeypatch.setattr(sys, "executable", fresh_python)
    training = Training(tmp_path, place, transport)
    process = training.start()
    training.wait_for_step()
    training.wait_for(lambda: place != "background save" or "saved run/checkpoints" in training.errors)

    for pid in set(training.processes()) - {process.pid}:
        os.kill(pid, signal.SIGSTOP)
    process.kill()

    assert training.wait_for_end(process, 60) == -signal.SIGKILL


def fill_disk(folder: Path, leave: int = 0) -> None:
    """Write a file until nothing more fits, and then take so many bytes away again."""
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass
    os.truncate(folder / "filler", (folder / "filler").stat().st_size - leave)


def make_read_only(folder: Path, mount) -> None:
    mount(folder, "--bind", str(folder))
    mount(folder, "-o", "remount,ro,bind")


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", ["tp", "pp", "zero1"])
def test_disk_that_fills_up_while_no_checkpoint_is_saved_ends_all_ranks(
    tmp_path, place, transport, mount, fresh_python, monkeypatch
):
    monkeypatch.setattr(sys, "executable", fresh_python)
    training = Training(tmp_path, place, transport)
    (tmp_path / "run").mkdir()
    mount(tmp_path / "run", "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    process = training.start()
    training.wait_for_step()

    training.fault_time = time.time()
    fill_disk(tmp_path / "run")

    code = training.wait_for_end(process, 120)
    assert code != 0
    told = re.compile(
        r"rank 0 failed: OSError: \[Errno 28\] the metrics of step \d+ cannot be written: "
        r"No space left on device: 'run' \["
    )
    assert told.match(training.lines_of_failure()[0]), training.errors
    assert training.errors.count("No space left on device") == 1
    assert transport == "torchrun" or "Traceback" not in training.errors  # its agent adds one of its own
    training.check_traces()
    training.add_to_table("full disk", code)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", ["tp", "pp", "zero1"])
def test_output_that_is_read_only_is_one_line(tmp_path, place, transport, mount, fresh_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", fresh_python)
    training = Training(tmp_path, place, transport)
    (tmp_path / "run").mkdir()
    make_read_only(tmp_path / "run", mount)

    code = training.wait_for_end(training.start(), 120)

    assert code != 0
    (line,) = [line for line in training.lines_of_failure() if line.startswith("nxd train: ")]
    assert line == "nxd train: output=run cannot be written: [Errno 30] Read-only file system: 'run/.lock'"
    training.check_traces()
    training.add_to_table("read-only output", code)


@pytest.mark.pairs
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("full disk", "2 of 2 ranks: OSError: [Errno 28] No space left on device\n"),
        ("read-only output", "1 of 2 ranks\n  rank 0: OSError: [Errno 30] Read-only file system: "),
    ],
    ids=["full disk", "read-only output"],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", ["save", "background save"])
def test_disk_that_takes_no_checkpoint_is_one_error_and_what_was_saved_stays(
    tmp_path, place, transport, fault, told, mount, fresh_python, monkeypatch
):
    monkeypatch.setattr(sys, "executable", fresh_python)
    training = Training(tmp_path, place, transport, settings=["train.stop_after=3", "checkpoint.save_every=1"])
    (tmp_path / "run").mkdir()
    mount(tmp_path / "run", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
    assert training.wait_for_end(training.start(), 120) == 0
    if fault == "full disk":
        fill_disk(tmp_path / "run", leave=2**16)  # bytes; a rank's part of a checkpoint has more
    else:
        make_read_only(tmp_path / "run/checkpoints", mount)

    training.settings = ["checkpoint.save_every=1"]

    code = training.wait_for_end(training.start(), 120)
    assert code != 0
    assert training.lines_of_failure()[0].startswith("nxd train: saving checkpoint"), training.errors
    failed = "nxd train: saving checkpoint 'step-00000004' to run/checkpoints failed on "
    assert f"{failed}{told}" in training.errors.replace(f"{tmp_path}/", "")
    assert transport == "torchrun" or "Traceback" not in training.errors
    newest = nxd_ckpt.latest(tmp_path / "run/checkpoints")
    assert newest is not None
    assert newest.tag == "step-00000003"
    training.check_traces()
    training.add_to_table(fault, code)
