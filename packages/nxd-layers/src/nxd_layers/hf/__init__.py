"""Models of Hugging Face's transformers, tensor parallel without a line rewritten.

`parallelize` follows the plan that a model brings along (or one given by the user) and puts parallel layers in the
places of its linears and embeddings, so that every parameter keeps the name and, as a logical tensor, the shape that
it has in the unsharded model. What each style of a plan means is a table, which `register_style` extends.
"""

from nxd_layers.hf.initialization import param_init_fn_of
from nxd_layers.hf.parallelize import parallelize
from nxd_layers.hf.styles import Target, register_style
from nxd_layers.hf.supported_models import remember_as_compared
from nxd_layers.hf.transformers_models import is_transformers_model

__all__ = [
    "parallelize",
    "register_style",
    "Target",
    "param_init_fn_of",
    "is_transformers_model",
    "remember_as_compared",
]
