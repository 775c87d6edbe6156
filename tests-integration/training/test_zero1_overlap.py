"""ZeRO-1 with `overlap_forward` on Llama: weights are whole where they are read, and no layer waits for the next."""

import pytest
import torch
import torch.distributed as dist
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_layers import linear_cross_entropy
from nxd_lora import LoraConfig, LoraModel
from nxd_optim import NeuronZero1Optimizer
from nxd_optim.zero import flat_parameters
from nxd_state import Pending, active_group, initialize_model_parallel
from torch import nn

STEPS = 3


class ChunkedLoss(nn.Module):
    """Llama with a loss that takes the weight of the head without calling it."""

    def __init__(self, llama):
        super().__init__()
        self.llama = llama

    def forward(self, tokens, labels):
        hidden = self.llama.model(tokens, None)
        return linear_cross_entropy(hidden.flatten(0, 1), self.llama.lm_head, labels.t().flatten(), chunk_size=4)


def make(kind):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=kind == "tied",
    )
    model = LlamaForCausalLM(config, dtype=torch.float64)
    if kind == "chunked loss":
        return ChunkedLoss(model)
    if kind == "LoRA":
        return LoraModel(model, LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], lora_rank=2))
    return model


def gather_late(buffer, group, *, async_op):
    """In place of `all_gather_`: the others' parts arrive in `wait()` and are nan until then."""
    own = buffer.chunk(group.size)[group.rank].clone()
    buffer.fill_(float("nan"))
    buffer.chunk(group.size)[group.rank].copy_(own)

    def arrive(buffer):
        parts = [torch.empty_like(own) for _ in group.ranks]
        dist.all_gather(parts, own, group=group.process_group)
        return buffer.copy_(torch.cat(parts))

    assert async_op
    return Pending(buffer, finish=arrive)


def train(model, *, overlap):
    optimizer = NeuronZero1Optimizer(
        (p for p in model.parameters() if p.requires_grad),
        torch.optim.AdamW,
        bucket_cap_mb_reduce_scatter=0.001,
        lr=0.05,
    )
    if overlap:
        optimizer.overlap_forward(model)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + active_group("dp").rank)
        tokens = torch.randint(24, (2, 7), generator=generator)
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), model(tokens, tokens).item()]
    return losses


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["plain", "tied", "chunked loss", "LoRA"])
@pytest.mark.parametrize("tp", [1, 2])
def test_weights_are_whole_wherever_they_are_read(run_ranks, kind, tp):
    def compare():
        initialize_model_parallel(tp)
        expected = train(make(kind), overlap=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flat_parameters, "all_gather_", gather_late)
            return expected, train(make(kind), overlap=True)

    for expected, found in run_ranks(compare, 2 * tp):
        assert found == expected


def test_layers_do_not_wait_for_the_parameters_of_the_next_ones(run_ranks):
    def record():
        initialize_model_parallel()
        model = make("plain")
        optimizer = NeuronZero1Optimizer(
            model.parameters(), torch.optim.AdamW, bucket_cap_mb_reduce_scatter=0.001, lr=0.05
        )
        optimizer.overlap_forward(model)
        tokens = torch.arange(14).view(2, 7)
        model(tokens, tokens).backward()
        later = [*model.model.layers[1].mlp.parameters(), *model.lm_head.parameters()]
        arrived = []

        def note(*_):
            arrived.append([not p.isnan().any().item() for p in later])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flat_parameters, "all_gather_", gather_late)
            optimizer.step()
            for layer in model.model.layers:
                layer.register_forward_hook(note)
            model.lm_head.register_forward_hook(note)
            with torch.no_grad():
                model(tokens, tokens)
        return arrived

    assert run_ranks(record, 2) == [[[False] * 4, [True] * 3 + [False], [True] * 4]] * 2
