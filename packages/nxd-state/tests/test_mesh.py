"""The arithmetic of the mesh; no process group is made here."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nxd_state import Mesh

AXES = ["pp", "dp", "cp", "tp", "ep", "etp", "dp_exp"]
COMBINATIONS = [("dp", "cp"), ("pp", "tp"), ("pp", "dp", "cp", "tp"), ("dp_exp", "ep"), ("pp", "ep", "etp")]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    order = draw(st.sampled_from(["row_major", "strided", "row_paired"]))
    pp = draw(st.sampled_from([1, 2, 3, 4]))
    cp = draw(st.sampled_from([1, 2]))
    tp = draw(st.sampled_from([1, 2, 3, 4, 8] if order == "row_major" else [1, 2, 4, 8, 32]))
    dp = draw(st.integers(1, 6))
    if order != "row_major":  # these want whole nodes of 64 ranks
        dp *= 64
    etp = draw(st.sampled_from([-1, 1, tp]))
    rest = dp * cp * (tp if etp == 1 else 1)
    ep = draw(st.sampled_from([divisor for divisor in range(1, rest + 1) if rest % divisor == 0]))
    return Mesh(pp * dp * cp * tp, pp=pp, cp=cp, tp=tp, ep=ep, etp=etp, order=order)


@settings(deadline=None, max_examples=50)
@given(meshes(), st.sampled_from([*((axis,) for axis in AXES), *COMBINATIONS]))
def test_groups_of_any_axes_partition_the_world(mesh, axes):
    groups = mesh.groups(*axes)

    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {mesh.size(*axes)}


@settings(deadline=None, max_examples=50)
@given(meshes(), st.data())
def test_group_of_any_rank_is_the_one_group_that_holds_it(mesh, data):
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    axis = data.draw(st.sampled_from(AXES))

    holding = [group for group in mesh.groups(axis) if rank in group]

    assert holding == [mesh.group_of(rank, axis)]
    assert holding[0].index(rank) == mesh.coordinates(rank)[axis]


@settings(deadline=None, max_examples=50)
@given(meshes(), st.data())
def test_coordinates_of_any_rank_round_trip(mesh, data):
    rank = data.draw(st.integers(0, mesh.world_size - 1))

    coordinates = mesh.coordinates(rank)

    assert mesh.rank_at(**{axis: coordinates[axis] for axis in ("pp", "dp", "cp", "tp")}) == rank
    of_experts = (coordinates["dp_exp"] * mesh.ep + coordinates["ep"]) * mesh.etp + coordinates["etp"]
    assert of_experts == (coordinates["dp"] * mesh.cp + coordinates["cp"]) * mesh.tp + coordinates["tp"]


def test_groups_of_the_documented_example_are_as_documented():
    mesh = Mesh(32, tp=8, pp=4)

    assert mesh.dp == 1
    assert mesh.groups("tp") == tuple(tuple(range(start, start + 8)) for start in (0, 8, 16, 24))
    assert mesh.group_of(0, "pp") == (0, 8, 16, 24)


def test_groups_of_eight_ranks_follow_the_axis_order_pp_dp_cp_tp():
    mesh = Mesh(16, pp=2, cp=2, tp=2)

    assert mesh.groups("tp")[:2] == ((0, 1), (2, 3))
    assert mesh.groups("cp")[:2] == ((0, 2), (1, 3))
    assert mesh.groups("dp")[:2] == ((0, 4), (1, 5))
    assert mesh.groups("pp")[:2] == ((0, 8), (1, 9))
    assert mesh.groups("dp", "cp")[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert mesh.groups("pp", "tp")[:2] == ((0, 1, 8, 9), (2, 3, 10, 11))


def test_groups_with_experts_cut_data_and_context_parallel_ranks():
    mesh = Mesh(16, cp=2, tp=2, ep=4)

    assert (mesh.dp, mesh.dp_exp) == (4, 2)
    assert mesh.groups("ep") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert mesh.groups("dp_exp")[:2] == ((0, 8), (1, 9))


@pytest.mark.parametrize(
    ("pp", "expected"),
    [
        (1, ((0,), (1,), (2,), (3,))),
        (2, ((0, 2), (1, 3))),
        (4, ((0, 3),)),
    ],
)
def test_embedding_groups_hold_first_and_last_stage(pp, expected):
    assert Mesh(4, pp=pp).embedding_groups() == expected


def test_groups_strided_spread_tensor_parallel_ranks_over_the_node():
    mesh = Mesh(64, tp=4, order="strided")

    assert mesh.groups("tp")[:2] == ((0, 8, 16, 24), (1, 9, 17, 25))
    assert mesh.groups("tp")[8] == (32, 40, 48, 56)


def test_groups_row_paired_join_outer_and_inner_rows():
    mesh = Mesh(64, tp=32, order="row_paired")

    assert mesh.groups("tp") == (
        (*range(16), *range(48, 64)),
        (*range(16, 48),),
    )


def test_groups_row_paired_over_stages_keep_stage_order_where_ranks_descend():
    mesh = Mesh(64, pp=2, tp=32, order="row_paired")

    assert mesh.group_of(48, "pp") == (48, 32)
    assert mesh.coordinates(48)["pp"] == 0
    assert mesh.coordinates(32)["pp"] == 1


def test_mesh_is_no_matter_of_the_default_device():
    with torch.device("meta"):
        mesh = Mesh(24, pp=3, cp=2, tp=2)
        answers = mesh.groups("tp"), mesh.group_of(23, "pp"), mesh.rank_at(pp=1, tp=1), mesh.coordinates(9)["pp"]

    assert answers[1:] == ((7, 15, 23), 9, 1)
    assert answers[0] == mesh.groups("tp") == tuple((rank, rank + 1) for rank in range(0, 24, 2))


def test_mesh_of_100_000_ranks_answers_every_question():
    mesh = Mesh(100_000, pp=5, cp=2, tp=8, ep=4)

    assert mesh.dp == 1250
    assert len(mesh.groups("tp")) == 12_500
    assert len(mesh.groups("pp", "tp")) == 2500
    assert mesh.group_of(99_999, "tp") == tuple(range(99_992, 100_000))
    assert all(mesh.rank_at(**_dense(mesh.coordinates(rank))) == rank for rank in range(0, 100_000, 997))


def _dense(coordinates: dict[str, int]) -> dict[str, int]:
    return {axis: coordinates[axis] for axis in ("pp", "dp", "cp", "tp")}


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"world_size": 8, "tp": 3}, "pp=1 x cp=1 x tp=3 = 3 does not divide world_size=8; use tp=1, 2, 4 or 8"),
        ({"world_size": 8, "tp": 16}, "tp=16 = 16 does not divide world_size=8; use tp=1, 2, 4 or 8"),
        ({"world_size": 8, "pp": 2, "tp": 3}, "pp=2 x cp=1 x tp=3 = 6 .* use tp=1, 2 or 4"),
        ({"world_size": 8, "pp": 3}, "pp=3 .* does not divide world_size=8; lower pp or cp"),
        ({"world_size": 1, "tp": 2}, "tp=2 = 2 does not divide world_size=1; use tp=1$"),
        ({"world_size": 8, "tp": 0}, "tp=0 is not a positive degree; use 1"),
        ({"world_size": 8, "pp": -2}, "pp=-2 is not a positive degree"),
        ({"world_size": 0}, "world_size=0 is not a positive degree"),
        ({"world_size": 8, "dp": 3, "tp": 2}, "dp=3 .* = 6 is not world_size=8; leave dp out"),
        ({"world_size": 8, "dp": 0}, "dp=0 .* is not world_size=8"),
        ({"world_size": 8, "tp": 2, "ep": 3}, "ep=3 x etp=2 = 6 does not divide dp x cp x tp = 8; use ep=1, 2 or 4"),
        (
            {"world_size": 8, "order": "spiral"},
            "unknown order='spiral'; use one of row_major, row_paired, strided",
        ),
        ({"world_size": 8, "order": "strided"}, "whole nodes of 32 ranks .* world_size=8, tp=1: use order='row_major'"),
        ({"world_size": 192, "tp": 3, "order": "row_paired"}, "a tp that divides 64; world_size=192, tp=3"),
    ],
)
def test_mesh_impossible_degrees_raise_naming_numbers_and_what_to_use(degrees, message):
    with pytest.raises(ValueError, match=message):
        Mesh(**degrees)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda mesh: mesh.coordinates(4), r"rank=4 is outside 0\.\.3"),
        (lambda mesh: mesh.group_of(-1, "tp"), r"rank=-1 is outside 0\.\.3"),
        (lambda mesh: mesh.rank_at(tp=2), r"tp=2 is outside 0\.\.1"),
        (lambda mesh: mesh.groups("rows"), r"axes=\('rows',\): expected one or more of"),
        (lambda mesh: mesh.groups("cp", "ep"), "expected one or more of"),
        (lambda mesh: mesh.groups(), "expected one or more of"),
    ],
)
def test_mesh_impossible_question_raises(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(Mesh(4, tp=2))
