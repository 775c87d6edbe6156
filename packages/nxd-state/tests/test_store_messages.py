"""What a stranger has written into the job's store is refused, or shown so that it cannot steer a terminal."""

import json
import sys

import nxd_state
import pytest
import torch.distributed as dist
from nxd_state.shared_memory import GroupMembers, connect
from torch.distributed.distributed_c10d import _get_default_store


def test_reason_of_an_abort_is_shown_without_escapes(run_ranks):
    def abort() -> str:
        nxd_state.initialize_model_parallel(2)
        group = nxd_state.get_group("tp")
        _get_default_store().set(f"nxd_aborted/{group.name}", "\x1b[2J\xff")
        dist.barrier()
        return nxd_state.abort_group(group, "mine")

    assert run_ranks(abort, 2) == ["\\x1b[2J\xff"] * 2


def test_announcement_that_is_none_is_an_error_that_says_so(run_ranks):
    def announce() -> str:
        nxd_state.initialize_model_parallel(2)
        if dist.get_rank() == 0:
            return ""
        _get_default_store().set("nxd_debug/last/0", '{"rank": 0')
        with pytest.raises(nxd_state.PeerError) as raised:
            nxd_state.barrier(nxd_state.get_group("tp"))
        return str(raised.value)

    _, said = run_ranks(announce, 2, env={"NXD_DEBUG_COLLECTIVES": "1"})

    assert said.startswith(
        "the job's store has b'{\"rank\": 0' under 'nxd_debug/last/0', which no rank of this version"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
def test_offer_of_memory_that_is_none_is_an_error_that_says_so(run_ranks):
    def share() -> list[str]:
        said = []
        offers = ["no JSON", "[]", "[" * 100_000, '{"host": "here", "event_count": "\\u001b"}']
        while offers:
            store = dist.HashStore()
            store.set("1/offer", offers.pop(0))
            with pytest.raises(nxd_state.PeerError) as raised:
                connect({"group": GroupMembers("tp", (0, 1), 1.0)}, 0, store)
            said.append(str(raised.value))
            if len(said) == 4:
                own = json.loads(store.get("0/offer"))
                offers += [json.dumps(own | {"process": ["1", 2]}), json.dumps(own | {"event_count": [1, 2]})]
        return said

    (said,) = run_ranks(share, 1)

    assert len(said) == 6
    assert all("under '1/offer', which no rank of this version has written" in text for text in said)
    assert "".join(said).isprintable()
