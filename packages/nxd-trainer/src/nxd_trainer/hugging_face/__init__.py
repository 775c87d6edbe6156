"""Weights in Hugging Face folders, in and out of models of any layout.

`load_pretrained` streams a folder into a model's shards, `save_pretrained` writes one from them, and
`import_hugging_face` makes a checkpoint of one without a model in memory.
"""

from nxd_trainer.hugging_face.loading import import_hugging_face, load_pretrained
from nxd_trainer.hugging_face.saving import save_pretrained

__all__ = ["load_pretrained", "save_pretrained", "import_hugging_face"]
