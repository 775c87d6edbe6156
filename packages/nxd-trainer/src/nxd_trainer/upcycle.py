"""Upcycling: turns a dense Hugging Face model into a mixture of experts with the same outputs (Komatsuzaki et al. 2022,
"Sparse Upcycling").

Every expert of a layer is a copy of its MLP, and the weights of a token's experts add up to one, so it does not matter
which ones a new router chooses. They diverge in training, since each gets different tokens.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nxd_ckpt import Shard, TensorInfo
from nxd_ckpt.boxes import Box
from nxd_ckpt.interop import TensorSource, read_companions
from nxd_engine.hugging_face.conversion import full_config
from nxd_engine.hugging_face.folder import read_config
from nxd_engine.hugging_face.loading import whole_model_tensors
from nxd_engine.hugging_face.saving import write_folder

_MLP = re.compile(r"(.*\.layers\.(\d+))\.mlp\.(gate_proj|up_proj|down_proj)\.weight")
_NOT_COPIED = ("architectures", "model_type", "transformers_version", "_name_or_path", "attribute_map")


@dataclass(frozen=True)
class _Family:
    """A mixture-of-experts architecture and the names in its files."""

    model_type: str  # in transformers
    architecture: str  # class in transformers
    block: str = "mlp"  # name of a layer's block with the experts
    projections: Mapping[str, str] = field(  # of an expert, by those of the dense MLP
        default_factory=lambda: {name: name for name in ("gate_proj", "up_proj", "down_proj")}
    )
    experts_key: str = "num_experts"  # config key for the number of experts per layer
    further: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda dense: {}  # further keys, given the dense config
    has_shared_expert: bool = False  # whether there is also a shared expert, which adds nothing at first
    has_biases: bool = True  # whether attention has biases if the dense model does


def _of_qwen(dense: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "moe_intermediate_size": dense["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_MIXTRAL = _Family(
    "mixtral",
    "MixtralForCausalLM",
    "block_sparse_moe",
    {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    experts_key="num_local_experts",
    has_biases=False,
)
_FAMILIES = {
    "llama": _MIXTRAL,
    "mistral": _MIXTRAL,
    "qwen2": _Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        further=lambda dense: {
            **_of_qwen(dense),
            "shared_expert_intermediate_size": dense["intermediate_size"],
            "qkv_bias": True,
        },
        has_shared_expert=True,
    ),
    "qwen3": _Family("qwen3_moe", "Qwen3MoeForCausalLM", further=_of_qwen),
}


def upcycle(
    dense: str | Path, target: str | Path, *, num_experts: int, top_k: int = 2, max_shard_size: int | str = "5GB"
) -> Path:
    """Write a mixture of experts whose layers have copies of a dense model's MLPs. Memory: the largest tensor.

    Routers are initialized from a fixed seed, with the model's `initializer_range`. A Qwen2-MoE also has a shared
    expert, with the MLP's weights except its last projection, which is zero.

    Args:
        dense: folder of a Llama, Mistral, Qwen2 or Qwen3, in safetensors.
        target: folder to write, with the dense model's tokenizer.
        num_experts: experts per layer.
        top_k: experts per token.
        max_shard_size: maximum bytes of tensors in one file, such as "5GB".

    Returns:
        The target folder.

    Raises:
        ValueError: the dense model's type is not supported, it has biases that the mixture lacks, or the target already
            holds a model.
        CheckpointError: the files cannot be read.
    """
    if num_experts < 2 or not 1 <= top_k <= num_experts:
        raise ValueError(
            f"--experts {num_experts} --top-k {top_k}: use 2 or more experts, and a top-k from 1 to that number"
        )
    given = read_config(dense)
    family = _FAMILIES.get(str(given.get("model_type")))
    if family is None:
        raise ValueError(
            f"{dense} is a model of type {given.get('model_type')!r}; those of {', '.join(_FAMILIES)} can be upcycled"
        )
    config = full_config(given)
    if "initializer_range" not in config:
        raise ValueError("completing the config needs transformers: pip install transformers")
    source = whole_model_tensors(dense)
    biases = sorted(name for name in source.tensors if name.endswith(".bias"))
    if biases and not family.has_biases:
        raise ValueError(f"{dense} has {biases[0]}, but {family.architecture} has no biases; it cannot be upcycled")
    mixture = {
        **{key: value for key, value in config.items() if key not in _NOT_COPIED},
        "architectures": [family.architecture],
        "model_type": family.model_type,
        family.experts_key: num_experts,
        "num_experts_per_tok": top_k,
        **family.further(config),
    }
    upcycled = _upcycled(source, family, num_experts, float(config["initializer_range"]))
    write_folder(upcycled, target, mixture, read_companions(dense), max_shard_size=max_shard_size)
    return Path(target)


def _upcycled(source: TensorSource, family: _Family, num_experts: int, std: float) -> "_Upcycled":
    copies: dict[str, str] = {}
    made: dict[str, _NewTensor] = {}
    for name, info in source.tensors.items():
        found = _MLP.fullmatch(name)
        if found is None:
            copies[name] = name
            continue
        layer, number, projection = found.groups()
        block = f"{layer}.{family.block}"
        for expert in range(num_experts):
            copies[f"{block}.experts.{expert}.{family.projections[projection]}.weight"] = name
        hidden = info.global_shape[0 if projection == "down_proj" else 1]
        if projection == "gate_proj":
            router = TensorInfo(info.dtype, (num_experts, hidden))
            made[f"{block}.gate.weight"] = _NewTensor(router, std, seed=int(number))
        if family.has_shared_expert:
            shared = f"{block}.shared_expert.{projection}.weight"
            if projection == "down_proj":
                made[shared] = _NewTensor(info)
                made[f"{block}.shared_expert_gate.weight"] = _NewTensor(TensorInfo(info.dtype, (1, hidden)))
            else:
                copies[shared] = name
    return _Upcycled(source, copies, made)


@dataclass(frozen=True)
class _NewTensor:
    """A tensor that the dense model does not have: random, with that standard deviation, or zero."""

    info: TensorInfo
    std: float = 0.0
    seed: int = 0

    def values(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return (torch.randn(self.info.global_shape, generator=generator) * self.std).to(self.info.dtype)


@dataclass(frozen=True)
class _Upcycled:
    """The mixture's tensors by their names in its files; a `TensorSource`."""

    source: TensorSource  # the dense model's tensors
    copies: Mapping[str, str]  # the dense tensor that each copied tensor comes from
    made: Mapping[str, _NewTensor]  # new tensors
    objects: Any = None
    is_mapped: bool = False

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        of_dense = self.source.tensors
        return {name: of_dense[dense] for name, dense in self.copies.items()} | {
            name: it.info for name, it in self.made.items()
        }

    def shards(self, name: str, box: Box) -> Sequence[Shard]:
        if name in self.made:
            return [Shard(self.made[name].values(), (0,) * len(box.shape))]
        return self.source.shards(self.copies[name], box)
