"""Llamas to measure: ours under its config, and transformers' own under plain PyTorch, of the same sizes."""

from dataclasses import asdict, dataclass

import torch
from nxd_engine import (
    NxDModel,
    NxDOptimizer,
    initialize_parallel_model,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
)
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    config: LlamaConfig
    batch: int
    length: int

    def tokens(self, device: torch.device) -> dict[str, Tensor]:
        """Inputs and labels, `[batch, length]`."""
        ids = torch.randint(self.config.vocab_size, (self.batch, self.length), device=device)
        return {"input_ids": ids, "labels": ids}

    @property
    def parameters(self) -> int:
        """Weights of the model, those of the input table left out, which multiply nothing."""
        it = self.config
        head = it.hidden_size // it.num_attention_heads
        attention = 2 * it.hidden_size * head * (it.num_attention_heads + it.num_key_value_heads)
        layers = it.num_hidden_layers * (attention + 3 * it.hidden_size * it.intermediate_size)
        return layers + it.vocab_size * it.hidden_size

    def flops(self) -> float:
        """Of a step, forward and backward: 6 per weight and token, and those of causal attention (PaLM, appendix B)."""
        tokens = self.batch * self.length
        attention = 6 * self.config.num_hidden_layers * self.config.hidden_size * self.length
        return tokens * (6.0 * self.parameters + attention)


ONE_BILLION = Size(
    LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    ),
    batch=8,
    length=2048,
)
TINY = Size(
    LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    ),
    batch=4,
    length=128,
)


def size_for(device: torch.device) -> Size:
    """One billion parameters on a GPU; a tiny one where only the check itself is tried."""
    return TINY if device.type == "cpu" else ONE_BILLION


def ours(size: Size, device: torch.device, *, zero1: bool = False) -> tuple[NxDModel, NxDOptimizer]:
    """Our Llama in bfloat16 with AdamW, in the process group that is there."""
    config = neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero1, "grad_clipping": False})
    with device:
        model = initialize_parallel_model(config, lambda: LlamaForCausalLM(size.config, dtype=torch.bfloat16))
    parameters = model.parameters()
    return model, initialize_parallel_optimizer(config, torch.optim.AdamW, parameters, lr=1e-4, fused=True)


def plain(size: Size, device: torch.device) -> nn.Module:
    """transformers' Llama in bfloat16."""
    from transformers import LlamaConfig as HuggingFaceConfig  # noqa: PLC0415 - takes seconds
    from transformers import LlamaForCausalLM as HuggingFaceLlama  # noqa: PLC0415

    sizes = asdict(size.config)
    theta = sizes.pop("rope_theta")
    config = HuggingFaceConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": theta}, use_cache=False)
    with device:
        model: nn.Module = HuggingFaceLlama(config).to(torch.bfloat16)
    return model
