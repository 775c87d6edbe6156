"""A stack of transformer layers in plain PyTorch, cut by hand, so that both libraries run the very same stages."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """A model and its batch; `batch` is the sequences of a whole step."""

    hidden: int
    heads: int
    layers: int
    batch: int
    sequence: int

    def stack(self) -> list[nn.Module]:
        """All layers, the same on every rank."""
        torch.manual_seed(0)
        return [Layer(self.hidden, self.heads) for _ in range(self.layers)]

    def batch_of_hidden(self) -> tuple[Tensor, Tensor]:
        """Input and target `[batch, seq, hidden]`, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch, self.sequence, self.hidden)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def __str__(self) -> str:
        return (
            f"{self.layers} transformer layers, hidden {self.hidden}, {self.heads} heads, batch {self.batch}, "
            f"sequence {self.sequence}, float32"
        )


LARGE = Size(hidden=512, heads=8, layers=8, batch=8, sequence=128)
TINY = Size(hidden=16, heads=2, layers=4, batch=8, sequence=4)


class Layer(nn.Module):
    """Causal self-attention and an MLP of four times the width, each behind a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, seq, hidden]` to the same."""
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [batch, heads, seq, head_size] each
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class Layers(nn.Sequential):
    """One layer after the other."""

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, seq, hidden]` to the same."""
        for layer in self:
            hidden = layer(hidden)
        return hidden


class LastStage(nn.Module):
    """The last layers and the loss, as our pipeline has them in one stage."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss of `[batch, seq, hidden]`."""
        return mean_squared_error(self.layers(hidden), target)


class WholeModel(nn.Module):
    """All layers and the loss."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = Layers(*layers)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss of `[batch, seq, hidden]`."""
        return mean_squared_error(self.layers(hidden), target)


def chunks(layers: list[nn.Module], num_stages: int) -> list[nn.Module]:
    """As many layers to each stage."""
    length = len(layers) // num_stages
    return [Layers(*layers[start : start + length]) for start in range(0, len(layers), length)]


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The loss that all variants have."""
    return F.mse_loss(output, target)
