"""`nxd parity --hf FOLDER`: an architecture that nobody has compared yet is compared by its user, and let through."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

transformers = pytest.importorskip("transformers")

WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
LARGE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForSequenceClassification"],
    "hidden_size": 5120,
    "num_hidden_layers": 12,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "layer_types": WINDOWS * 2,
    "use_sliding_window": True,
    "sliding_window": 1024,
    "attention_dropout": 0.1,
    "torch_dtype": "bfloat16",
}


SEEING = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}


@pytest.fixture
def folder_with(tmp_path):
    """Makes a folder with a `config.json`."""

    def make(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """The folder in which what has been compared is remembered."""
    monkeypatch.setenv("NXD_COMPARED_MODELS", str(tmp_path / "compared"))
    return tmp_path / "compared"


def nxd_parity(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "nxd_cli", "parity", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


class TestCommand:
    """Whole runs of `nxd parity`, one of them a day."""

    pytestmark = pytest.mark.sample(1)

    def test_equal_architecture_is_remembered(self, folder_with, remembered):
        ended = nxd_parity("--hf", folder_with(**LARGE), "head_dim=16")

        assert ended.returncode == 0, ended.stderr
        (record,) = remembered.iterdir()
        lines = ended.stdout.splitlines()  # among those of gloo
        assert "TP 2 x DP 1 (2 ranks) against one process (float64, tolerance 1e-10), 2 steps" in lines
        assert any(line.endswith("agree") for line in lines)
        assert f"Models of type 'qwen3' are split by their own plan from now on: {record}" in lines

    @pytest.mark.slow
    def test_equal_within_a_wide_tolerance_is_not_remembered(self, folder_with, remembered):
        ended = nxd_parity(
            "--hf", folder_with(**LARGE), "--rtol", "0.5", "num_hidden_layers=1", 'layer_types=["full_attention"]'
        )

        assert ended.returncode == 0, ended.stderr
        assert "The result was not recorded: that needs float64 and a tolerance of 1e-10 or less\n" in ended.stdout
        assert not remembered.exists()


def test_plan_that_forgets_a_gradient_differs(run_ranks, folder_with):
    folder = folder_with(model_type="apertus")

    def job():
        from nxd_layers import hf
        from nxd_trainer.parity import compare
        from nxd_trainer.parity.architecture import case_of_architecture

        case = case_of_architecture(folder, {}, 2)
        own_plan = case.reference_fn().config.base_model_tp_plan
        plan = {f"model.{name}": style for name, style in own_plan.items()}
        # The learned activation sees this rank's columns only; a style of its own is taken at its word.
        plan["model.layers.*.mlp.act_fn"] = "local_params"
        return compare(case), compare(replace(case, model_fn=lambda: hf.parallelize(case.reference_fn(), plan=plan)))

    corrected, wrong = run_ranks(job, 2)[0]

    assert corrected.agrees
    assert wrong.first.kind == "gradient"
    assert (wrong.first.name.rpartition(".")[0], wrong.first.fault) == ("model.layers.3.mlp.act_fn", "missing sum")


NEW_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class NewConfig(LlamaConfig):
    model_type = "new_llama"

class NewForCausalLM(LlamaForCausalLM):
    config_class = NewConfig

class OtherConfig(NewConfig):
    base_model_tp_plan = {**NewConfig.base_model_tp_plan, "layers.*.mlp.act_fn": "local_params"}
"""


def test_type_that_nobody_has_compared_is_let_through_once_remembered(run_ranks, remembered, tmp_path, monkeypatch):
    (tmp_path / "new_llama.py").write_text(NEW_MODEL)
    monkeypatch.syspath_prepend(tmp_path)

    def job():
        from new_llama import NewConfig, NewForCausalLM, OtherConfig
        from nxd_layers.hf import parallelize, remember_as_compared
        from nxd_state import barrier, get_world_group, initialize_model_parallel

        initialize_model_parallel(2)
        sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        model = NewForCausalLM(NewConfig(**sizes, **heads))
        with pytest.raises(ValueError, match=r"'new_llama' are not split by their own plan: .* nxd parity --hf FOLDER"):
            parallelize(model)
        barrier(get_world_group())
        remember_as_compared(model)
        with pytest.raises(ValueError, match=r"'new_llama' are not split by their own plan"):
            parallelize(NewForCausalLM(OtherConfig(**sizes, **heads)))
        parallelize(model)
        return tuple(model.model.layers[0].mlp.up_proj.weight.shape)

    assert run_ranks(job, 2, env={"NXD_COMPARED_MODELS": str(remembered)}) == [(4, 8)] * 2
    assert [path.name.startswith("new_llama-") for path in remembered.iterdir()] == [True]


def test_small_config_keeps_every_kind_of_layer_and_what_is_no_size():
    from nxd_trainer.parity.architecture import small_config

    small = small_config({**LARGE, "tie_word_embeddings": True})

    assert small["architectures"] == ["Qwen3ForCausalLM"]
    assert small["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    assert (small["num_hidden_layers"], small["num_attention_heads"], small["num_key_value_heads"]) == (4, 4, 2)
    assert (small["sliding_window"], small["attention_dropout"], small["tie_word_embeddings"]) == (4, 0.0, True)
    kinds = [["a", 1], ["a", 1], ["b", 1], ["b", 2], ["c", 1], ["d", 1]]
    more = small_config({**LARGE, "num_hidden_layers": 6, "layer_types": None, "own_kinds": kinds})
    assert (more["num_hidden_layers"], more["own_kinds"]) == (5, kinds[1:])
    assert small_config({**LARGE, "num_key_value_heads": 64})["num_key_value_heads"] == 4
    assert small_config({**LARGE, "num_key_value_heads": 1})["num_key_value_heads"] == 1


def test_a_multimodal_architecture_of_a_large_size_becomes_small_without_its_towers(folder_with):
    from nxd_trainer.parity.architecture import case_of_architecture

    case = case_of_architecture(folder_with(**SEEING), {"intermediate_size": 40}, 2)

    model = case.reference_fn()
    assert model.model.language_model.layers[3].mlp.up_proj.weight.shape == (40, 32)
    assert not any("visual" in name for name, _ in model.named_parameters())
    assert model(**case.batches[0]).loss.isfinite()


@pytest.mark.parametrize(
    ("config", "changes", "ranks", "message"),
    [
        (LARGE, {}, 1, "a single rank cannot split the model; use 2 or more"),
        (LARGE, {"head_dims": 16}, 2, r"head_dims is not a key of Qwen3Config; did you mean head_dim\?"),
        (LARGE, {"num_key_value_heads": 3}, 2, "the small model of type qwen3 cannot be made or run: .*head_dim=16"),
        (LARGE | {"auto_map": {"AutoModel": "code.Model"}}, {}, 2, "Python code beside the weights .auto_map."),
        ({"model_type": "glm4v"}, {}, 2, "model.type=glm4v is not a language model in transformers"),
        (SEEING, {"vision_config": {}}, 2, "vision_config is not a key of Qwen2_5_VLTextConfig"),
        ({"model_type": "biogpt"}, {}, 2, "biogpt have no tensor-parallel plan"),
        ({"model_type": "t5"}, {}, 2, "model.type=t5 is not a language model in transformers"),
        ({"hidden_size": 8}, {}, 2, "model.type=None is not a language model"),
    ],
)
def test_architecture_that_cannot_be_compared_is_refused(folder_with, config, changes, ranks, message):
    from nxd_trainer.parity.architecture import case_of_architecture

    with pytest.raises(ValueError, match=message):
        case_of_architecture(folder_with(**config), changes, ranks)
