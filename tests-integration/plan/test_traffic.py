"""The bytes to the replicas that a plan predicts are those that the busiest rank sends in a step, exactly."""

from dataclasses import dataclass

import neuronx_distributed as nxd
import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_plan import FixedDegrees, OwnLlama, TrainingJob, config_call, find_device, make_plan
from nxd_state import count_traffic, destroy_model_parallel, get_group
from samples import of_the_day

RANKS, SEQUENCE, BATCH = 4, 16, 8
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQUENCE,
}
SUM_OF_SQUARES = 8  # bytes, for clipping


@dataclass(frozen=True, kw_only=True)
class Case:
    stage: int
    pp: int = 1
    group: int | None = None
    reshard: bool | int | None = None
    checkpointing: str = "none"
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    microbatch_size: int = 1


CASES = [
    Case(stage=1),
    Case(stage=1, group=2, dtype=torch.bfloat16),
    Case(stage=2),
    Case(stage=2, group=2),
    Case(stage=2, pp=2),
    Case(stage=3),
    Case(stage=3, checkpointing="full", dtype=torch.bfloat16),
    Case(stage=3, microbatch_size=2),
    Case(stage=3, group=2),
    Case(stage=3, reshard=2),
    Case(stage=3, reshard=False),
    Case(stage=3, pp=2),
    Case(stage=3, pp=2, checkpointing="full", schedule="zb-h1"),
    Case(stage=3, pp=2, schedule="zb-h1"),
    Case(stage=3, pp=2, schedule="zb-v"),
]


def plan(case):
    job = TrainingJob(
        OwnLlama(LlamaConfig(**SIZES)),
        find_device("cpu"),
        RANKS,
        sequence_length=SEQUENCE,
        global_batch_size=BATCH,
        dtype=case.dtype,
        schedule=case.schedule,
    )
    fixed = FixedDegrees(
        1,
        case.pp,
        False,
        case.stage,
        case.microbatch_size,
        case.checkpointing,
        shard_group_size=case.group,
        reshard_after_forward=case.reshard,
    )
    (planned,) = make_plan(job, fixed).best
    return planned.communication, planned.layout, config_call(job, planned.layout)


def measure(call, rounds):
    """On a rank: bytes to the replicas in the second step, without the small messages that a plan leaves out."""
    names = {"nxd": nxd, "torch": torch, "LlamaForCausalLM": LlamaForCausalLM}
    names |= {"LlamaDecoderLayer": LlamaDecoderLayer, "LlamaConfig": LlamaConfig}
    exec(call, names)  # the plan's own lines
    model, config = names["model"], names["nxd_config"]
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=1e-3)
    replicas = get_group("dp").size
    tokens = torch.randint(SIZES["vocab_size"], (BATCH // replicas, SEQUENCE))
    for _ in range(2):
        with count_traffic() as traffic:
            model.run_train(input_ids=tokens, labels=tokens)
            optimizer.step()
            optimizer.zero_grad()
    found = sum(it.sent_bytes for axis, it in traffic.items() if axis in ("dp+cp", "given"))
    sharing = config["optimizer_config"]["shard_group_size"] or replicas
    flags = len([*model.parameters()])  # a byte for each parameter: whether it has a gradient
    found -= all_reduced(flags, sharing) * rounds + all_reduced(flags, replicas // sharing)
    found -= all_reduced(SUM_OF_SQUARES, sharing)
    destroy_model_parallel()
    return found


def all_reduced(num_bytes, ranks):
    return 2 * num_bytes * (ranks - 1) // ranks


def measure_all(calls):
    return [measure(*call) for call in calls]


@pytest.mark.parametrize(
    "cases", [of_the_day(CASES, 5), pytest.param(CASES, marks=pytest.mark.slow)], ids=["of the day", "all"]
)
def test_predicted_bytes_to_replicas_are_those_of_the_busiest_rank(run_ranks, cases):
    planned = [plan(case) for case in cases]
    calls = [
        (call, 1 if case.stage == 1 else layout.num_microbatches)
        for case, (_, layout, call) in zip(cases, planned, strict=True)
    ]
    of_ranks = run_ranks(measure_all, RANKS, calls, timeout=300, env={"NXD_SHM": "0"})
    for case, (sent, *_), measured in zip(cases, planned, zip(*of_ranks, strict=True), strict=True):
        assert max(measured) == sent.dp + sent.mirrors + sent.near, case
