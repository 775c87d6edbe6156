"""Import and export of other formats: Hugging Face, torch's DCP, FSDP2, DeepSpeed and NeuronX Distributed.

Every format is read as a `TensorSource`: names, shapes and dtypes at once, elements on demand. So any format can be
converted to any other with at most one tensor in memory, and nothing is unpickled without restrictions.

The module for torch's distributed checkpoints is imported on first use: it imports as much again as torch itself.
"""

from typing import TYPE_CHECKING, Any

from nxd_ckpt.interop.deepspeed import open_deepspeed
from nxd_ckpt.interop.fsdp import open_fsdp
from nxd_ckpt.interop.huggingface import open_hugging_face, write_hugging_face
from nxd_ckpt.interop.huggingface.companions import (
    GENERATION_CONFIG_FILE,
    as_extra,
    companions_in,
    is_of_tokenizer,
    read_companions,
    write_companions,
)
from nxd_ckpt.interop.neuronx import open_neuronx, write_neuronx
from nxd_ckpt.interop.source import Progress, Selection, TensorSource, from_checkpoint, read_whole, save_source

if TYPE_CHECKING:
    from nxd_ckpt.interop.torch_dcp import open_torch_dcp, write_torch_dcp

__all__ = [
    # the common interface
    "TensorSource",
    "Selection",
    "Progress",
    "read_whole",
    # ours
    "from_checkpoint",
    "save_source",
    # theirs
    "open_hugging_face",
    "write_hugging_face",
    # the files of tokenizers beside a model, and in a checkpoint
    "read_companions",
    "write_companions",
    "companions_in",
    "as_extra",
    "is_of_tokenizer",
    "GENERATION_CONFIG_FILE",
    "open_torch_dcp",
    "write_torch_dcp",
    "open_fsdp",
    "open_deepspeed",
    "open_neuronx",
    "write_neuronx",
]


def __getattr__(name: str) -> Any:
    if name not in ("open_torch_dcp", "write_torch_dcp"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}")
    from nxd_ckpt.interop import torch_dcp  # noqa: PLC0415

    return getattr(torch_dcp, name)
