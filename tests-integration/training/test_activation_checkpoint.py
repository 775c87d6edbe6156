"""Activation checkpointing of Llama: bitwise the same training, in memory that the benchmark's counter orders."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_layers.activation_checkpoint import apply_activation_checkpointing, matmul_outputs
from nxd_state import initialize_model_parallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "bench"))

from activation_memory import measure
from training_step.sizes import Size

LAYERS = 3
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
SIZE = Size(CONFIG, batch=2, sequence=32)
LAYOUTS = [(1, False), (2, False), (2, True)]
MESSAGE_BYTES = SIZE.batch * SIZE.sequence * CONFIG.hidden_size * 4


def train(tp: int, sequence_parallel: bool, config: str | None, keep) -> list[torch.Tensor]:
    """Losses of three steps, and the weights after them."""
    initialize_model_parallel(tp)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG, sequence_parallel=sequence_parallel)
    apply_activation_checkpointing(model, config, keep=keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(*SIZE.tokens())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values()]


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_checkpointed_training_is_bitwise_the_one_without(run_ranks, tp, sequence_parallel):
    expected = run_ranks(train, tp, tp, sequence_parallel, None, None)

    for keep in (None, matmul_outputs):
        found = run_ranks(train, tp, tp, sequence_parallel, "full", keep)
        for of_rank, expected_of_rank in zip(found, expected, strict=True):
            assert all(map(torch.equal, of_rank, expected_of_rank))


def memory_of_modes(tp: int, sequence_parallel: bool):
    initialize_model_parallel(tp)
    return measure(SIZE, sequence_parallel)


def test_each_form_of_checkpointing_keeps_less_than_the_one_before(run_ranks):
    by_layout = {layout: run_ranks(memory_of_modes, layout[0], *layout)[0] for layout in LAYOUTS}

    for layout, modes in by_layout.items():
        for before, after in itertools.pairwise(modes.values()):
            assert before.kept > after.kept, layout
            assert before.peak + MESSAGE_BYTES > after.peak, layout  # one that is under way lives a moment longer
        assert modes["full"].peak < 0.8 * modes["none"].peak, layout
        assert modes["full, matmul outputs kept"].peak < 0.9 * modes["none"].peak, layout
        assert modes["full"].kept < 0.5 * modes["none"].kept, layout
        assert modes["full, matmul outputs kept"].kept < 0.9 * modes["none"].kept, layout
    one, two, split = (by_layout[layout] for layout in LAYOUTS)
    for mode in one:
        assert one[mode].kept > two[mode].kept > split[mode].kept, mode


def test_recomputation_makes_the_collectives_that_backward_needs_and_no_more(run_ranks):
    for sequence_parallel, again in [
        (False, 1),  # the sum after attention; nothing in backward needs the one after the MLP
        (True, 3),  # the gather before attention, the scatter after it, the gather before the MLP
    ]:
        for modes in run_ranks(memory_of_modes, 2, 2, sequence_parallel):
            for mode in ("full", "full, matmul outputs kept"):
                assert modes[mode].collectives == modes["none"].collectives + again * LAYERS
