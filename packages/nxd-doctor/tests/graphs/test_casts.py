from nxd_doctor.graphs import Cast, find_casts, parse_hlo


def test_casts_of_a_step_are_summed_by_place_largest_first(torch_xla_step):
    casts = find_casts(parse_hlo(torch_xla_step))

    assert Cast("f32", "bf16", "0.up", 2, (5 * 8 + 16 * 8) * 2) in casts
    assert Cast("bf16", "f32", "0.up", 1, 16 * 8 * 4) in casts
    assert [cast.num_bytes for cast in casts] == sorted((cast.num_bytes for cast in casts), reverse=True)


def test_scalars_and_casts_to_the_same_type_do_not_count(module_of):
    module = module_of(
        "a = s32[] parameter(0)",
        "b = f32[] convert(a)",
        "c = f32[4] broadcast(b), dimensions={}",
        "d = f32[4] convert(c)",
    )

    assert find_casts(module) == []
