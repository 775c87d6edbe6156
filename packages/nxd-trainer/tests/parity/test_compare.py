"""`compare` agrees where a layout is right, and names the tensor where a fault was planted."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_layers import ColumnParallelLinear, RowParallelLinear
from nxd_lora import LoraConfig
from nxd_parity import compare as compare_recordings
from nxd_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_size
from nxd_trainer.parity import ParityCase, compare
from nxd_trainer.parity.layout import LayoutRun
from torch import nn

SIZES = LlamaConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
PIPELINE = {
    "num_microbatches": 2,
    "transformer_layer_cls": LlamaDecoderLayer,
    "auto_partition": True,
    "input_names": ["input_ids", "labels"],
}


def llama() -> nn.Module:
    return LlamaForCausalLM(SIZES, sequence_parallel=get_tensor_model_parallel_size() > 1)


def tied_llama() -> nn.Module:
    return LlamaForCausalLM(replace(SIZES, tie_word_embeddings=True))


def llama_with_a_norm_that_is_not_summed() -> nn.Module:
    model = llama()
    model.model.layers[1].input_layernorm.weight.sequence_parallel_enabled = False
    return model


class ForgetsToReduce(nn.Module):
    """A block whose second layer leaves the ranks' partial sums as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, gather_output=False)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(nn.functional.linear(self.up(x), self.down.weight))


class WithBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.block = ForgetsToReduce()
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.block(self.first(x))).square().mean()


class TakesANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 1)

    def forward(self, x, scale):
        return (self.first(x) * scale).mean()


class FollowsItsRank(nn.Module):
    """Its weights depend on the layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 1)
        with torch.no_grad():
            self.first.bias.fill_(float(get_tensor_model_parallel_size()))

    def forward(self, x):
        return self.first(x).mean()


class LosesItsOwn(nn.Module):
    """Tensor-parallel ranks have losses of their own, whose mean is right."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 1)

    def forward(self, x):
        apart = 2.0 * get_tensor_model_parallel_rank() - (get_tensor_model_parallel_size() - 1)
        return self.first(x).mean() + apart


def tokens(steps: int = 2) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(0, 48, (steps, 8, 9), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": step[:, :-1], "labels": step[:, 1:]} for step in drawn]


def numbers() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.linspace(-1, 1, 24).view(4, 2, 3)}]


TWO_RANKS = {
    "replicas with ZeRO-1": ParityCase(
        model_fn=llama, batches=tokens(), nxd_config={"optimizer_config": {"zero_one_enabled": True}}
    ),
    "sequence parallel, recomputed": ParityCase(
        model_fn=llama,
        batches=tokens(),
        nxd_config={
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "activation_checkpoint_config": "full",
            "optimizer_config": {"grad_clipping": False},
        },
    ),
    "tied stages": ParityCase(
        model_fn=tied_llama, batches=tokens(), nxd_config={"pipeline_parallel_size": 2, "pipeline_config": PIPELINE}
    ),
    "adapters": ParityCase(
        model_fn=llama,
        batches=tokens(),
        nxd_config={
            "tensor_parallel_size": 2,
            "lora_config": LoraConfig(target_modules=["q_proj", "down_proj"], lora_rank=2, lora_dropout=0.5),
        },
    ),
}


def test_right_layouts_agree(run_ranks):
    first, second = run_ranks(lambda: {name: compare(case) for name, case in TWO_RANKS.items()}, 2)

    for name in TWO_RANKS:
        assert first[name].agrees, f"{name}: {first[name]}"
        assert first[name] == second[name]
        assert first[name].steps == 2
        assert {"activation", "loss", "gradient", "optimizer state", "parameter"} <= first[name].agree.keys()
    whole = first["sequence parallel, recomputed"].agree
    assert whole["gradient"] == 2 * len(list(LlamaForCausalLM(SIZES).parameters()))
    assert whole["optimizer state"] == 3 * whole["gradient"]


def test_context_parallel_layout_agrees(run_ranks):
    case = ParityCase(model_fn=llama, batches=tokens(1), nxd_config={"context_parallel_size": 2})

    report = run_ranks(compare, 2, case)[0]

    assert report.agrees, report
    assert report.agree["activation"] > 20


@pytest.mark.parametrize("model_fn", [llama, llama_with_a_norm_that_is_not_summed], ids=["right", "sum is missing"])
def test_in_bfloat16_differences_within_rounding_noise_agree(run_ranks, model_fn):
    config = {"tensor_parallel_size": 2, "sequence_parallel": True}
    case = ParityCase(model_fn=model_fn, batches=tokens(1), nxd_config=config)

    report = run_ranks(lambda: compare(case, dtype=torch.bfloat16), 2)[0]

    assert report.agrees == (model_fn is llama), report
    assert report.agrees or report.first.name == "model.layers.1.input_layernorm.weight"
    assert report.reference == "one process (bfloat16, rounding noise)"


RESUMED = ParityCase(
    model_fn=llama,
    batches=tokens(3),
    nxd_config={
        "pipeline_parallel_size": 2,
        "pipeline_config": PIPELINE,
        "optimizer_config": {"zero_one_enabled": True},
    },
)


def test_steps_after_a_checkpoint_was_loaded_at_the_layout_agree(run_ranks):
    report = run_ranks(lambda: compare(RESUMED, resume_at=2), 2)[0]

    assert report.agrees, report
    assert report.steps == 1
    assert report.agree["optimizer state"] == 2 * 3 * report.agree["gradient"]  # as they were loaded, and stepped
    assert "resumed from a checkpoint of 2 replicas after step 2" in str(report)


