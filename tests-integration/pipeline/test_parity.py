"""A pipeline together with every other technique computes what one process computes: loss, gradients, trained weights.

All layouts of one number of ranks run in one job.
"""

from dataclasses import dataclass

import pytest
import torch
from nxd_engine.models import LlamaDecoderLayer, LlamaForCausalLM
from nxd_layers.activation_checkpoint import apply_activation_checkpointing
from nxd_optim import GradientReducer, NeuronZero1Optimizer, clip_grad_norm, reduce_sequence_parallel_gradients
from nxd_pipeline import NxDPPModel
from nxd_state import (
    all_reduce,
    destroy_model_parallel,
    get_data_parallel_group,
    get_group,
    get_pipeline_model_parallel_group,
    initialize_model_parallel,
)
from nxd_testing import LogicalPiece, assemble_logical, logical_pieces

pytestmark = pytest.mark.sample(1)  # each takes its time

STEPS, GLOBAL_BATCH, SEQUENCE = 2, 16, 8
MAX_NORM = 0.5
RTOL = 1e-10


@dataclass(frozen=True, kw_only=True)
class Layout:
    pp: int
    tp: int = 1
    sequence_parallel: bool = False
    tied: bool = False
    microbatches: int = 4
    calls: int = 1  # of run_train in a step
    schedule: str | None = None
    virtual: int = 1
    zero1: bool = False
    checkpointing: bool = False


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    gradients: list[LogicalPiece]  # of the first step, before clipping
    weights: list[LogicalPiece]  # after all steps


TWO_RANKS = [
    Layout(pp=2),
    Layout(pp=2, tied=True),
    Layout(pp=2, microbatches=1),
    Layout(pp=2, checkpointing=True),
    Layout(pp=2, calls=4, microbatches=2, tied=True),
    Layout(pp=2, schedule="gpipe", tied=True),
    Layout(pp=2, virtual=2, tied=True),
    Layout(pp=2, virtual=4, checkpointing=True),
    Layout(pp=2, schedule="zb-h1", tied=True),
    Layout(pp=2, schedule="zb-h1", calls=2, microbatches=2),
    Layout(pp=2, schedule="zb-h1", checkpointing=True),
    Layout(pp=2, schedule="zb-v", virtual=2, tied=True),
    Layout(pp=2, schedule="dualpipe-v", virtual=2),
]
FOUR_RANKS = [
    Layout(pp=4, virtual=2, tied=True),
    Layout(pp=2, tp=2, tied=True),
    Layout(pp=2, tp=2, sequence_parallel=True, tied=True),
    Layout(pp=2, tp=2, sequence_parallel=True, virtual=2, checkpointing=True),
    Layout(pp=2, tied=True),  # and two replicas
    Layout(pp=2, tp=2, sequence_parallel=True, tied=True, schedule="zb-h1"),
    Layout(pp=2, tp=2, sequence_parallel=True, schedule="zb-v", virtual=2),
    Layout(pp=2, tied=True, zero1=True, schedule="zb-h1"),
    Layout(pp=2, tied=True, zero1=True),
    Layout(pp=2, zero1=True, calls=2, microbatches=2),
]
EIGHT_RANKS = [
    Layout(pp=2, tp=2, sequence_parallel=True, tied=True, zero1=True),
    Layout(pp=2, tp=2, tied=True, calls=2, microbatches=2, checkpointing=True),
    Layout(pp=4, virtual=2, tied=True, zero1=True),
]


