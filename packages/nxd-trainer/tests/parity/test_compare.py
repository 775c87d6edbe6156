"""`compare` agrees where a layout is right, and names the tensor where a fault was planted."""

from dataclasses import replace

import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_layers import ColumnParallelLinear, RowParallelLinear
from nxd_lora import LoraConfig
from nxd_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_size
from nxd_trainer.parity import ParityCase, compare
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
        assert {"initial parameter", "activation", "loss", "gradient", "parameter"} <= first[name].compared.keys()
    whole = first["sequence parallel, recomputed"].compared
    assert whole["gradient"] == 2 * len(list(LlamaForCausalLM(SIZES).parameters()))


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
    assert reports[0].layout == "TP 2 + SP x PP 2 x DP 2"


FAULTS = {
    "gradient that is not summed": (
        ParityCase(
            model_fn=llama_with_a_norm_that_is_not_summed,
            batches=tokens(),
            nxd_config={"tensor_parallel_size": 2, "sequence_parallel": True},
        ),
        ("gradient", "model.layers.1.input_layernorm.weight"),
    ),
    "output that is not summed": (
        ParityCase(model_fn=WithBlock, batches=numbers(), nxd_config={"tensor_parallel_size": 2}),
        ("activation", "block.drop"),
    ),
    "weights that depend on the layout": (
        ParityCase(model_fn=FollowsItsRank, batches=numbers(), nxd_config={"tensor_parallel_size": 2}),
        ("initial parameter", "first.bias"),
    ),
    "losses that differ between the ranks of a layer": (
        ParityCase(model_fn=LosesItsOwn, batches=numbers(), nxd_config={"tensor_parallel_size": 2}),
        ("loss", ""),
    ),
}


def test_planted_fault_is_named_on_every_rank(run_ranks):
    by_rank = run_ranks(lambda: {name: compare(case) for name, (case, _) in FAULTS.items()}, 2)

    for name, (_, (kind, tensor)) in FAULTS.items():
        for reports in by_rank:
            assert not reports[name].agrees
            assert (reports[name].difference.kind, reports[name].difference.name) == (kind, tensor), reports[name]
            assert reports[name].difference.max_abs > 0
    assert "where one process has 1 and the layout 2" in str(by_rank[0]["weights that depend on the layout"])


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
