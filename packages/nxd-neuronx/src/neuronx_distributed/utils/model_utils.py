"""`neuronx_distributed.utils.model_utils`: making and moving models, from nxd_state and nxd_neuronx."""

from nxd_neuronx.models import (
    analyze_shared_parameters,
    check_delay_tracing,
    get_delay_tracing,
    get_model_sequential,
    has_fake_tensors,
    init_on_device,
    is_hf_accelerate_available,
    is_hf_pretrained_model,
    is_hf_transformers_available,
    is_nxdt_available,
    is_nxdt_pretrained_model,
    maybe_materalize_model,
    preserve_parallel_attributes,
    preserve_shared_weights,
    recursive_filter,
    reinit_model,
    retie_shared_weights,
)
from nxd_neuronx.platform import LogicalNCConfig, get_platform_lnc
from nxd_neuronx.process import get_local_world_size
from nxd_state import move_model_to_device

__all__ = [
    "move_model_to_device",
    "analyze_shared_parameters",
    "check_delay_tracing",
    "get_delay_tracing",
    "get_model_sequential",
    "has_fake_tensors",
    "is_hf_accelerate_available",
    "is_hf_pretrained_model",
    "is_hf_transformers_available",
    "is_nxdt_available",
    "is_nxdt_pretrained_model",
    "maybe_materalize_model",
    "preserve_parallel_attributes",
    "preserve_shared_weights",
    "recursive_filter",
    "reinit_model",
    "retie_shared_weights",
    "LogicalNCConfig",
    "get_platform_lnc",
    "get_local_world_size",
    "init_on_device",
]
