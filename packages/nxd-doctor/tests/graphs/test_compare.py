import pytest
from nxd_doctor.graphs import first_difference, parse_hlo

SUM = "add {\n  x = f32[] parameter(0)\n  y = f32[] parameter(1)\n  ROOT z = f32[] add(x, y)\n}"
LINES = [
    "p = f32[8] parameter(0)",
    'k = f32[] constant(3), metadata={op_name="layers.0.1/aten__mul"}',
    "b = f32[8] broadcast(k), dimensions={}",
    "m = f32[8] multiply(p, b)",
    "r = f32[8] all-reduce(m), replica_groups={{0,1},{2,3}}, to_apply=add",
]


def test_graphs_that_differ_in_names_and_metadata_are_the_same(torch_xla_step):
    renamed = (
        torch_xla_step.replace("convert.", "cast.").replace("IrToHlo.75", "IrToHlo.99").replace("linear.py", "x.py")
    )

    assert renamed != torch_xla_step
    assert first_difference(parse_hlo(torch_xla_step), parse_hlo(renamed)) is None


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        (
            {0: "p = f32[6] parameter(0)"},
            "parameter",
            "argument 0 is f32[8] in rank 0 and f32[6] in rank 1 (p): a tensor",
        ),
        (
            {1: "k = f32[] constant(5)"},
            "constant",
            "instruction 2 of 5 (layers.0): constant f32[] 3 in rank 0, f32[] 5 in rank 1",
        ),
        ({3: "m = f32[8] add(p, b)"}, "operation", "(m): operation multiply f32[8] in rank 0, add f32[8] in rank 1"),
        (
            {3: "m = f32[8] multiply(b, p)"},
            "operands",
            "operands multiply of p, b in rank 0, multiply of b, p in rank 1",
        ),
        ({2: "b = bf16[8] broadcast(k), dimensions={}"}, "shape", "broadcast f32[8] in rank 0, broadcast bf16[8] in"),
        (
            {4: "r = f32[8] all-reduce(m), replica_groups={{0,2},{1,3}}, to_apply=add"},
            "replica groups",
            "(r): replica groups {{0,1},{2,3}} in rank 0, {{0,2},{1,3}} in rank 1",
        ),
        (
            {4: "r = f32[8] all-reduce(m), channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true"},
            "replica groups",
            "(r): replica groups {{0,1},{2,3}} in rank 0, {{0,2},{1,3}} in rank 1",
        ),
        (
            {2: "b = f32[8] broadcast(k), dimensions={}, sharding={replicated}"},
            "attribute",
            "broadcast f32[8] with dimensions={} in rank 0, broadcast f32[8] with dimensions={}, sharding={replicated}",
        ),
    ],
)
def test_first_difference_is_told_in_words(module_of, changed, kind, words):
    other = [changed.get(number, line) for number, line in enumerate(LINES)]

    found = first_difference(module_of(*LINES, before=SUM), module_of(*other, before=SUM), names=("rank 0", "rank 1"))

    assert found is not None
    assert found.kind == kind
    assert words in str(found)


def test_argument_that_is_a_constant_elsewhere_is_told(module_of):
    left = module_of(*LINES, before=SUM)
    right = module_of(*LINES[:1], "k = f32[] parameter(1)", *LINES[2:], before=SUM)

    found = first_difference(left, right)

    assert found is not None
    assert str(found).startswith("1 arguments in the first and 2 in the second; the first that differs is f32[] (k)")
    assert "data in one and a constant in the other" in str(found)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_further_instructions_are_told(names):
    lines = "  ROOT p = f32[2] parameter(0)\n"
    sides = {"a": lines, "b": f"{lines}  q = f32[2] negate(p)\n"}
    left, right = (parse_hlo(f"HloModule m\n\nENTRY e {{\n{sides[name]}}}\n") for name in names)

    found = first_difference(left, right, names=names)

    assert found is not None
    assert found.kind == "length"
    assert "1 in a" in str(found).replace("instructions ", "")
    assert "the first that only b has is negate f32[2] (q)" in str(found)


def test_difference_in_a_called_computation_is_found(module_of):
    left, right = module_of(*LINES, before=SUM), module_of(*LINES, before=SUM.replace("add(x, y)", "maximum(x, y)"))

    found = first_difference(left, right)

    assert found is not None
    assert found.kind == "operation"
    assert "add f32[] in the first, maximum f32[] in the second" in str(found)


def test_function_that_one_graph_calls_twice_is_compared_with_each_of_the_others(module_of):
    functions = [SUM, SUM.replace("add {", "max {").replace("add(x, y)", "maximum(x, y)")]
    outer = "outer {{\n  v = f32[8] parameter(0)\n  ROOT w = f32[8] all-reduce(v), to_apply={}\n}}"
    lines = [LINES[0], "a = f32[8] all-reduce(p), to_apply=add", "b = f32[8] call(a), to_apply=outer"]
    left, right = (
        module_of(*lines, before="\n".join([*functions, outer.format(applied)])) for applied in ("add", "max")
    )

    found = first_difference(left, right)

    assert found is not None
    assert "operation add f32[] in the first, maximum f32[] in the second" in str(found)
