"""The classes of layers that can have adapters, and the names by which a target finds them."""

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.lora.adapter import LayerKind
from nxd_layers.lora.embedding import PARALLEL_EMBEDDING, PLAIN_EMBEDDING
from nxd_layers.lora.linear import COLUMN_PARALLEL_LINEAR, PLAIN_LINEAR, ROW_PARALLEL_LINEAR, TRANSPOSED_LINEAR
from nxd_layers.lora.qkv import QKV_LINEAR
from nxd_layers.qkv_linear import GQAQKVColumnParallelLinear

_KINDS: tuple[tuple[type[nn.Module], LayerKind], ...] = (
    (ColumnParallelLinear, COLUMN_PARALLEL_LINEAR),
    (RowParallelLinear, ROW_PARALLEL_LINEAR),
    (GQAQKVColumnParallelLinear, QKV_LINEAR),
    (ParallelEmbedding, PARALLEL_EMBEDDING),
    (nn.Linear, PLAIN_LINEAR),
    (nn.Embedding, PLAIN_EMBEDDING),
)


def kind_of(layer: nn.Module) -> LayerKind | None:
    """How a layer is adapted; None if it cannot be."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return None  # the output of nn.MultiheadAttention, which reads the weight and never calls the layer
    if getattr(layer, "takes_no_adapter", False):
        return None
    if _is_conv1d(layer):
        return TRANSPOSED_LINEAR
    return next((kind for layer_class, kind in _KINDS if isinstance(layer, layer_class)), None)


def adaptable_layers(module: nn.Module) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The layers of a model, and of the unsharded model within them, that can have adapters.

    Returns:
        By name, in the model's order: the name of the layer that holds it, and which parts of that it is.
    """
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name, layer in module.named_modules():
        kind = kind_of(layer)
        if kind is None:
            continue
        found[name] = (name, tuple(kind.parts))
        parent = name.rpartition(".")[0]
        for part, beside in kind.parts.items():
            if part:
                found[f"{parent}.{beside}" if parent else beside] = (name, (part,))
    return found


def _is_conv1d(layer: nn.Module) -> bool:
    return (type(layer).__module__, type(layer).__name__) == ("transformers.pytorch_utils", "Conv1D")