def test_optimizer_state_that_is_loaded_wrong_is_found_before_the_first_step(run_ranks):
    def forgets():
        def load(run, folder):
            load_whole(run, folder)
            for state in run.optimizer.optimizer.base_optimizer.state.values():
                state["exp_avg"].zero_()

        load_whole = LayoutRun.load
        with patch.object(LayoutRun, "load", load):
            return compare(RESUMED, resume_at=2)

    found = run_ranks(forgets, 2)[0].first

    assert (found.step, found.kind) == (0, "optimizer state")
    assert found.shown_in.endswith("/exp_avg")


def test_compiled_layers_are_compared_by_what_is_around_them(run_ranks):
    def compile_layers(model):
        for layer in model.local_module().model.layers:
            layer.compile(backend="eager")

    case = ParityCase(model_fn=llama, batches=tokens(1), nxd_config={"tensor_parallel_size": 2}, prepare=compile_layers)

    report = run_ranks(compare, 2, case)[0]

    assert report.agrees, report
    assert report.agree["gradient"] == len(list(LlamaForCausalLM(SIZES).parameters()))
    assert "modules inside 2 compiled ones, such as model.layers.0, cannot be seen" in str(report)


def test_recordings_are_kept_in_a_folder_that_is_given(run_ranks, tmp_path):
    case = ParityCase(model_fn=TakesANumber, batches=[numbers()[0] | {"scale": torch.tensor(2.0)}], nxd_config={})

    run_ranks(lambda: compare(case, folder=tmp_path / "kept"), 2)

    assert {it.name for it in (tmp_path / "kept").iterdir()} == {"one-process", "layout"}
    assert compare_recordings(tmp_path / "kept/one-process", tmp_path / "kept/layout").agrees


def test_input_without_a_batch_goes_to_every_replica(run_ranks):
    batches = [step | {"scale": torch.tensor(2.0)} for step in numbers()]
    case = ParityCase(model_fn=TakesANumber, batches=batches, nxd_config={})

    for report in run_ranks(lambda: compare(case), 2):
        assert report.agrees, report


@pytest.mark.slow
def test_a_layout_with_every_axis_agrees(run_ranks):
    case = ParityCase(
        model_fn=llama,
        batches=tokens(),
        nxd_config={
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "pipeline_config": PIPELINE,
            "sequence_parallel": True,
            "optimizer_config": {"zero_one_enabled": True},
        },
    )

    reports = run_ranks(lambda: compare(case), 8)

    assert reports[0].agrees, reports[0]
    assert reports[0].candidate == "TP 2 + SP x PP 2 x DP 2"


FAULTS = {
    "gradient that is not summed": (
        ParityCase(
            model_fn=llama_with_a_norm_that_is_not_summed,
            batches=tokens(),
            nxd_config={"tensor_parallel_size": 2, "sequence_parallel": True},
        ),
        ("gradient", "model.layers.1.input_layernorm.weight", "missing sum"),
    ),
    "output that is not summed": (
        ParityCase(model_fn=WithBlock, batches=numbers(), nxd_config={"tensor_parallel_size": 2}),
        ("input", "block", "missing sum"),
    ),
    "weights that depend on the layout": (
        ParityCase(model_fn=FollowsItsRank, batches=numbers(), nxd_config={"tensor_parallel_size": 2}),
        ("parameter", "first.bias", "different values"),
    ),
    "losses that differ between the ranks of a layer": (
        ParityCase(model_fn=LosesItsOwn, batches=numbers(), nxd_config={"tensor_parallel_size": 2}),
        ("loss", "", "missing sum"),
    ),
}


def test_planted_fault_is_named_on_every_rank(run_ranks):
    by_rank = run_ranks(lambda: {name: compare(case) for name, (case, _) in FAULTS.items()}, 2)

    for name, (_, expected) in FAULTS.items():
        for reports in by_rank:
            first = reports[name].first
            assert (first.kind, first.name, first.fault) == expected, reports[name]
            assert first.largest > 0
    found = by_rank[0]["weights that depend on the layout"].first
    assert (found.step, found.expected, found.found) == (0, 1, 2)


def test_case_that_cannot_be_compared_is_refused_on_every_rank(run_ranks):
    def fails_alone() -> nn.Module:
        if get_tensor_model_parallel_size() == 1:
            raise KeyError("weights")
        return llama()

    def run():
        said = []
        for case in (
            ParityCase(model_fn=llama, batches=[], nxd_config={}),
            ParityCase(model_fn=llama, batches=tokens(), nxd_config={"tensor_parallel_size": 4}),
            ParityCase(model_fn=llama, batches=[{"input_ids": tokens()[0]["input_ids"][:3]}], nxd_config={}),
            ParityCase(model_fn=fails_alone, batches=tokens(), nxd_config={"tensor_parallel_size": 2}),
        ):
            with pytest.raises((ValueError, KeyError, RuntimeError)) as raised:
                compare(case)
            said.append(str(raised.value))
        return said

    first, second = run_ranks(run, 2)

    assert first[0] == second[0] == "batches is empty; pass the inputs of at least one step"
    assert "does not divide world_size=2; use tp=1 or 2" in first[1]
    assert first[1] == second[1]
    assert "3 samples, which cannot be divided among 2 replicas; use a multiple of 2" in second[2]
    assert second[3] == "the one-process run failed on rank 0: KeyError: 'weights'"
