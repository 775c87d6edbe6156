"""Folders in the format of the Hugging Face hub: `model.safetensors`, or several files with an index.

Handles the tensors, and in `companions` the tokenizer files; the caller copies the configuration.
"""

from nxd_ckpt.interop.huggingface.reading import open_hugging_face
from nxd_ckpt.interop.huggingface.writing import write_hugging_face

__all__ = ["open_hugging_face", "write_hugging_face"]
