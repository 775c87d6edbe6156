"""Adapters by a recipe: at every layout the losses are those of PEFT, with plain transformers and a loop by hand."""

import pytest
import torch
from nxd_data import ByteTokenizer, TrainLoader, build_corpus, open_corpus, pack_corpus
from nxd_lora import save_peft_adapter
from nxd_parity import InFloat64
from nxd_trainer.report import read_records
from nxd_trainer.training import prepare_run
from runs_by_hand import SIZES, settings_of_own_llama, train_by_hand, train_in_float64

transformers = pytest.importorskip("transformers", reason="models of transformers need it: pip install transformers")
peft = pytest.importorskip("peft", reason="its adapters are compared: pip install peft")

STEPS, BATCH, LENGTH, RATE = 4, 4, 16, 1e-2
PP2 = ["parallel.pipeline_parallel_size=2", "train.gradient_accumulation_steps=2"]
TP2 = ["parallel.tensor_parallel_size=2"]
LAYOUTS = {
    "one process": (1, []),
    "TP 2 x SP": (2, [*TP2, "parallel.sequence_parallel=true"]),
    "TP 4": (4, ["parallel.tensor_parallel_size=4"]),  # ranks hold copies of the key and value heads
    "PP 2": (2, PP2),
    "DP 2 + ZeRO-1": (2, ["parallel.zero_stage=1"]),
    "DP 2 + ZeRO-3": (2, ["parallel.zero_stage=3"]),
    "TP 2 x PP 2": (4, [*TP2, *PP2]),
}
CASES = {
    "rank alone": ["lora.rank=4"],
    "DoRA and a module": ["lora.rank=4", "lora.alpha=6", "lora.use_dora=true", "lora.modules_to_save=lm_head"],
}
OF_EXPERTS = ["lora.rank=4", "lora.target_parameters=experts.gate_up_proj,experts.down_proj"]
EP2 = ["parallel.expert_parallel_size=2"]
EXPERT_LAYOUTS = {
    "one process": (1, []),
    "EP 2 + ZeRO-1": (2, [*EP2, "parallel.zero_stage=1"]),
    "EP 2 over TP 2": (2, [*EP2, *TP2, "parallel.expert_tensor_parallel_size=1"]),
    "EP 2 x TP 2": (4, [*EP2, *TP2]),
    "EP 2 x PP 2": (4, [*EP2, *PP2]),
}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
MODELS = ("own Llama", "llama")
QUICK = [("llama", "TP 2 x SP", "DoRA and a module"), ("llama", "TP 4", "rank alone")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-6, bos_token_id=None, eos_token_id=None)
    transformers.LlamaForCausalLM(config).double().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder_of_experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, **MIXTRAL, bos_token_id=None, eos_token_id=None, sliding_window=None)
    transformers.MixtralForCausalLM(config).double().save_pretrained(folder)
    return folder


@pytest.fixture
def settings_of(folder, text_folder, tmp_path, request):
    def make(model, case):
        if model == "mixtral":
            given = [f"model.path={request.getfixturevalue('folder_of_experts')}", *OF_EXPERTS]
        else:
            own = settings_of_own_llama(folder) if model == "own Llama" else [f"model.path={folder}"]
            given = [*own, *CASES[case]]
        return [
            *given,
            f"data.path={text_folder}",
            f"data.sequence_length={LENGTH}",
            f"output={tmp_path / 'run'}",
            f"train.steps={STEPS}",
            f"train.global_batch_size={BATCH}",
            "train.dtype=float64",
            "train.log_every=1",
            "train.eval_every=0",
            f"optimizer.lr={RATE}",
            "optimizer.warmup_steps=2",
            "checkpoint.save_every=0",
        ]

    return make


def losses_of_peft(folder, adapter, text_folder, cache_folder):
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    base.config._experts_implementation = "eager"  # grouped products know no float64
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    corpus = build_corpus(text_folder, ByteTokenizer(), cache_folder=cache_folder)
    sequences, _ = pack_corpus(open_corpus(corpus), sequence_length=LENGTH, held_out_fraction=0.05)
    batches = TrainLoader(sequences, global_batch_size=BATCH)

    def loss_of_step(_):
        [batch] = batches.next_step()
        with InFloat64():
            return model(batch.input_ids, labels=batch.labels, shift_labels=batch.labels, use_cache=False).loss

    return train_by_hand(trained, loss_of_step, steps=STEPS, rate=RATE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "layout", "case"),
    [
        pytest.param(*it, id=", ".join(it), marks=[] if it in QUICK else pytest.mark.slow)
        for it in [(model, layout, case) for model in MODELS for layout in LAYOUTS for case in CASES]
    ],
)
def test_losses_of_adapters_are_those_of_peft(
    run_ranks, settings_of, folder, text_folder, tmp_path, model, layout, case
):
    ranks, degrees = LAYOUTS[layout]
    settings = settings_of(model, case)

    def write_adapter(recipe):
        save_peft_adapter(prepare_run(recipe)[0].model.lora_model, tmp_path / "adapter")

    run_ranks(train_in_float64, 1, settings, write_adapter)
    run_ranks(train_in_float64, ranks, [*settings, *degrees])

    expected = losses_of_peft(folder, tmp_path / "adapter", text_folder, tmp_path / "tokens")
    found = [record.loss for record in read_records(tmp_path / "run/metrics.jsonl")]
    assert found == pytest.approx(expected, rel=1e-10, abs=0)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize(
    "layout", [it if it == "EP 2 + ZeRO-1" else pytest.param(it, marks=pytest.mark.slow) for it in EXPERT_LAYOUTS]
)
def test_losses_of_adapters_of_experts_are_those_of_peft(
    run_ranks, settings_of, folder_of_experts, text_folder, tmp_path, layout
):
    ranks, degrees = EXPERT_LAYOUTS[layout]
    settings = settings_of("mixtral", "experts")

    def write_adapter(recipe):
        save_peft_adapter(prepare_run(recipe)[0].model.lora_model, tmp_path / "adapter")

    run_ranks(train_in_float64, 1, settings, write_adapter)
    run_ranks(train_in_float64, ranks, [*settings, *degrees])

    expected = losses_of_peft(folder_of_experts, tmp_path / "adapter", text_folder, tmp_path / "tokens")
    found = [record.loss for record in read_records(tmp_path / "run/metrics.jsonl")]
    assert found == pytest.approx(expected, rel=1e-10, abs=0)
    assert expected[-1] < expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one process", "TP 2 x PP 2"])
def test_resumed_run_of_adapters_alone_is_the_run_that_never_stopped(run_ranks, settings_of, tmp_path, layout):
    ranks, degrees = LAYOUTS[layout]
    settings = [*settings_of("llama", "DoRA and a module"), *degrees, "lora.save=adapter"]
    run_ranks(train_in_float64, ranks, [*settings, f"output={tmp_path / 'whole'}"])

    run_ranks(train_in_float64, ranks, [*settings, "train.stop_after=2"])
    run_ranks(train_in_float64, ranks, settings)

    found, expected = (
        [record.loss for record in read_records(tmp_path / name / "metrics.jsonl")] for name in ("run", "whole")
    )
    assert found == expected
