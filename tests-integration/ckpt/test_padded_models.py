"""Checkpoints of models with padded heads and vocabulary: they hold the real tensors, and load at every degree."""

import nxd_ckpt
import pytest
import torch
from nxd_engine.checkpoints.optimizer_state import allocate_optimizer_state, optimizer_state
from nxd_engine.checkpoints.state import model_state
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallel_cross_entropy
from nxd_layers.head_padding import pad_model
from nxd_state import initialize_model_parallel
from nxd_testing import run_on_ranks
from torch import nn
from torch.nn import functional as F

VOCAB, HIDDEN, HEADS, HEAD_SIZE = 13, 8, 6, 2
SHAPES = {
    "embedding.weight": (VOCAB, HIDDEN),
    "attention.qkv.weight": (3 * HEADS * HEAD_SIZE, HIDDEN),
    "attention.qkv.bias": (3 * HEADS * HEAD_SIZE,),
    "attention.output.weight": (HIDDEN, HEADS * HEAD_SIZE),
    "attention.output.bias": (HIDDEN,),
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = ColumnParallelLinear(
            HIDDEN, 3 * HEADS * HEAD_SIZE, gather_output=False, dtype=torch.float64, stride=3, pad=True
        )
        self.output = RowParallelLinear(
            HEADS * HEAD_SIZE, HIDDEN, input_is_parallel=True, dtype=torch.float64, pad=True
        )

    def forward(self, hidden):  # [batch, seq, hidden]
        q, k, v = (x.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for x in self.qkv(hidden).chunk(3, dim=-1))
        mixed = torch.cos(F.scaled_dot_product_attention(q, k, v, is_causal=True))  # not zero in heads of zeros
        return self.output(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A tied language model; neither its heads nor its vocabulary divide by four."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = ParallelEmbedding(VOCAB, HIDDEN, dtype=torch.float64, pad=True)
        self.attention = Attention()
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, False, gather_output=False, dtype=torch.float64, pad=True)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.embedding(ids)
        logits = self.head(hidden + self.attention(hidden))
        return parallel_cross_entropy(logits, ids.roll(-1, 1), vocab_size=VOCAB).mean()


def build(tp, seed):
    if tp > 1:
        initialize_model_parallel(tensor_model_parallel_size=tp)
    model = pad_model(Model(seed), tp, HEADS, [Attention])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


def train(model, optimizer, steps):
    ids = torch.arange(VOCAB).view(1, -1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_and_save(root, tp):
    model, optimizer = build(tp, seed=0)
    train(model, optimizer, 2)
    nxd_ckpt.save(root, "a", model_state(model) | optimizer_state(model, optimizer))
    return train(model, optimizer, 2)


def load_and_train(root, tp):
    model, optimizer = build(tp, seed=1)
    stored = {
        name: (info.dtype, info.global_shape) for name, info in nxd_ckpt.open_checkpoint(root, "a").tensors.items()
    }
    allocate_optimizer_state(model, optimizer, stored)
    nxd_ckpt.load(root, "a", into=model_state(model) | optimizer_state(model, optimizer))
    return train(model, optimizer, 2)


@pytest.mark.parametrize("save_tp", [1, 4])
def test_checkpoint_of_a_padded_model_goes_on_at_other_degrees(tmp_path, save_tp):
    root = str(tmp_path)
    expected = run_on_ranks(train_and_save, save_tp, root, save_tp)[0]

    checkpoint = nxd_ckpt.open_checkpoint(root, "a")
    assert {name: checkpoint.read(name).shape for name in SHAPES} == SHAPES
    for load_tp in (1, 2, 4):
        for losses in run_on_ranks(load_and_train, load_tp, root, load_tp):
            assert losses == pytest.approx(expected, rel=1e-10)


def test_checkpoint_of_a_padded_model_equals_that_of_the_unpadded_one(tmp_path):
    for tp in (1, 4):
        run_on_ranks(train_and_save, tp, str(tmp_path / str(tp)), tp)

    unpadded, padded = (nxd_ckpt.open_checkpoint(str(tmp_path / str(tp)), "a") for tp in (1, 4))

    assert padded.tensors.keys() == unpadded.tensors.keys()
    for name in unpadded.tensors:
        torch.testing.assert_close(padded.read(name), unpadded.read(name), rtol=1e-9, atol=1e-11)
