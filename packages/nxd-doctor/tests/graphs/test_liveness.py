import pytest
from nxd_doctor.graphs import parse_hlo, peak_memory

A = "a = f32[100] parameter(0)"  # 400 bytes


def test_results_are_freed_after_their_last_use(module_of):
    memory = peak_memory(
        module_of(
            A,
            "b = f32[100] negate(a)",
            "c = f32[100] negate(b)",  # b and c are alive
            "d = f32[100] negate(c)",  # b is not any more
            "e = f32[2] slice(d), slice={[0:2]}",
        )
    )

    assert (memory.arguments, memory.peak, memory.temporaries, memory.results) == (400, 1200, 800, 8)


def test_result_used_late_is_alive_until_then(module_of):
    memory = peak_memory(
        module_of(
            A, "b = f32[100] negate(a)", "c = f32[100] negate(b)", "d = f32[100] negate(c)", "e = f32[100] add(b, d)"
        )
    )

    assert memory.temporaries == 1200
    assert memory.peak_at == "d"
    assert {buffer.name for buffer in memory.largest} == {"b", "c", "d"}


def test_results_live_to_the_end(module_of):
    memory = peak_memory(
        module_of(
            A,
            "b = f32[100] negate(a)",  # a result, read by nothing else
            "c = f32[100] negate(a)",
            "d = f32[100] negate(c)",
            "r = (f32[100], f32[100]) tuple(b, d)",
        )
    )

    assert (memory.temporaries, memory.results) == (1200, 800)


@pytest.mark.parametrize(
    "view",
    [
        "v = f32[10,10] bitcast(b)",
        "v = f32[10,10] reshape(b)",
        "v = f32[100] opt-barrier(b)",
    ],
)
def test_views_take_nothing_and_keep_what_they_view(module_of, view):
    shape = "10,10" if "10,10" in view else "100"
    memory = peak_memory(module_of(A, "b = f32[100] negate(a)", view, f"c = f32[{shape}] negate(v)"))

    assert memory.temporaries == 800


@pytest.mark.parametrize(("layout", "temporaries"), [("{0,1}", 800), ("{1,0}", 1200)])
def test_transpose_takes_memory_only_where_it_moves_something(module_of, layout, temporaries):
    memory = peak_memory(
        module_of(
            "a = f32[5,20]{1,0} parameter(0)",
            "b = f32[5,20]{1,0} negate(a)",
            f"t = f32[20,5]{layout} transpose(b), dimensions={{1,0}}",
            "c = f32[20,5]{1,0} negate(t)",
            "r = (f32[5,20]{1,0}, f32[20,5]{1,0}) tuple(b, c)",
        )
    )

    assert memory.temporaries == temporaries


def test_what_is_computed_where_it_is_read_takes_nothing(module_of):
    memory = peak_memory(
        module_of("c = f32[] constant(1)", "b = f32[1000] broadcast(c), dimensions={}", "d = f32[1000] negate(b)")
    )

    assert memory.peak == 4000


def test_elements_of_tuples_live_by_themselves(module_of):
    memory = peak_memory(
        module_of(
            A,
            "b = f32[100] negate(a)",
            "c = f32[100] negate(a)",
            "t = (f32[100], f32[100]) tuple(b, c)",
            "g = f32[100] get-tuple-element(t), index=1",
            "d = f32[100] negate(g)",
        )
    )

    assert memory.temporaries == 800  # in d, b is dead


@pytest.mark.parametrize(("header", "results"), [("", 400), ("input_output_alias={ {0}: (0, {}, may-alias) }", 0)])
def test_donated_argument_is_written_over(module_of, header, results):
    memory = peak_memory(
        module_of(
            A, "b = f32[100] negate(a)", "l = f32[] constant(0)", "r = (f32[100], f32[]) tuple(b, l)", header=header
        )
    )

    assert memory.peak == 400 + results
    assert memory.results == results


def test_updates_in_place_take_each_argument_once(module_of):
    module = module_of(A, "b = f32[100] negate(a)", "c = f32[100] negate(a)", "r = (f32[100], f32[100]) tuple(b, c)")

    assert peak_memory(module).results == 800
    assert peak_memory(module, updates_in_place=True).results == 400


def test_called_computation_adds_its_own_peak_while_it_runs(module_of):
    body = (
        "body {\n  s = f32[100] parameter(0)\n  x = f32[300] broadcast(s), dimensions={0}\n  y = f32[300] negate(x)\n"
        "  ROOT z = f32[100] slice(y), slice={[0:100]}\n}\n"
        "condition {\n  s2 = f32[100] parameter(0)\n  ROOT t = pred[] constant(true)\n}"
    )
    memory = peak_memory(
        module_of(
            A,
            "b = f32[100] negate(a)",
            "w = f32[100] while(b), condition=condition, body=body",
            "e = f32[100] negate(w)",
            before=body,
        )
    )

    assert memory.temporaries == 400 + 1200 + 400
    assert memory.peak_at == "w"


def test_peak_of_a_compiled_step_is_below_what_its_compiler_allocates(compiled_step):
    memory = peak_memory(parse_hlo(compiled_step))

    # As CompiledMemoryStats of jaxlib 0.10.2 told of this module; results have a table of pointers there.
    arguments, results, temporaries = 1016, 892, 1040
    assert memory.arguments == arguments
    assert memory.results == results - 5 * 8
    assert 0.8 * (arguments + results + temporaries) < memory.peak <= arguments + results + temporaries


def test_names_tell_what_the_memory_is_for(torch_xla_step):
    memory = peak_memory(parse_hlo(torch_xla_step), updates_in_place=True, largest=3)

    assert memory.results == 4  # the loss: weights are written over
    assert len(memory.largest) == 3
    assert memory.largest[0].place.startswith("0.")
