"""Llama in plain PyTorch, as one would write it for one process: the floor, and what DTensor parallelizes.

Only torch's own layers, hidden states `[batch, seq, hidden]`, parameter names as in Hugging Face. Nothing in it
knows of ranks: the number of heads follows from the projections' width, so a part of the heads works as well.
"""

import torch
from nxd_engine.models import LlamaConfig
from torch import Tensor, nn
from torch.nn import functional as F


def rotary_tables(length: int, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[seq, head_size]`."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of elements of `[batch, heads, seq, head_size]` by their position's angle."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


class PlainAttention(nn.Module):
    """Causal self-attention; as many key-value heads as heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, seq, hidden]` to the same."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class PlainMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, seq, hidden]` to the same."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class PlainDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = PlainAttention(config)
        self.mlp = PlainMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, seq, hidden]` to the same."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class PlainModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([PlainDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids `[batch, seq]` to hidden states `[batch, seq, hidden]`."""
        hidden = self.embed_tokens(input_ids)
        cos, sin = rotary_tables(input_ids.shape[1], self.config)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        output: Tensor = self.norm(hidden)
        return output


class PlainLlama(nn.Module):
    """Llama with its head; weights as in a new Llama, from torch's default generator."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = PlainModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config.initializer_range)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of token ids and labels `[batch, seq]`."""
        logits = self.lm_head(self.model(input_ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
