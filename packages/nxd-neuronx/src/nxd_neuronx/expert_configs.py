"""Configurations of mixture-of-experts layers; settings for kernels are stored but have no effect."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from nxd_neuronx.process import get_platform_lnc

_logger = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 512
DEFAULT_SKIP_MODE = (False, False)
DEFAULT_LNC_SIZE = get_platform_lnc()

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class GLUType(Enum):
    """How an expert combines gate and up projection: `act(gate) * up`, or `gate * act(gate) * up`."""

    GLU = "glu"
    SWIGLU = "swiglu"

    @classmethod
    def validate(cls, glu_type: "GLUType | str | None") -> "GLUType":
        """Return the type with this name; GLU for None.

        Raises:
            ValueError: there is no such type.
        """
        if glu_type is None:
            _logger.warning("glu_type is None; GLU is used")
            return cls.GLU
        if glu_type not in [*cls, *(it.value for it in cls)]:
            raise ValueError(f"unknown glu_type={glu_type!r}; use one of {[it.value for it in cls]}")
        return cls(glu_type)


class BlockShardStrategy(Enum):
    """How the cores of a device share blocks of tokens."""

    HI_LO = 0
    PING_PONG = 1


def to_torch_dtype(dtype_str: str) -> torch.dtype:
    """Return the dtype with this name; a ValueError unless it is float32, float16 or bfloat16."""
    if dtype_str not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype_str!r}; use one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype_str]


@dataclass
class BlockwiseMatmulConfig:
    """Settings of the kernel that multiplies tokens in blocks."""

    block_size: int
    use_block_parallel: bool
    block_sharding_strategy: BlockShardStrategy
    skip_dma_token: bool
    skip_dma_weight: bool
    logical_nc_config: int
    blockwise_nki_autograd_cls: Any
    use_torch_block_wise: bool
    parallelize_token_to_block_mapping: bool
    optimized_block_to_token_mapping: bool
    always_augment_inputs_for_blockwise_matmul: bool
    use_shard_on_intermediate_dynamic_while: bool
    use_shard_on_block_dynamic_while: bool
    num_static_blocks: int | None
    pad_num_blocks_to_even: bool = False

    @staticmethod
    def from_kwargs(**kwargs: Any) -> "BlockwiseMatmulConfig":
        """Create it with defaults for missing keys; other keys are ignored.

        Raises:
            KeyError: there is no such sharding strategy.
        """
        values: dict[str, Any] = {
            "block_size": DEFAULT_BLOCK_SIZE,
            "use_block_parallel": False,
            "block_sharding_strategy": BlockShardStrategy.HI_LO,
            "skip_dma_token": DEFAULT_SKIP_MODE[0],
            "skip_dma_weight": DEFAULT_SKIP_MODE[1],
            "logical_nc_config": DEFAULT_LNC_SIZE,
            "blockwise_nki_autograd_cls": None,
            "use_torch_block_wise": False,
            "parallelize_token_to_block_mapping": True,
            "optimized_block_to_token_mapping": True,
            "always_augment_inputs_for_blockwise_matmul": False,
            "use_shard_on_intermediate_dynamic_while": False,
            "use_shard_on_block_dynamic_while": False,
            "num_static_blocks": None,
            "pad_num_blocks_to_even": False,
        }
        values |= {name: value for name, value in kwargs.items() if name in values}
        strategy = values["block_sharding_strategy"]
        if isinstance(strategy, str):
            values["block_sharding_strategy"] = BlockShardStrategy[strategy]
        return BlockwiseMatmulConfig(**values)

    @staticmethod
    def default() -> "BlockwiseMatmulConfig":
        """Create it with defaults only."""
        return BlockwiseMatmulConfig.from_kwargs()


@dataclass
class RoutedExpertsMLPOpsConfig:
    """Sizes, activation and routing of a layer's experts."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    hidden_act: str
    glu_mlp: bool
    bias: bool = False
    glu_type: GLUType | str | None = GLUType.GLU
    hidden_act_scaling_factor: float = 1.0
    hidden_act_bias: float = 0.0
    hidden_size_actual: int | None = None
    intermediate_size_actual: int | None = None
    is_hidden_dim_shuffled: bool | None = None
    is_intermediate_dim_shuffled: bool | None = None
    use_index_calc_kernel: bool = True
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    normalize_top_k_affinities: bool = False
    early_expert_affinity_modulation: bool = False
    input_layer_init_method: Callable[[Tensor], Any] | None = None
    output_layer_init_method: Callable[[Tensor], Any] | None = None
    capacity_factor: float | None = None
    enable_spmd_rank: bool = False
    is_prefill: bool | None = None
    expert_distribution: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if self.glu_mlp:
            self.glu_type = GLUType.validate(self.glu_type)


@dataclass
class RouterConfig:
    """The router's activation function and dtype."""

    act_fn: str = "softmax"
    dtype: torch.dtype | str = torch.float32

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            self.dtype = to_torch_dtype(self.dtype)

    @staticmethod
    def from_kwargs(**kwargs: Any) -> "RouterConfig":
        """Create it from `router_act_fn` and `router_dtype`; other keys are ignored."""
        return RouterConfig(kwargs.get("router_act_fn", "softmax"), kwargs.get("router_dtype", torch.float32))


@dataclass
class MoEFusedTKGConfig:
    """Settings of the fused kernel for single tokens."""

    quantized: bool
    moe_fused_kernel_enabled: bool | None = None
    router_topk_kernel_enabled: bool | None = None
    expert_mlp_kernel_enabled: bool | None = None
    shared_mlp_kernel_enabled: bool | None = None
    norm_topk_prob: bool = False
    is_mxfp4_compute: bool | None = None
    router_mm_dtype: torch.dtype = torch.float32
