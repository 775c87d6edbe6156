"""`neuronx_distributed.modules.moe.blockwise`: what fed the kernel that multiplies tokens in blocks."""

from nxd_neuronx.expert_configs import BlockShardStrategy
from nxd_neuronx.not_here import not_here

(
    torch_to_nki_dtype,
    initialize_nki_components,
    initialize_training_kernels,
    dynamic_slice_3D,  # noqa: N816
    dynamic_slice_2D,  # noqa: N816
    dynamic_slice_1D,  # noqa: N816
    BlockwiseMatmulArgs,
    get_data,
    TorchBlockwiseTraining,
    KernelConfig,
    KernelAvailabilityError,
    check_kernel_availability,
    check_blockwise_mm_kernel_compatibility,
    can_use_blockwise_matmul_nki,
    augment_inputs_for_padded_blockwise_matmul,
    BlockwiseMatmulNKIFunc,
    BlockwiseMatmulMXNKIFunc,
) = not_here(
    __name__,
    "experts",
    "torch_to_nki_dtype",
    "initialize_nki_components",
    "initialize_training_kernels",
    "dynamic_slice_3D",
    "dynamic_slice_2D",
    "dynamic_slice_1D",
    "BlockwiseMatmulArgs",
    "get_data",
    "TorchBlockwiseTraining",
    "KernelConfig",
    "KernelAvailabilityError",
    "check_kernel_availability",
    "check_blockwise_mm_kernel_compatibility",
    "can_use_blockwise_matmul_nki",
    "augment_inputs_for_padded_blockwise_matmul",
    "BlockwiseMatmulNKIFunc",
    "BlockwiseMatmulMXNKIFunc",
)

__all__ = [
    "BlockShardStrategy",
    "torch_to_nki_dtype",
    "initialize_nki_components",
    "initialize_training_kernels",
    "dynamic_slice_3D",
    "dynamic_slice_2D",
    "dynamic_slice_1D",
    "BlockwiseMatmulArgs",
    "get_data",
    "TorchBlockwiseTraining",
    "KernelConfig",
    "KernelAvailabilityError",
    "check_kernel_availability",
    "check_blockwise_mm_kernel_compatibility",
    "can_use_blockwise_matmul_nki",
    "augment_inputs_for_padded_blockwise_matmul",
    "BlockwiseMatmulNKIFunc",
    "BlockwiseMatmulMXNKIFunc",
]
