"""`neuronx_distributed.utils.medusa_utils`: Medusa's trees of candidates, from nxd_neuronx."""

from nxd_neuronx.sampling import (
    TOPK,
    evaluate_posterior,
    generate_candidates,
    generate_medusa_buffers,
    pad_path,
    update_inference_inputs,
)

__all__ = [
    "TOPK",
    "evaluate_posterior",
    "generate_candidates",
    "generate_medusa_buffers",
    "pad_path",
    "update_inference_inputs",
]
