import pytest
from nxd_doctor.graphs import find_collectives, total_bytes
from nxd_doctor.graphs.operations import replica_groups

SUM = "add {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n  ROOT z = f32[] add(x, y)\n}"
PARAMETER = "p = f32[8,16] parameter(0)"  # 512 bytes


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("f32[8,16] all-reduce(p), replica_groups={{0,1,2,3}}, to_apply=add", 2 * 512 * 3 // 4),
        ("f32[32,16] all-gather(p), replica_groups={{0,1,2,3}}, dimensions={0}", 512 * 3),
        ("f32[2,16] reduce-scatter(p), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=add", 512 * 3 // 4),
        ("f32[8,16] all-to-all(p), replica_groups={{0,1,2,3}}, dimensions={0}", 512 * 3 // 4),
        ("f32[8,16] collective-permute(p), source_target_pairs={{0,1},{1,2}}", 512),
        ("f32[8,16] collective-permute(p), source_target_pairs={{0,0},{1,1}}", 0),
        ("f32[8,16] collective-broadcast(p), replica_groups={{0,1}}", 512),
        ("f32[8,16] all-reduce(p), replica_groups={{0},{1}}, to_apply=add", 0),
        ("f32[8,16] all-reduce(p), replica_groups=[2,4]<=[8], to_apply=add", 2 * 512 * 3 // 4),
        ("(f32[8,16], f32[32,16]) all-gather-start(p), replica_groups={{0,1,2,3}}, dimensions={0}", 512 * 3),
    ],
)
def test_bytes_sent_are_those_of_a_ring(module_of, line, sent):
    [found] = find_collectives(module_of(PARAMETER, f"c = {line}", before=SUM))

    assert found.bytes_sent == found.step_bytes == sent
    assert found.shapes == ("f32[8,16]",)
    assert found.dtype == "f32"


def test_tensors_that_travel_together_are_one_collective(module_of):
    [found] = find_collectives(
        module_of(
            PARAMETER,
            "q = bf16[6] parameter(1)",
            "c = (f32[8,16], bf16[6]) all-reduce(p, q), replica_groups={{0,1},{2,3}}, to_apply=add",
            before=SUM,
        )
    )

    assert (found.dtype, found.shapes) == ("f32+bf16", ("f32[8,16]", "bf16[6]"))
    assert found.groups == ((0, 1), (2, 3))
    assert found.bytes_sent == 512 + 12


def test_scalar_that_travels_along_does_not_count_but_one_alone_does(module_of):
    along, alone = find_collectives(
        module_of(
            PARAMETER,
            "t = f32[] parameter(1)",
            "c = (f32[8,16], f32[]) all-reduce(p, t), replica_groups={{0,1}}, to_apply=add",
            "d = f32[] all-reduce(t), replica_groups={{0,1}}, to_apply=add",
            before=SUM,
        )
    )

    assert (along.shapes, along.bytes_sent) == (("f32[8,16]",), 512)
    assert (alone.shapes, alone.bytes_sent) == (("f32[]",), 4)


def test_collectives_in_a_loop_count_as_often_as_it_runs(module_of):
    body = SUM + (
        "\n\nbody {\n  s = f32[8,16] parameter(0)\n"
        "  ROOT r = f32[8,16] all-reduce(s), replica_groups={{0,1}}, to_apply=add\n}\n"
        "condition {\n  s2 = f32[8,16] parameter(0)\n  ROOT t = pred[] constant(true)\n}"
    )
    loop = 'w = f32[8,16] while(p), condition=condition, body=body, backend_config={"known_trip_count":{"n":"7"}}'
    module = module_of(PARAMETER, loop, before=body)

    [found] = find_collectives(module)

    assert (found.runs, found.step_bytes) == (7, 7 * 512)
    assert total_bytes([found, found]) == {"all-reduce": 14 * 512}


@pytest.mark.parametrize("header", ["replica_count=8", "replica_count=4, num_partitions=2"])
def test_collective_without_groups_is_over_all_ranks_of_the_header(module_of, header):
    line = "c = f32[8,16] all-reduce(p), replica_groups={}, to_apply=add"

    [found] = find_collectives(module_of(PARAMETER, line, before=SUM, header=header))

    assert found.groups == (tuple(range(8)),)


def test_collective_over_all_ranks_needs_the_world_size(module_of):
    module = module_of(PARAMETER, "c = f32[8,16] all-reduce(p), replica_groups={}, to_apply=add", before=SUM)

    with pytest.raises(ValueError, match=r"c is over all ranks.*pass world_size"):
        find_collectives(module)
    assert find_collectives(module, world_size=2)[0].bytes_sent == 512


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}", ()),
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("[4,2]<=[2,2,2]T(2,0,1)", ((0, 2), (4, 6), (1, 3), (5, 7))),
    ],
)
def test_replica_groups_are_read_in_all_forms(text, groups):
    assert replica_groups(text) == groups


def test_collective_that_an_asynchronous_call_runs_counts_once(module_of):
    wrapped = (
        "wrapped {\n  x = f32[8,16] parameter(0)\n"
        "  ROOT y = f32[2,16] reduce-scatter(x), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=add\n}"
    )
    [found] = find_collectives(
        module_of(
            PARAMETER,
            "s = ((f32[8,16]), f32[2,16]) async-start(p), calls=wrapped",
            "u = ((f32[8,16]), f32[2,16]) async-update(s), calls=wrapped",
            "d = f32[2,16] async-done(u), calls=wrapped",
            before=f"{SUM}\n{wrapped}",
        )
    )

    assert (found.kind, found.runs) == ("reduce-scatter", 1)