def train(layout: Layout, config) -> Outcome:
    initialize_model_parallel(layout.tp, layout.pp)
    replicas = get_group("dp")
    torch.manual_seed(0)
    model = LlamaForCausalLM(config, sequence_parallel=layout.sequence_parallel, dtype=torch.float64)
    pipeline = NxDPPModel(
        model,
        LlamaDecoderLayer,
        layout.microbatches,
        input_names=["input_ids", "labels"],
        auto_partition=True,
        broadcast_and_average_loss=True,
        schedule=layout.schedule,
        virtual_pipeline_size=layout.virtual,
        use_zero1_optimizer=layout.zero1,
    )
    if layout.checkpointing:
        apply_activation_checkpointing(pipeline, LlamaDecoderLayer)
    optimizer = make_optimizer(pipeline, zero1=layout.zero1)
    reducer = None if layout.zero1 else GradientReducer(pipeline.local_parameters(), bucket_bytes=5_000)
    tokens = torch.randint(0, 48, (STEPS, GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    outcome = Outcome([], [], [], [])
    for step in range(STEPS):
        losses = []
        for batch in tokens[step].chunk(layout.calls):
            own = batch.chunk(replicas.size)[replicas.rank]
            losses.append(pipeline.run_train(input_ids=own[:, :-1], labels=own[:, 1:]))
        outcome.losses.append(float(torch.stack(losses).mean()))
        for parameter in pipeline.local_parameters():
            parameter.grad /= layout.calls
        if step == 0:
            outcome.gradients = whole_batch_gradients(pipeline)
        if reducer is not None:
            reducer.finish()
            reduce_sequence_parallel_gradients(pipeline.local_parameters())
            outcome.norms.append(clip_grad_norm(pipeline.local_parameters(), MAX_NORM).item())
        optimizer.step()
        if reducer is None:
            outcome.norms.append(optimizer.grad_norm.item())
        (optimizer if reducer is None else reducer).zero_grad()
    outcome.weights = logical_pieces((n, p, p) for n, p in pipeline.local_named_parameters())
    destroy_model_parallel()
    return outcome


def make_optimizer(pipeline: NxDPPModel, *, zero1: bool):
    if not zero1:
        return torch.optim.AdamW(pipeline.local_parameters(), lr=1e-2)
    return NeuronZero1Optimizer(
        list(pipeline.local_parameters()),
        torch.optim.AdamW,
        max_norm=MAX_NORM,
        sharding_groups=get_data_parallel_group(as_list=True),
        grad_norm_groups=get_pipeline_model_parallel_group(as_list=True),
        lr=1e-2,
    )


def whole_batch_gradients(pipeline: NxDPPModel) -> list[LogicalPiece]:
    """The gradients as they are to become: averaged over replicas, those of sequence-parallel regions summed."""
    named = []
    for name, parameter in pipeline.local_named_parameters():
        gradient = all_reduce(parameter.grad, get_group("dp"), op="avg")
        if getattr(parameter, "sequence_parallel_enabled", False):
            gradient = all_reduce(gradient, get_group("tp"))
        named.append((name, parameter, gradient))
    return logical_pieces(named)


def one_process(config) -> dict[str, list | dict[str, torch.Tensor]]:
    """The same steps with plain PyTorch."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config, dtype=torch.float64)
    named = list(model.named_parameters(remove_duplicate=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 48, (STEPS, GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens[step][:, :-1], tokens[step][:, 1:])
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: parameter.grad.clone() for name, parameter in named}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": {n: p.detach() for n, p in named}}


def assert_equal_to_one_process(outcomes: list[Outcome], expected) -> None:
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected["losses"], rel=RTOL)
        assert outcome.norms == pytest.approx(expected["norms"], rel=RTOL)
    for kind in ("gradients", "weights"):
        found = assemble_logical([getattr(outcome, kind) for outcome in outcomes])
        assert {name for name in expected[kind] if name not in found} <= {"lm_head.weight"}  # tied, on one rank
        for name, tensor in found.items():
            wanted = expected[kind][name]
            scale = wanted.abs().max().item()  # elements near zero are compared to their tensor's scale
            torch.testing.assert_close(
                tensor, wanted, rtol=RTOL, atol=RTOL * scale, msg=lambda m, at=f"{kind} of {name}": f"{at}: {m}"
            )


def check(run_ranks, make_config, layouts: list[Layout], world: int) -> None:
    configs = {tied: make_config(tied=tied) for tied in (False, True)}
    expected = {tied: one_process(config) for tied, config in configs.items()}

    by_rank = run_ranks(lambda: [train(layout, configs[layout.tied]) for layout in layouts], world)

    for layout, outcomes in zip(layouts, zip(*by_rank, strict=True), strict=True):
        try:
            assert_equal_to_one_process(list(outcomes), expected[layout.tied])
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from error


def test_training_with_two_stages_equals_one_process(run_ranks, make_config):
    check(run_ranks, make_config, TWO_RANKS, 2)


def test_training_with_tensor_and_data_parallelism_equals_one_process(run_ranks, make_config):
    check(run_ranks, make_config, FOUR_RANKS, 4)


@pytest.mark.slow
def test_training_with_all_kinds_of_parallelism_equals_one_process(run_ranks, make_config):
    check(run_ranks, make_config, EIGHT_RANKS, 8)
