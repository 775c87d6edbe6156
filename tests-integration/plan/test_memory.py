"""The memory that a plan predicts is what ranks hold that train in that layout: within 10%, each rank by itself.

Measured is what torch allocates: the bytes of all tensors, as they come and go, in the second step of a job that the
plan's own `neuronx_distributed_config(...)` sets up.
"""

import re
from dataclasses import dataclass

import neuronx_distributed as nxd
import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_optim import NeuronZero1Optimizer
from nxd_pipeline.runtime.memory import StepMemory
from nxd_plan import FixedDegrees, OwnLlama, TrainingJob, TransformersModel, config_call, find_device, make_plan
from nxd_state import destroy_model_parallel, get_group
from nxd_state.sharded_values import local_values
from samples import of_the_day

transformers = pytest.importorskip("transformers")

SEQUENCE, TOLERANCE = 128, 0.1
JOB_SECONDS = 300.0  # for all cases of a number of ranks, on a machine that does much else
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
}
EXPERTS = 4
OF_TRANSFORMERS = {
    "qwen3": {"head_dim": 48},
    "gemma3_text": {"head_dim": 48, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
}
TOWER = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    model_type: str | None = None  # of transformers; None: this package's own Llama
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0
    group: int | None = None
    reshard: bool | int | None = None
    checkpointing: str = "none"
    microbatch_size: int = 2
    global_batch: int = 16
    dtype: torch.dtype = torch.float32
    tied: bool = False
    schedule: str = "1f1b"
    ep: int = 1
    whole_experts: bool = False


ONE_RANK = [
    Case(),
    Case(checkpointing="full"),
    Case(microbatch_size=1, tied=True),
    Case(microbatch_size=16),
    Case(microbatch_size=16, checkpointing="full"),
    Case(zero_stage=1, dtype=torch.bfloat16),
    Case(model_type="qwen3"),
    Case(model_type="qwen3", checkpointing="full", microbatch_size=16),
    Case(model_type="qwen3", zero_stage=1, dtype=torch.bfloat16, tied=True),
    Case(model_type="gemma3_text"),
    Case(model_type="gemma3"),
    Case(model_type="mixtral"),
    Case(model_type="qwen3_moe", checkpointing="full"),
]
TWO_RANKS = [
    Case(tp=2),
    Case(tp=2, sequence_parallel=True),
    Case(tp=2, sequence_parallel=True, checkpointing="full", microbatch_size=4),
    Case(pp=2),
    Case(pp=2, checkpointing="full", microbatch_size=4, tied=True),
    Case(pp=2, schedule="zb-v", microbatch_size=1),
    Case(),
    Case(cp=2),
    Case(cp=2, zero_stage=1, checkpointing="full"),
    Case(model_type="qwen3", cp=2),
    Case(zero_stage=1),
    Case(model_type="gemma3", zero_stage=1, dtype=torch.bfloat16),
    Case(zero_stage=1, dtype=torch.bfloat16, checkpointing="full"),
    Case(model_type="qwen3", tp=2),
    Case(model_type="qwen3", tp=2, sequence_parallel=True, checkpointing="full", microbatch_size=4),
    Case(model_type="qwen3", pp=2),
    Case(model_type="qwen3", pp=2, checkpointing="full", microbatch_size=4, tied=True),
    Case(model_type="mixtral", tp=2),
    Case(model_type="mixtral", pp=2),
    Case(model_type="mixtral", ep=2),
    Case(model_type="mixtral", ep=2, zero_stage=1, checkpointing="full"),
    Case(model_type="qwen3_moe", ep=2, tp=2, whole_experts=True, sequence_parallel=True),
]
SHARDED_TWO_RANKS = [
    Case(zero_stage=2, microbatch_size=1, checkpointing="full"),
    Case(zero_stage=3, microbatch_size=1, checkpointing="full"),
    Case(zero_stage=3, microbatch_size=8),
    Case(zero_stage=3, microbatch_size=1, dtype=torch.bfloat16, tied=True),
    Case(zero_stage=3, microbatch_size=1, reshard=False, checkpointing="full"),
    Case(zero_stage=3, microbatch_size=1, cp=2),
    Case(zero_stage=3, microbatch_size=1, group=1, checkpointing="full"),
    Case(model_type="qwen3", zero_stage=3, microbatch_size=1, checkpointing="full"),
    Case(model_type="mixtral", zero_stage=3, microbatch_size=1, ep=2, checkpointing="full"),
]
SHARDED_FOUR_RANKS = [
    Case(zero_stage=3, microbatch_size=1, checkpointing="full"),
    Case(zero_stage=3, microbatch_size=1, group=2, checkpointing="full"),
    Case(zero_stage=3, microbatch_size=1, reshard=2, checkpointing="full"),
    Case(zero_stage=3, microbatch_size=1, tp=2, sequence_parallel=True, dtype=torch.bfloat16),
    Case(zero_stage=3, microbatch_size=1, pp=2, checkpointing="full"),
    Case(zero_stage=3, microbatch_size=1, pp=2, tied=True, checkpointing="full", dtype=torch.bfloat16),
    Case(zero_stage=3, microbatch_size=1, pp=2, reshard=False),
    Case(zero_stage=3, microbatch_size=1, pp=2, schedule="zb-v"),
    Case(zero_stage=3, microbatch_size=1, pp=2, schedule="zb-h1"),
    Case(zero_stage=2, microbatch_size=1, pp=2, checkpointing="full"),
    Case(zero_stage=2, microbatch_size=1, pp=2, schedule="zb-v"),
    Case(zero_stage=1, microbatch_size=1, group=2, checkpointing="full"),
    Case(model_type="mixtral", zero_stage=3, microbatch_size=1, ep=2, group=2),
]
FOUR_RANKS = [
    Case(tp=4),
    Case(tp=4, sequence_parallel=True, microbatch_size=8),
    Case(pp=4),
    Case(pp=2, zero_stage=1),
    Case(tp=2, pp=2, sequence_parallel=True, checkpointing="full"),
    Case(tp=2, sequence_parallel=True, zero_stage=1, dtype=torch.bfloat16),
    Case(pp=4, schedule="zb-h1", microbatch_size=1),
    Case(zero_stage=1, microbatch_size=4),
    Case(model_type="mixtral", ep=4),
    Case(model_type="mixtral", ep=2, tp=2),
    Case(model_type="qwen3_moe", ep=2, zero_stage=1, dtype=torch.bfloat16),
    Case(model_type="mixtral", ep=2, pp=2, checkpointing="full"),
]


def model_of(case):
    sizes = {**SIZES, "tie_word_embeddings": case.tied}
    if case.model_type is None:
        return OwnLlama(LlamaConfig(**sizes))
    if case.model_type == "gemma3":
        text = {**sizes, "pad_token_id": None, **OF_TRANSFORMERS["gemma3_text"]}
        architectures = ["Gemma3ForConditionalGeneration"]
        return TransformersModel(
            {"model_type": "gemma3", "architectures": architectures, "text_config": text, "vision_config": TOWER}
        )
    architecture = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.model_type]
    further = {"pad_token_id": None, **OF_TRANSFORMERS[case.model_type]}
    return TransformersModel({"model_type": case.model_type, "architectures": [architecture], **sizes, **further})


