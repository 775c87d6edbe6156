"""Small models with layers whose parts are not the same on every rank: heads and a vocabulary that do not divide,
fused projections, copies of key and value heads, adapters. They take token ids and labels, and give the loss.
"""

from dataclasses import dataclass

import torch
from nxd_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, pad_model, parallel_cross_entropy
from nxd_layers.key_value_heads import kv_size_multiplier_for
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear
from nxd_lora import LoraConfig, LoraModel
from nxd_state import get_group
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, HEAD_SIZE, VOCABULARY, PADDED_VOCABULARY = 24, 8, 64, 61


@dataclass(frozen=True)
class Sizes:
    """Of a model; `is_fused` is about its projections to queries, keys and values."""

    num_heads: int = 4
    num_key_value_heads: int = 2
    vocab_size: int = VOCABULARY
    is_fused: bool = False


SIZES = {
    "fused-qkv": Sizes(is_fused=True),
    "copied-kv-heads": Sizes(num_key_value_heads=1, is_fused=True),
    "padded-heads": Sizes(num_heads=3, num_key_value_heads=3),
    "padded-fused-heads": Sizes(num_heads=3, num_key_value_heads=3, is_fused=True),
    "padded-vocabulary": Sizes(vocab_size=PADDED_VOCABULARY),
}


class Attention(nn.Module):
    """`[seq, batch, hidden]` to the same; what it makes of heads of zeros is not zero."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        lengths = [heads * HEAD_SIZE for heads in (sizes.num_heads, *[sizes.num_key_value_heads] * 2)]
        if sizes.is_fused:
            tp = get_group("tp").size
            is_padded = sizes.num_heads % tp > 0
            self.qkv = GQAQKVColumnParallelLinear(
                HIDDEN,
                lengths[:2],
                gather_output=False,
                kv_size_multiplier=1 if is_padded else kv_size_multiplier_for(sizes.num_key_value_heads, tp),
                num_key_value_heads=None if is_padded else sizes.num_key_value_heads,
            )
        else:
            self.qkv = nn.ModuleList(
                ColumnParallelLinear(HIDDEN, length, gather_output=False, pad=True) for length in lengths
            )
        self.output = RowParallelLinear(lengths[0], HIDDEN, input_is_parallel=True, pad=True)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = [layer(hidden) for layer in self.qkv] if isinstance(self.qkv, nn.ModuleList) else self.qkv(hidden)
        q, k, v = (part.unflatten(-1, (-1, HEAD_SIZE)).permute(1, 2, 0, 3) for part in parts)
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
        k = torch.tanh(k)  # without which attention would not see a bias of the keys
        mixed = torch.cos(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.output(mixed.permute(2, 0, 1, 3).flatten(2))


class Model(nn.Module):
    """An embedding, attention, and a head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.vocab_size = sizes.vocab_size
        self.embedding = ParallelEmbedding(sizes.vocab_size, HIDDEN, pad=True)
        self.attention = Attention(sizes)
        self.head = ColumnParallelLinear(HIDDEN, sizes.vocab_size, gather_output=False, pad=True)
        pad_model(self, get_group("tp").size, sizes.num_heads, [Attention])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(input_ids.t() % self.vocab_size)
        logits = self.head(hidden + self.attention(hidden))
        return parallel_cross_entropy(logits, labels.t() % self.vocab_size, vocab_size=self.vocab_size).mean()


LORA_TARGETS = ["embedding", "qkv", "output", "head"]
NAMES = [*SIZES, "lora-copied-kv-heads", "lora-padded-heads"]


def make_model(name: str) -> nn.Module:
    """The model of these `SIZES`; after "lora-" with adapters of all its layers, which alone are trained."""
    model = Model(SIZES[name.removeprefix("lora-")])
    if not name.startswith("lora-"):
        return model
    return LoraModel(model, LoraConfig(lora_rank=2, target_modules=LORA_TARGETS))
