"""`ParallelDegrees`: arithmetic, checks, what it reads and says."""

import pytest
from nxd_state import Mesh, ParallelDegrees

CONFIG = {
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 2,
    "context_parallel_size": 1,
    "expert_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": True,
}


def test_degrees_on_ranks_have_the_replicas_that_are_left():
    degrees = ParallelDegrees(tp=2, pp=2, cp=2).on(32)

    assert (degrees.model_ranks, degrees.dp, degrees.world_size, degrees.replicas) == (8, 4, 32, 8)
    assert degrees.mesh() == Mesh(32, pp=2, cp=2, tp=2)
    assert ParallelDegrees.of_mesh(degrees.mesh()) == degrees


def test_experts_are_split_as_other_layers_unless_they_are_whole():
    split, whole = ParallelDegrees(tp=4), ParallelDegrees(tp=4, etp=1)

    assert (split.etp, split.splits_experts, split.splits_layers) == (4, False, True)
    assert (whole.etp, whole.splits_experts) == (1, True)
    assert ParallelDegrees(tp=2, ep=4, etp=1).on(8).expert_replicas == 2


@pytest.mark.parametrize(
    ("degrees", "least"),
    [
        (ParallelDegrees(), 1),
        (ParallelDegrees(tp=2, cp=2, pp=3), 12),
        (ParallelDegrees(tp=2, ep=4), 8),
        (ParallelDegrees(tp=2, ep=4, etp=1), 4),
        (ParallelDegrees(tp=2, cp=3, ep=4, etp=1, pp=2), 24),
    ],
)
def test_least_ranks_are_the_fewest_that_a_mesh_accepts(degrees, least):
    assert degrees.least_ranks == least
    fitting = []
    for world_size in range(1, 2 * least + 1):
        try:
            degrees.on(world_size)
            fitting.append(world_size)
        except ValueError:
            continue
    assert fitting == [least, 2 * least]


def test_config_says_degrees_and_degrees_say_a_config():
    degrees = ParallelDegrees.of_config(CONFIG)

    assert degrees == ParallelDegrees(tp=4, pp=2, ep=8, etp=1, sequence_parallel=True)
    assert degrees.as_config() == CONFIG
    assert "expert_tensor_parallel_size" not in ParallelDegrees(tp=4).as_config()


@pytest.mark.parametrize(
    ("degrees", "described"),
    [
        (ParallelDegrees(tp=2), "TP 2"),
        (ParallelDegrees(tp=2, dp=2), "TP 2 x DP 2"),
        (
            ParallelDegrees(2, 2, 2, 2, dp=2, sequence_parallel=True, zero_stage=1),
            "TP 2 + SP x CP 2 x PP 2 x DP 2, EP 2, ZeRO-1",
        ),
        (ParallelDegrees(2, etp=1, dp=1), "TP 2 x DP 1, EP 1 of whole experts"),
    ],
)
def test_description_has_what_is_not_off(degrees, described):
    assert degrees.describe() == described


def test_text_is_read_back():
    degrees = ParallelDegrees(tp=2, pp=4)

    assert str(degrees) == "tp=2,pp=4"
    assert ParallelDegrees.parse(str(degrees)) == degrees
    assert ParallelDegrees.parse("pp=2") == ParallelDegrees(pp=2)


@pytest.mark.parametrize("text", ["tp=0", "tp=2,tp=2", "dp=2", "tp", "tp=-1", "xp=2"])
def test_text_that_is_no_layout_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="is not a degree; write it like tp=2,pp=2"):
        ParallelDegrees.parse(text)


@pytest.mark.parametrize(
    ("degrees", "told"),
    [
        ({"tp": 0}, "tp=0 is not a positive degree"),
        ({"pp": 1.0}, "pp=1.0 is not a positive degree"),
        ({"dp": -1}, "dp=-1 is not a positive degree"),
        ({"tp": 4, "etp": 2}, "expert_tensor_parallel_size=2 must be 1 or tensor_parallel_size=4"),
    ],
)
def test_degrees_that_cannot_be_are_refused(degrees, told):
    with pytest.raises(ValueError, match=told):
        ParallelDegrees(**degrees)
