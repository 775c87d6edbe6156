"""Loading and saving Hugging Face weights, with models of any layout.

`load_pretrained` streams a folder into a model's shards, `save_pretrained` writes one from them, `stream_weights`
yields the same tensors to a program, and `import_hugging_face` makes a checkpoint of one without a model in memory.
Configs are read and made without weights.
"""

from nxd_engine.hugging_face.conversion import (
    check_keys,
    config_of_type,
    full_config,
    leave_out_masks,
    model_on_meta,
    text_config,
    with_architecture,
)
from nxd_engine.hugging_face.folder import CONFIG_FILE, read_config
from nxd_engine.hugging_face.loading import import_hugging_face, load_pretrained, read_model_config, stored_shapes
from nxd_engine.hugging_face.saving import save_pretrained, whole_state_dict
from nxd_engine.hugging_face.streaming import stream_weights

__all__ = [
    # weights
    "load_pretrained",
    "save_pretrained",
    "whole_state_dict",
    "stream_weights",
    "import_hugging_face",
    # configs
    "CONFIG_FILE",
    "read_config",
    "read_model_config",
    "config_of_type",
    "full_config",
    "text_config",
    "check_keys",
    "with_architecture",
    "model_on_meta",
    "leave_out_masks",
    "stored_shapes",
]
