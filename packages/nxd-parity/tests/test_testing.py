"""`assert_same_training`: functions that train on ranks against one process."""

import os
import threading

import pytest
import torch
from nxd_parity import testing
from nxd_parity.command import main


def test_function_that_trains_alike_at_each_layout_passes(train, tmp_path):
    testing.assert_same_training(train, train, layouts=[{}, {"steps": 2}], folder=tmp_path)

    assert not list(tmp_path.iterdir())


def test_layouts_that_differ_are_reported(train, tmp_path):
    def candidate(*, fault):
        train(fault)

    with pytest.raises(AssertionError) as raised:
        testing.assert_same_training(
            train, candidate, layouts=[{"fault": ""}, {"fault": "no sum in forward"}], steps=1, folder=tmp_path
        )

    text = " ".join(str(raised.value).split())
    assert text.startswith("candidate(fault='no sum in forward') on 2 ranks trains differently")
    assert "blocks.1.down" in text
    assert "missing sum" in text
    (kept,) = tmp_path.iterdir()
    assert main(["compare", str(kept / "reference"), str(kept / "candidate-0")]) == 0
    assert main(["compare", str(kept / "reference"), str(kept / "candidate-1")]) == 3


@pytest.mark.parametrize("named", [{"layouts": []}, {"ranks": 0}, {"steps": 0}, {"timeout": -1}], ids=str)
def test_arguments_that_compare_nothing_are_refused(train, named):
    with pytest.raises(ValueError, match="pass positive numbers, and at least one layout"):
        testing.assert_same_training(train, train, **named)


def test_candidate_that_trains_fewer_steps_is_reported(train):
    with pytest.raises(AssertionError, match="those after step 1 were not compared"):
        testing.assert_same_training(train, train, ranks=1, layouts=[{"steps": 1}])


@pytest.mark.slow
def test_bfloat16_is_compared_within_its_rounding(train):
    def trains():
        train(dtype=torch.bfloat16)

    testing.assert_same_training(trains, trains, dtype=torch.bfloat16)


def small(*_):
    model = torch.nn.Linear(2, 2)
    model(torch.randn(3, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_rank_that_raises_is_shown(tmp_path):
    def failing():
        if os.environ["RANK"] == "1":
            raise ValueError("of rank 1")
        small()
        torch.distributed.barrier()

    with pytest.raises(RuntimeError, match=r"(?s)candidate-0: rank 1 ended with exit code 1.*ValueError: of rank 1"):
        testing.assert_same_training(small, failing)


@pytest.mark.slow
def test_ranks_that_hang_show_where(deadline):
    def hanging():
        small()
        threading.Event().wait()

    with pytest.raises(RuntimeError, match=r"(?s)candidate-0: rank \d ended with exit code 1.*in hanging"):
        testing.assert_same_training(small, hanging, timeout=deadline(20))


def test_fixture_keeps_recordings_that_differ(assert_same_training, tmp_path):
    with pytest.raises(AssertionError, match="trains differently"):
        assert_same_training(small, lambda: [small() for _ in range(2)], ranks=1)

    assert [it.name for it in tmp_path.rglob("rank-00000")]
