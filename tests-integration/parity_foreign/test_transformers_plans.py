"""transformers' own tensor and expert parallelism, and its FSDP2: types that are right, and those known to be wrong."""

import pytest
from foreign_programs import transformers_plans
from foreign_programs.cases import DTYPES

TENSOR = {"tp_size": 2, "tp_plan": "auto"}
RIGHT = [
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "qwen3_moe", "mixtral", "granite", "olmo2"),
    *("cohere2", "starcoder2"),
]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """A function that saves a tiny model of a type, once."""
    folder = tmp_path_factory.mktemp("models")
    return lambda model_type: transformers_plans.save(model_type, folder)


def slow_but(quick):
    return lambda name: name if name in quick else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [*map(slow_but(["float64"]), DTYPES)])
@pytest.mark.parametrize("model_type", [*map(slow_but(["llama"]), RIGHT)])
def test_right_type_agrees(compared, folder_of, model_type, dtype):
    folder = folder_of(model_type)

    report = compared(
        transformers_plans.train, 2, DTYPES[dtype], reference={"folder": folder}, folder=folder, sizes=TENSOR
    )

    assert report.agrees, str(report)
    assert report.agree["gradient"] > 0
    assert all(".experts." in it for it in report.not_compared)  # columns of the tokens that an expert got


COMBINED = {
    "experts": (2, "qwen3_moe", {"tp_size": 2, "ep_size": 2}),
    "fsdp": (2, "qwen3", {"fsdp_size": 2}),
    "hsdp": (4, "llama", {"fsdp_size": 2, "dp_replicate_size": 2}),
    "tensor-and-fsdp": (4, "llama", {"tp_size": 2, "fsdp_size": 2}),
    "experts-split-and-fsdp": (4, "mixtral", {"tp_size": 2, "fsdp_size": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", COMBINED)
def test_combined_layout_agrees(compared, folder_of, layout):
    ranks, model_type, sizes = COMBINED[layout]
    folder = folder_of(model_type)

    report = compared(transformers_plans.train, ranks, reference={"folder": folder}, folder=folder, sizes=sizes)

    assert report.agrees, str(report)


WRONG = {
    # the activation's own parameters are whole on each rank, which sees its columns only
    "apertus": (TENSOR, (1, "gradient", "model.layers.1.mlp.act_fn.alpha_n", "missing sum")),
    # the rows that a rank loads of fused matrices are cut before the matrices are taken apart
    "hrm_text": (TENSOR, (0, "parameter", "model.L_module.layers.0.self_attn.q_proj.weight", "wrong shard or order")),
    "inkling2_text": (TENSOR, (0, "parameter", "model.layers.0.mlp.experts.gate_up_proj", "wrong shard or order")),
    # the gradients of experts on data-parallel ranks are divided by the number of ranks twice
    "qwen3_moe": (
        {"fsdp_size": 2, "ep_size": 2},
        (1, "gradient", "model.layers.1.mlp.experts.down_proj", "scaled"),
    ),
}


@pytest.mark.parametrize("model_type", [*map(slow_but(["apertus"]), WRONG)])
def test_wrong_type_is_located(compared, folder_of, model_type):
    sizes, expected = WRONG[model_type]
    folder = folder_of(model_type)

    report = compared(transformers_plans.train, 2, reference={"folder": folder}, folder=folder, sizes=sizes)

    first = report.first
    assert first is not None
    assert (first.step, first.kind, first.name, first.fault) == expected
