"""Tensor, sequence, context and expert parallelism for models of Hugging Face's transformers, with their own code.

`parallelize` follows the model's own plan (or one given by the user) and replaces linears and embeddings by parallel
layers, so that every parameter keeps the name and, as a logical tensor, the shape that it has in the unsharded model.
The styles of a plan are in a table, to which `register_style` adds.
"""

from nxd_layers.hf.context_parallel import cuts_sequences
from nxd_layers.hf.initialization import param_init_fn_of
from nxd_layers.hf.parallelize import parallelize
from nxd_layers.hf.plans import has_plan, number_of_experts
from nxd_layers.hf.static_shapes import use_static_shapes
from nxd_layers.hf.styles import Target, register_style
from nxd_layers.hf.supported_models import remember_as_compared
from nxd_layers.hf.transformers_models import find_routers
from nxd_layers.hf.whole_head import WholeHead

__all__ = [
    "parallelize",
    "cuts_sequences",
    "register_style",
    "Target",
    "find_routers",
    "number_of_experts",
    "use_static_shapes",
    "param_init_fn_of",
    "WholeHead",
    "has_plan",
    "remember_as_compared",
]
