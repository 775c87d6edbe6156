"""Storage that is full, may not be written to, or is not there; and ranks that stop."""

import errno
import os
import resource
import shutil
import signal
import subprocess

import pytest
import torch
import torch.distributed as dist
from nxd_ckpt import CheckpointError, delete, list_checkpoints, load, open_checkpoint, save, unpin

from ..crash.forked_ranks import run_forked
from ..crash.saves import make_old, save_again, save_one, value_of
from ..crash.system_calls import Sabotage, SystemCalls

BIG = {"w": torch.zeros(2**19)}  # 2 MiB
SMALL = {"w": torch.ones(4)}


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 1 MiB."""
    path = tmp_path / "tiny"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"may not mount a file system here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_save_to_a_full_disk_says_so_leaves_the_old_one_and_works_again_with_room(tiny_disk):
    save(tiny_disk, "t", SMALL)

    with pytest.raises(CheckpointError, match=r"failed: OSError: \[Errno 28\] No space left on device"):
        save(tiny_disk, "t", BIG, overwrite=True)

    assert torch.equal(open_checkpoint(tiny_disk, "t").read("w"), SMALL["w"])
    assert os.listdir(tiny_disk / ".staging") == ["lock"]
    save(tiny_disk, "t", {"w": torch.zeros(4)}, overwrite=True)
    assert not open_checkpoint(tiny_disk, "t").read("w").any()


def test_save_of_a_file_larger_than_allowed_says_so_and_leaves_the_old_one(tmp_path):
    save(tmp_path, "t", SMALL)

    def limited(ranks):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        save(tmp_path, "t", BIG, overwrite=True, process_group=ranks)

    (outcome,) = run_forked(limited, 1)

    assert f"OSError: [Errno {errno.EFBIG}] File too large" in outcome.error
    assert torch.equal(open_checkpoint(tmp_path, "t").read("w"), SMALL["w"])


@pytest.fixture
def read_only(tmp_path):
    """A folder with a checkpoint that cannot be written to, also by root."""
    path = tmp_path / "read-only"
    save(path, "t", SMALL)
    if os.geteuid():
        path.chmod(0o555)
        yield path
        path.chmod(0o755)
        return
    for options in (["--bind", str(path), str(path)], ["-o", "remount,ro,bind", str(path)]):
        mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"may not mount a file system here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_read_only_folder_is_loaded_from_but_not_saved_to(read_only):
    with pytest.raises(CheckpointError, match=r"(Read-only file system|Permission denied)"):
        save(read_only, "u", SMALL)

    wanted = torch.zeros(4)
    load(read_only, into={"w": wanted})
    assert torch.equal(wanted, SMALL["w"])
    assert [info.tag for info in list_checkpoints(read_only)] == ["t"]


def test_save_into_what_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(CheckpointError, match=r"file is not a folder; choose another path"):
        save(tmp_path / "file", "t", SMALL)
    with pytest.raises(CheckpointError, match=r"file is not a folder; choose another path"):
        save(tmp_path / "file" / "below", "t", SMALL)

    assert (tmp_path / "file").read_text() == "not a folder"


def test_concurrent_saves_of_one_tag_by_processes_one_wins_and_the_others_raise(tmp_path):
    def save_alone(ranks):
        from nxd_ckpt.coordinator import coordinator_for

        save(tmp_path, "t", {"w": torch.full((4,), float(ranks.rank))}, process_group=coordinator_for(None))

    errors = [outcome.error for outcome in run_forked(save_alone, 4)]

    winner = errors.index("")
    assert errors.count("") == 1
    for error in errors[:winner] + errors[winner + 1 :]:
        assert (
            "another save is in progress in" in error or "t exists; choose another tag or pass overwrite=True" in error
        )
    assert open_checkpoint(tmp_path, "t").read("w").unique().item() == winner


@pytest.mark.sample(2)
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize(
    ("how", "timeout", "message"),
    [
        ("stop", 2.0, "no answer within 2 seconds from rank {} of 2"),
        ("before", 600.0, "rank {} of 2 is gone: its process has ended"),
    ],
    ids=["stopped", "killed"],
)
def test_save_rank_that_stops_or_dies_is_named_by_the_other_within_the_deadline(
    tmp_path, stopped, how, timeout, message
):
    """Over a real process group. A rank that is woken up later cannot spoil anything either."""
    make_old(tmp_path / "root")

    def rank_main(ranks):
        (tmp_path / f"pid{ranks.rank}").write_text(str(os.getpid()))
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=ranks.rank, world_size=ranks.world_size
        )
        if ranks.rank == stopped:
            SystemCalls(ranks.rank, tmp_path / "log", Sabotage(frozenset([0]), how), only=("write",))
        try:
            save_one(tmp_path / "root", "t", 2, ranks.rank, timeout=timeout)
        except CheckpointError:
            if ranks.rank != stopped and how == "stop":
                os.kill(int((tmp_path / f"pid{stopped}").read_text()), signal.SIGCONT)
            raise

    outcomes = run_forked(rank_main, 2)

    assert message.format(stopped) in outcomes[1 - stopped].error
    assert outcomes[stopped].error if how == "stop" else outcomes[stopped].signal == signal.SIGKILL
    assert value_of(tmp_path / "root", "t") == 1
    save_again(tmp_path / "root", "t", 3)
    assert value_of(tmp_path / "root", "t") == 3


@pytest.mark.parametrize("name", [".staging", ".trash", ".pins", "t/data"])
def test_folder_of_a_root_that_is_a_link_elsewhere_loses_nothing_and_is_named(tmp_path, name):
    root, mine = tmp_path / "root", tmp_path / "mine"
    save(root, "t", SMALL)
    mine.mkdir()
    (mine / "t").write_text("mine")
    if (root / name).exists():
        shutil.rmtree(root / name)
    (root / name).symlink_to(mine)

    def save_pin_and_delete():
        save(root, "t", SMALL, overwrite=True)
        unpin(root, "t")
        delete(root, "t")

    with pytest.raises(CheckpointError, match=rf"{root / name} is a link to {mine}, which is never followed"):
        save_pin_and_delete()
    assert {path.name: path.read_text() for path in mine.iterdir()} == {"t": "mine"}


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["lock", "LATEST"])
def test_file_of_a_root_that_is_a_link_or_a_pipe_empties_nothing_and_does_not_hang(tmp_path, name, kind):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "root" / ".staging").mkdir(parents=True)
    path = tmp_path / "root" / ".staging" / name
    path.symlink_to(tmp_path / "mine") if kind == "link" else os.mkfifo(path)

    if name == "lock":
        with pytest.raises(CheckpointError, match=f"is {'a link to' if kind == 'link' else 'not a regular file'}"):
            save(tmp_path / "root", "t", SMALL)
    else:  # a dead save's, which is cleared away
        save(tmp_path / "root", "t", SMALL)
    assert (tmp_path / "mine").read_text() == "mine"
