"""Who comes to a training that ends meanwhile ends as well."""

import os
import re
import sys
from queue import SimpleQueue
from threading import Thread

import pytest
import torch.distributed as dist
from nxd_elastic.members import Generation, GenerationEnd, GenerationKeys, Member
from nxd_elastic.rendezvous import RendezvousSettings, join
from nxd_state import ParallelDegrees, PeerError
from nxd_state.processes import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("ending", ["done", "stopped"])
def test_trainer_that_waits_to_join_ends_with_the_training(ending, deadline):
    keys, process = GenerationKeys(dist.HashStore()), Process.of(os.getpid())
    trains, comes = (Member(slot, f"{slot}-own", process, process) for slot in range(2))
    keys.fix_members(Generation(1, [trains], ParallelDegrees(dp=1)))
    settings = RendezvousSettings(
        slots=2, grace=1.0, silence=deadline(30), choose=lambda ranks: ParallelDegrees(dp=ranks)
    )

    joined = SimpleQueue()
    Thread(target=lambda: joined.put(join(keys, comes, settings, 0)), daemon=True).start()
    while not keys.change_is_wanted(1):
        assert joined.empty()
    keys.end(1, GenerationEnd(ending, "the training has ended"))

    assert joined.get(timeout=deadline(30)) is None


@pytest.mark.parametrize("comes_back", ["after a death", "from the generation before"])
def test_nobody_goes_on_with_a_training_that_was_stopped_or_has_failed(comes_back, deadline):
    process = Process.of(os.getpid())
    settings = RendezvousSettings(
        slots=1, grace=deadline(30), silence=deadline(30), choose=lambda ranks: ParallelDegrees(dp=ranks)
    )
    again = {"after": 0, "replaces": True} if comes_back == "after a death" else {"after": 1}
    for ending in ("stopped", "failed"):
        keys = GenerationKeys(dist.HashStore())
        keys.fix_members(Generation(1, [Member(0, "before", process, process)], ParallelDegrees(dp=1)))
        keys.end(1, GenerationEnd(ending, "rank 3 of the launch failed: no such file"))
        own = Member(0, "again", process, process)

        if ending == "stopped":
            assert join(keys, own, settings, **again) is None
        else:
            with pytest.raises(PeerError, match="no such file"):
                join(keys, own, settings, **again)


def test_another_start_goes_on_with_a_stopped_training(deadline):
    keys, process = GenerationKeys(dist.HashStore()), Process.of(os.getpid())
    before, after = (Member(0, incarnation, process, process) for incarnation in ("before", "after"))
    keys.fix_members(Generation(1, [before], ParallelDegrees(dp=1)))
    keys.end(1, GenerationEnd("stopped", "the training has ended"))
    settings = RendezvousSettings(
        slots=1, grace=deadline(30), silence=deadline(30), choose=lambda ranks: ParallelDegrees(dp=ranks)
    )

    generation = join(keys, after, settings, 0)

    assert generation is not None
    assert (generation.number, generation.active) == (2, (after,))


@pytest.mark.parametrize(
    ("key", "forged", "said"),
    [
        ("1/over", "{", "Expecting property name"),
        ("1/over", '["over and out", "bye"]', "unknown end of a generation: 'over and out'"),
        ("1/members", "[]", "TypeError"),
        ("1/members", '{"members": [{"slot": "0"}]}', "KeyError"),
        ("latest", "\x1b[2Jtwo", r"\\x1b\[2Jtwo"),
        ("latest", "[" * 100_000, "RecursionError"),
    ],
)
def test_what_no_trainer_has_written_into_the_store_is_an_error_that_says_so(key, forged, said):
    store, process = dist.HashStore(), Process.of(os.getpid())
    keys, own = GenerationKeys(store), Member(0, "own", process, process)
    keys.fix_members(Generation(1, [Member(1, "other", process, process)], ParallelDegrees(dp=1)))
    store.set(f"nxd_elastic/{key}", forged)
    settings = RendezvousSettings(slots=2, grace=1.0, silence=1.0, choose=lambda ranks: ParallelDegrees(dp=ranks))

    with pytest.raises(PeerError, match="which no rank of this version has written") as raised:
        join(keys, own, settings, 0)

    assert re.search(said, str(raised.value))
    assert str(raised.value).isprintable()


def test_reason_of_an_end_cannot_steer_a_terminal():
    keys = GenerationKeys(store := dist.HashStore())
    store.set("nxd_elastic/1/over", '["failed", "rank 0 \\u001b[2Jfailed"]')

    assert (
        keys.end_of(1) == keys.end(1, GenerationEnd("lost", "late")) == GenerationEnd("failed", r"rank 0 \x1b[2Jfailed")
    )