def job_of(case, ranks):
    return TrainingJob(
        model_of(case),
        find_device("cpu"),
        ranks,
        sequence_length=SEQUENCE,
        global_batch_size=case.global_batch,
        dtype=case.dtype,
        schedule=case.schedule,
    )


def predict(case, ranks):
    fixed = FixedDegrees(
        case.tp,
        case.pp,
        case.sequence_parallel,
        case.zero_stage,
        case.microbatch_size,
        case.checkpointing,
        case.cp,
        case.ep,
        1 if case.whole_experts else case.tp,
        shard_group_size=case.group,
        reshard_after_forward=case.reshard,
    )
    job = job_of(case, ranks)
    (planned,) = make_plan(job, fixed).best
    return planned.memories, config_call(job, planned.layout)


def measure(call, case):
    """On a rank: bytes of parameters, of the optimizer's state and of everything at its highest, in the second step."""
    replica_batch = case.global_batch // case.replicas
    tokens = torch.randint(SIZES["vocab_size"], (replica_batch, SEQUENCE))
    names = {"nxd": nxd, "torch": torch, "LlamaForCausalLM": LlamaForCausalLM}
    names |= {"LlamaDecoderLayer": LlamaDecoderLayer, "LlamaConfig": LlamaConfig}
    names |= {
        name: getattr(transformers, name) for name in re.findall(r"Auto\w+|\w+Config(?=\()", call) if name not in names
    }
    with StepMemory() as memory:
        exec(call, names)  # the plan's own lines
        model = names["model"]
        choose_experts_evenly(model)
        optimizer = nxd.initialize_parallel_optimizer(
            names["nxd_config"], torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True
        )
        for _ in range(2):
            memory.peak_bytes = memory.held_bytes
            model.run_train(**dict.fromkeys(names["nxd_config"]["pipeline_config"]["input_names"], tokens))
            optimizer.step()
            optimizer.zero_grad()
    found = {
        "parameters": sum(local_values(parameter).nbytes for parameter in model.parameters()),
        "optimizer_state": state_bytes(optimizer.optimizer),
        "peak": memory.peak_bytes - without_memory(names),
    }
    pp_rank = get_group("pp").rank
    destroy_model_parallel()
    return pp_rank, found


