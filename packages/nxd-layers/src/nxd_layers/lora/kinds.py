"""The classes of layers that can have adapters."""

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from nxd_layers.embedding import ParallelEmbedding
from nxd_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_layers.lora.adapter import LayerKind
from nxd_layers.lora.embedding import PARALLEL_EMBEDDING, PLAIN_EMBEDDING
from nxd_layers.lora.linear import COLUMN_PARALLEL_LINEAR, PLAIN_LINEAR, ROW_PARALLEL_LINEAR, TRANSPOSED_LINEAR

_KINDS: tuple[tuple[type[nn.Module], LayerKind], ...] = (
    (ColumnParallelLinear, COLUMN_PARALLEL_LINEAR),
    (RowParallelLinear, ROW_PARALLEL_LINEAR),
    (ParallelEmbedding, PARALLEL_EMBEDDING),
    (nn.Linear, PLAIN_LINEAR),
    (nn.Embedding, PLAIN_EMBEDDING),
)


def kind_of(layer: nn.Module) -> LayerKind | None:
    """How a layer is adapted; None if it cannot be."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return None  # the output of nn.MultiheadAttention, which reads the weight and never calls the layer
    if _is_conv1d(layer):
        return TRANSPOSED_LINEAR
    return next((kind for layer_class, kind in _KINDS if isinstance(layer, layer_class)), None)


def _is_conv1d(layer: nn.Module) -> bool:
    return (type(layer).__module__, type(layer).__name__) == ("transformers.pytorch_utils", "Conv1D")
