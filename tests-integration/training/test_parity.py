"""Every layout computes what one process computes: loss, every gradient, and the weights after five AdamW steps."""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_optim import GradientReducer, clip_grad_norm, reduce_sequence_parallel_gradients
from nxd_state import get_group, initialize_model_parallel
from nxd_testing import LogicalPiece, assemble_logical, logical_pieces

STEPS, GLOBAL_BATCH, SEQUENCE = 5, 12, 16
RTOL = 1e-10


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    gradients: list[LogicalPiece]  # of the first step, before clipping
    weights: list[LogicalPiece]  # after all steps


def train(tp: int, sequence_parallel: bool, tied: bool, accumulation: int) -> Outcome:
    initialize_model_parallel(tensor_model_parallel_size=tp)
    data_parallel = get_group("dp")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config, sequence_parallel=sequence_parallel, dtype=torch.float64)
    reducer = GradientReducer(model.parameters(), bucket_bytes=20_000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 64, (STEPS, GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    outcome = Outcome([], [], [], [])
    for step in range(STEPS):
        loss_of_step = 0.0
        for index, microbatch in enumerate(tokens[step].chunk(accumulation)):
            own = microbatch.chunk(data_parallel.size)[data_parallel.rank]
            with reducer.overlap_backward() if index == accumulation - 1 else nullcontext():
                loss = model(own[:, :-1], own[:, 1:]) / accumulation
                loss.backward()
            loss_of_step += loss.item()
        reducer.finish()
        reduce_sequence_parallel_gradients(model.parameters())
        if step == 0:
            outcome.gradients = logical_pieces((n, p, p.grad) for n, p in model.named_parameters())
        outcome.norms.append(clip_grad_norm(model.parameters(), 0.5).item())
        outcome.losses.append(loss_of_step)
        optimizer.step()
        reducer.zero_grad()
    outcome.weights = logical_pieces((n, p, p) for n, p in model.named_parameters())
    return outcome


LAYOUTS = [
    pytest.param(world, tp, sp, id=f"tp{tp}-dp{world // tp}{'-sp' if sp else ''}")
    for (world, tp), sp in itertools.product([(2, 2), (4, 4), (2, 1), (4, 2)], [False, True])
]


@pytest.mark.pairs
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("world", "tp", "sequence_parallel"), LAYOUTS)
def test_training_any_layout_equals_one_process(run_ranks, world, tp, sequence_parallel, tied, accumulation):
    [reference] = run_ranks(train, 1, 1, False, tied, 1)

    outcomes = run_ranks(train, world, tp, sequence_parallel, tied, accumulation)

    losses = torch.tensor([outcome.losses for outcome in outcomes], dtype=torch.float64).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(reference.losses, dtype=torch.float64), rtol=RTOL, atol=0)
    for outcome in outcomes:
        assert outcome.norms == pytest.approx(reference.norms, rel=RTOL)
    for kind in ("gradients", "weights"):
        expected = assemble_logical([getattr(reference, kind)])
        found = assemble_logical([getattr(outcome, kind) for outcome in outcomes])
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            scale = tensor.abs().max().item()  # elements near zero are compared to their tensor's scale
            torch.testing.assert_close(
                found[name], tensor, rtol=RTOL, atol=RTOL * scale, msg=lambda m, n=name: f"{n}: {m}"
            )