def choose_experts_evenly(model):
    """Have tokens go to any experts: routers that have learned nothing send some of them far more than others."""

    def evenly(module, args):
        hidden, chosen, weights = args
        return hidden, torch.rand(len(chosen), EXPERTS).argsort(dim=1)[:, : chosen.shape[1]], weights

    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            module.register_forward_pre_hook(evenly)


def without_memory(names):
    """Bytes that are counted of parameters on other stages: the model that has been cut has them on the meta device."""
    outlines = (names.get("outline", torch.nn.Identity()), names["model"].pipeline.original_torch_module)
    parameters = {id(it): it for outline in outlines for it in outline.parameters() if it.is_meta}
    return sum(parameter.nbytes for parameter in parameters.values())


def state_bytes(optimizer):
    if isinstance(optimizer, NeuronZero1Optimizer):
        measured = optimizer.memory_report().measured
        return measured.state + measured.master_weights
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in states if isinstance(value, torch.Tensor))


def measure_all(calls_and_cases):
    return [measure(call, case) for call, case in calls_and_cases]


@dataclass(frozen=True)
class Replicas:
    """What a rank has to know of a case."""

    global_batch: int
    replicas: int


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(1, of_the_day(ONE_RANK, 3), id="one rank"),
        pytest.param(2, [*of_the_day(TWO_RANKS, 3), *of_the_day(SHARDED_TWO_RANKS, 2)], id="two ranks"),
        pytest.param(1, ONE_RANK, id="all on one rank", marks=pytest.mark.slow),
        pytest.param(2, TWO_RANKS, id="all on two ranks", marks=pytest.mark.slow),
        pytest.param(2, SHARDED_TWO_RANKS, id="all sharded on two ranks", marks=pytest.mark.slow),
        pytest.param(4, FOUR_RANKS, id="four ranks", marks=pytest.mark.slow),
        pytest.param(4, SHARDED_FOUR_RANKS, id="sharded on four ranks", marks=pytest.mark.slow),
    ],
)
def test_predicted_memory_is_within_a_tenth_of_measured_memory_on_every_rank(run_ranks, ranks, cases):
    predictions = [predict(case, ranks) for case in cases]
    of_ranks = run_ranks(
        measure_all,
        ranks,
        [
            (call, Replicas(case.global_batch, ranks // case.tp // case.pp // case.cp))
            for case, (_, call) in zip(cases, predictions, strict=True)
        ],
        timeout=JOB_SECONDS,
        env={"NXD_SHM": "0"},  # planned are torch's collectives, whose buffers are torch's own
    )
    wrong = []
    for index, (case, (memories, _)) in enumerate(zip(cases, predictions, strict=True)):
        for rank, results in enumerate(of_ranks):
            pp_rank, found = results[index]
            for kind, measured in found.items():
                predicted = getattr(memories[pp_rank], kind)
                print(f"{ranks} ranks, {case}, rank {rank}: {kind} {predicted / measured - 1:+.1%} ({measured})")
                if abs(predicted / measured - 1) > TOLERANCE:
                    wrong.append(f"{case}, rank {rank}: {kind} predicted {predicted}, measured {measured}")
    assert not wrong, "\n".join(wrong)
