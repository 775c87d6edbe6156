import pytest
from nxd_doctor.graphs import parse_hlo


def test_graph_of_torch_xla_is_read_with_arguments_results_and_names(torch_xla_step):
    module = parse_hlo(torch_xla_step)

    assert [str(parameter.shape) for parameter in module.parameters] == [
        *("f32[8,16]", "f32[16,8]", "f32[5,8]"),
        *("f32[]", "f32[]", "f32[]"),
    ]
    assert str(module.main.root.shape) == "(f32[], f32[16,8], f32[8,16])"
    dots = [item for item in module.main.instructions if item.opcode == "dot"]
    assert [dot.module_path for dot in dots] == ["0.up", "0.down", "0.down", "0.up", "0.down"]
    assert dots[0].source == "linear.py:134"
    assert dots[0].operands == ("convert.9", "transpose.7")


def test_graph_of_the_compiler_is_read_with_its_fusions(compiled_step):
    module = parse_hlo(compiled_step)

    fusions = [item for item in module.main.instructions if item.opcode == "fusion"]
    assert module.attributes["is_scheduled"] == "true"
    assert len(fusions) == 11
    assert all(item.called[0] in module.computations for item in fusions)


@pytest.mark.parametrize(
    ("metadata", "place"),
    [
        ('op_type="aten__mm" op_name="mlp.3/aten__mm" source_file="/me/a.py" source_line=2', "mlp"),
        ('op_type="aten__mm" op_name="aten__mm" source_file="/me/a.py" source_line=2', "/me/a.py:2"),
        ('op_type="aten__mm" op_name="aten__mm" source_file="/v/torch/nn/functional.py" source_line=2', "aten::mm"),
        ('op_name="x"', "a"),
    ],
)
def test_place_is_the_best_that_is_known(module_of, metadata, place):
    assert module_of(f"a = f32[2] parameter(0), metadata={{{metadata}}}").main.root.place == place


def test_op_names_lose_torch_xlas_numbers_and_operations_that_are_scopes(module_of):
    module = module_of(
        'a = f32[2] parameter(0), metadata={op_type="t" op_name="model.1/layers.0.22/mlp.3/aten__gelu.5/aten__mul"}'
    )

    assert module.main.root.module_path == "model.layers.0.mlp"
    assert module.main.root.place == "model.layers.0.mlp"


@pytest.mark.parametrize(
    ("shape", "shown", "num_bytes"),
    [
        ("f32[]", "f32[]", 4),
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", "bf16[3,5]", 30),
        ("pred[7]{0}", "pred[7]", 7),
        ("s4[7]", "s4[7]", 4),
        ("f8e4m3fn[3]", "f8e4m3fn[3]", 3),
        ("f32[<=4,2]", "f32[4,2]", 32),
        ("f32[0,4]", "f32[0,4]", 0),
        ("token[]", "token[]", 0),
        ("(f32[2]{0}, /*index=1*/(s32[], c64[2]))", "(f32[2], (s32[], c64[2]))", 28),
    ],
)
def test_shapes_know_their_bytes(module_of, shape, shown, num_bytes):
    root = module_of(f"a = {shape} parameter(0)").main.root

    assert str(root.shape) == shown
    assert root.shape.num_bytes == num_bytes


def test_constants_over_several_lines_and_brackets_in_quotations_are_read(module_of):
    module = module_of(
        "c = s32[2,2] constant({\n { 1, 2 },\n { 3, 4 }\n })",
        'd = s32[2] custom-call(c), custom_call_target="a(b{", backend_config="{\\"x\\": [1}", metadata={op_name="n"}',
    )

    assert module.main.by_name["c"].literal == "{ { 1, 2 }, { 3, 4 } }"
    assert module.main.root.operands == ("c",)
    assert module.main.root.attributes["custom_call_target"] == '"a(b{"'


def test_root_need_not_be_the_last_instruction():
    module = parse_hlo("HloModule m\n\nENTRY e {\n  ROOT p = f32[2] parameter(0)\n  q = f32[2] negate(p)\n}\n")

    assert module.main.root.name == "p"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module @main {", 'no line begins with "HloModule"'),
        ("HloModule a\n\nENTRY main {\n  a = f32[2] parameter(0)\n", "is the dump cut off"),
        ("HloModule a\n\nENTRY main {\n  what is this\n}\n", "not an HLO instruction: 'what is this'"),
        ("HloModule a\n\nENTRY main {\n  a = f99[2] parameter(0)\n}\n", "element type 'f99'"),
    ],
)
def test_text_that_is_no_hlo_is_refused_with_the_line(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_hlo(text)
