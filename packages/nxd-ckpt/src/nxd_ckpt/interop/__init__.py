"""Import and export of other formats: Hugging Face folders, torch distributed checkpoints, NeuronX Distributed layouts.

Every format is read as a `TensorSource`: names, shapes and types at once, the elements when they are asked for. So any
of them can be written as any other, with no more than one tensor in memory, and none of them is ever unpickled without
restrictions.

torch's distributed checkpoints are imported when they are first used: they bring in as much again as torch itself.
"""

from typing import TYPE_CHECKING, Any

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
from nxd_ckpt.interop.scratch import save_source
from nxd_ckpt.interop.source import Progress, Selection, TensorSource, from_checkpoint, read_whole

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
    "open_neuronx",
    "write_neuronx",
]


def __getattr__(name: str) -> Any:
    if name not in ("open_torch_dcp", "write_torch_dcp"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}")
    from nxd_ckpt.interop import torch_dcp  # noqa: PLC0415

    return getattr(torch_dcp, name)
