"""`nxd train` of a Mixtral whose routers are trained to be even: losses and loads of one process at other layouts."""

import json

import pytest
from nxd_trainer.report import read_records
from runs_by_hand import SIZES, train_in_float64

pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")

STEPS = 3
LAYOUTS = {
    "EP 2 + ZeRO-1": (2, ["parallel.expert_parallel_size=2", "parallel.zero_stage=1"]),
    "EP 2 x PP 2, recomputed": (
        4,
        [
            "parallel.expert_parallel_size=2",
            "parallel.pipeline_parallel_size=2",
            "train.gradient_accumulation_steps=2",
            "parallel.activation_checkpointing=full",
        ],
    ),
}


def settings_of(folder, *further):
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return [
        *(f"model.{name}={size}" for name, size in sizes.items()),
        "model.type=mixtral",
        "model.config.num_local_experts=4",
        f"output={folder}",
        f"data.path={json.__path__[0]}",
        f"data.cache_folder={folder.parent / 'tokens'}",
        "data.suffixes=.py",
        "data.sequence_length=24",
        "train.dtype=float64",
        f"train.steps={STEPS}",
        "train.global_batch_size=4",
        "train.log_every=1",
        "train.eval_every=0",
        "checkpoint.save_every=0",
        *further,
    ]


@pytest.mark.parametrize("layout", ["EP 2 + ZeRO-1", pytest.param("EP 2 x PP 2, recomputed", marks=pytest.mark.slow)])
def test_losses_and_loads_of_experts_are_those_of_one_process(run_ranks, tmp_path, layout):
    ranks, degrees = LAYOUTS[layout]
    asked = ["model.config.output_router_logits=true", "model.config.router_aux_loss_coef=0.5", "moe.z_loss_coef=0.01"]

    run_ranks(train_in_float64, 1, settings_of(tmp_path / "one", *asked))
    run_ranks(train_in_float64, ranks, settings_of(tmp_path / "many", *asked, *degrees))

    expected, found = (read_records(tmp_path / name / "metrics.jsonl") for name in ("one", "many"))
    assert len(found) == STEPS
    for one, many in zip(expected, found, strict=True):
        for name in ("loss", "aux_loss", "z_loss", "grad_norm", "busiest_expert"):
            assert getattr(many, name) == pytest.approx(getattr(one, name), rel=1e-10, abs=0), name
        assert many.tokens_per_expert == one.tokens_per_expert
        assert [sum(layer) for layer in one.tokens_per_expert] == [4 * 24 * 2] * SIZES["num_hidden_layers"]
        assert one.aux_loss > 0.5
    assert "Tokens per expert in step" in (tmp_path / "many/report.html").read_text()


def test_models_of_transformers_without_experts_or_biases_refuse_the_keys(run_ranks, tmp_path):
    with pytest.raises(RuntimeError, match=r"moe.bias_update_rate=0.1 needs routers with an e_score"):
        run_ranks(train_in_float64, 1, settings_of(tmp_path / "run", "moe.bias_update_rate=0.1"))
    llama = [it for it in settings_of(tmp_path / "other", "moe.z_loss_coef=0.1") if "num_local_experts" not in it]
    with pytest.raises(RuntimeError, match=r"moe.z_loss_coef=0.1 needs a model with supported routers"):
        run_ranks(train_in_float64, 1, ["model.type=llama" if it == "model.type=mixtral" else it for it in llama])
