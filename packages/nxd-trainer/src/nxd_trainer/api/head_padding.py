"""Padding the attention heads of a model that a config asks for, before it is cut into stages or on each stage."""

from dataclasses import dataclass

from nxd_ckpt.coordinator import coordinator_for, on_every_rank
from nxd_layers import RowParallelLinear
from nxd_layers.padding import pad_model
from nxd_state import get_tensor_model_parallel_size
from torch import nn

NUMBERS_OF_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")


@dataclass(frozen=True)
class HeadPadding:
    """What is to be padded.

    Attributes:
        num_heads: of the whole model, before padding.
        classes: of the modules whose layers are; all layers if empty.
    """

    num_heads: int
    classes: tuple[type[nn.Module], ...]


def plan_padding(module: nn.Module) -> HeadPadding:
    """Padding of a whole model, which may be on the meta device.

    Padded are the layers of modules with a row-parallel layer of their own that takes whole heads in: it takes the
    padding away again. So an output head, and what does not come in heads, stays as it is.

    Raises:
        ValueError: the model does not say how many heads it has.
    """
    num_heads = _number_of_heads(module)
    classes = {
        type(part): None
        for part in module.modules()
        if any(isinstance(it, RowParallelLinear) and it.input_size % num_heads == 0 for it in part.children())
    }
    return HeadPadding(num_heads, tuple(classes))


def pad_heads(model: nn.Module, padding: HeadPadding) -> None:
    """Pad a model, or a rank's stages of it. Called by all ranks, which fail together.

    Raises:
        ValueError: a layer cannot be padded.
    """

    def pad() -> None:
        present = tuple(cls for cls in padding.classes if any(type(module) is cls for module in model.modules()))
        if present or not padding.classes:  # a stage may have none
            pad_model(model, get_tensor_model_parallel_size(), padding.num_heads, present)

    on_every_rank(coordinator_for(None), "padding the model", pad, error_type=ValueError)


def _number_of_heads(module: nn.Module) -> int:
    config = getattr(module, "config", None)
    for name in NUMBERS_OF_HEADS:
        if isinstance(heads := getattr(config, name, None), int):
            return heads
    raise ValueError(
        f"pad_model=True needs the number of attention heads, but {type(module).__name__} has no "
        f"config.{NUMBERS_OF_HEADS[0]}; give it one, or call pad_model in model_fn"
    )
