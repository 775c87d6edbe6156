"""Causal language models for tracing, in a module that worker processes can import."""

import torch
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_layers import gather_from_tensor_model_parallel_region
from nxd_layers.hf import parallelize
from torch import Tensor, nn

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
BOTH = (torch.float64, torch.bfloat16)


class LlamaOfTwoDtypes(nn.Module):
    """The whole logits of one Llama in float64 and of another in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleList([LlamaForCausalLM(LlamaConfig(**SIZES), dtype=dtype) for dtype in BOTH])

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(gather_from_tensor_model_parallel_region(model(ids)) for model in self.models)


class HuggingFaceModels(nn.Module):
    """Logits of an unmodified Llama and Qwen of transformers, split by their plans, in float64 and bfloat16."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        self.models = nn.ModuleList()
        for name in ("llama", "qwen2"):
            config = transformers.AutoConfig.for_model(name, **SIZES, use_cache=False)
            for dtype in BOTH:
                torch.manual_seed(0)
                self.models.append(parallelize(transformers.AutoModelForCausalLM.from_config(config).to(dtype)))

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        return tuple(model(input_ids=ids, use_cache=False).logits for model in self.models)


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaOfTwoDtypes()


def llama_on_meta() -> nn.Module:
    with torch.device("meta"):
        return LlamaOfTwoDtypes()


def hugging_face() -> nn.Module:
    return HuggingFaceModels()
