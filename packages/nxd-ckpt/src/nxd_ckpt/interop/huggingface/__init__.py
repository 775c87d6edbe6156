"""Folders as the Hugging Face hub has them: `model.safetensors`, or several files and `model.safetensors.index.json`.

The tensors, and in `companions` the files of tokenizers; the caller copies the configuration.
"""

from nxd_ckpt.interop.huggingface.reading import open_hugging_face
from nxd_ckpt.interop.huggingface.writing import write_hugging_face

__all__ = ["open_hugging_face", "write_hugging_face"]
