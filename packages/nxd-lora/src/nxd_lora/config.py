"""`LoraConfig`: the user's settings for adapters. `targets` finds the layers that a target names."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# The fields that describe an adapter, in checkpoints and PEFT's files; the others say how to save and load it.
DESCRIBED = (
    *("lora_rank", "lora_alpha", "lora_dropout", "bias", "target_modules", "target_parameters", "modules_to_save"),
    *("use_rslora", "use_dora", "init_lora_weights"),
)
BIAS_MODES = ("none", "all", "lora_only")
INITIALIZATIONS = ("default", "gaussian")
_FLAGS = (
    "enable_lora",
    "use_rslora",
    "use_dora",
    "save_lora_base",
    "merge_lora",
    "save_lora_config_adapter",
    "load_lora_from_ckpt",
    "lora_verbose",
    "merge_sharded_lora",
)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021): `y = x W^T + scale * dropout(x) A^T B^T`, where only A and B train.

    Attributes:
        enable_lora: whether to add adapters; False leaves the model unchanged.
        lora_rank: r, the rows of A and columns of B.
        lora_alpha: numerator of the scale: lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`.
        lora_dropout: probability of dropping an element of the branch's input; not used on embeddings.
        bias: biases of the model that train as well: "none", "all", or "lora_only" for those of adapted layers.
        target_modules: a list of layer names, ends of names (`"q_proj"`), or parts between dots (`"self_attn"`); or one
            regular expression that matches the whole name; or "all-linear": every linear layer except the output head.
        target_parameters: names, or ends of names, of fused expert weights (`"experts.gate_up_proj"`), which get an
            adapter for each expert; not with dropout or DoRA. `target_modules` may then be None.
        use_rslora: rank-stabilized scale (Kalajdzievski 2023).
        use_dora: a trained magnitude for each row of the adapted weight (Liu et al. 2024); not with dropout.
        modules_to_save: names, or ends of names, of modules that are trained in full and saved with the adapter. As in
            PEFT, an end may begin within a part: `"norm"` includes `input_layernorm`.
        init_lora_weights: distribution of A: "default", as nn.Linear's weight, or "gaussian", N(0, 1/r^2). B starts at
            zero.
        save_lora_base: save the base model as well.
        merge_lora: save base and adapter merged; needs `save_lora_base`.
        save_lora_config_adapter: keep this config inside the checkpoint only; False writes it as
            `lora_adapter/adapter_config.json`, too.
        load_lora_from_ckpt: load the adapter and its settings above from a checkpoint.
        lora_save_dir: folder of that checkpoint.
        lora_load_tag: its tag; the newest one if None.
        lora_verbose: whether rank 0 prints which layers have been adapted.
        merge_sharded_lora: accepted without effect: checkpoints always hold whole adapters, not ranks' shards.

    Raises:
        ValueError: lists every mistake.
    """

    enable_lora: bool = True
    lora_rank: int = 16
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    bias: str = "none"
    target_modules: Sequence[str] | str | None = None
    use_rslora: bool = False
    init_lora_weights: str = "default"
    save_lora_base: bool = False
    merge_lora: bool = False
    save_lora_config_adapter: bool = True
    load_lora_from_ckpt: bool = False
    lora_save_dir: str | None = None
    lora_load_tag: str | None = None
    lora_verbose: bool = False
    merge_sharded_lora: bool = True
    use_dora: bool = False
    modules_to_save: Sequence[str] | None = None
    target_parameters: Sequence[str] | None = None

    def __post_init__(self) -> None:
        mistakes = [
            f"{name}={getattr(self, name)!r} must be True or False"
            for name in _FLAGS
            if not isinstance(getattr(self, name), bool)
        ]
        mistakes += _mistakes_in_numbers(self)
        if self.bias not in BIAS_MODES:
            mistakes.append(f"bias={self.bias!r} must be one of {', '.join(BIAS_MODES)}")
        if self.init_lora_weights not in INITIALIZATIONS:
            mistakes.append(f"init_lora_weights={self.init_lora_weights!r} must be one of {', '.join(INITIALIZATIONS)}")
        if self.target_modules or not self.target_parameters:
            mistakes += _mistakes_in_targets(self.target_modules)
        mistakes += _mistakes_in_parameters(self)
        saved = self.modules_to_save
        if saved is not None and (isinstance(saved, str) or not all(it and isinstance(it, str) for it in saved)):
            mistakes.append(f"modules_to_save={saved!r} must be a list of names, such as ['lm_head']")
        if self.use_dora is True and self.lora_dropout:
            mistakes.append(f"use_dora=True does not support lora_dropout={self.lora_dropout}; set it to 0")
        if self.merge_lora is True and self.save_lora_base is False:
            mistakes.append("merge_lora=True saves the merged base model, so it needs save_lora_base=True")
        if self.load_lora_from_ckpt is True and not self.lora_save_dir:
            mistakes.append("load_lora_from_ckpt=True needs lora_save_dir, the folder of the checkpoint")
        if mistakes:
            raise ValueError("LoraConfig: " + "; ".join(mistakes))

    @property
    def scale(self) -> float:
        """The factor of the branch's output."""
        return self.lora_alpha / (math.sqrt(self.lora_rank) if self.use_rslora else self.lora_rank)


def _mistakes_in_numbers(config: LoraConfig) -> list[str]:
    rank, alpha, dropout = config.lora_rank, config.lora_alpha, config.lora_dropout
    mistakes = []
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        mistakes.append(f"lora_rank={rank!r} must be an integer, 1 or more")
    if not _is_number(alpha) or not 0 < alpha < math.inf:
        mistakes.append(f"lora_alpha={alpha!r} must be a positive number")
    if not _is_number(dropout) or not 0 <= dropout < 1:
        mistakes.append(f"lora_dropout={dropout!r} must be a probability below 1")
    return mistakes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mistakes_in_targets(targets: Any) -> list[str]:
    if targets is None:
        return []
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            return [f"target_modules={targets!r} is not a regular expression ({error}); pass plain names in a list"]
        return [] if targets else ["target_modules='' matches nothing"]
    if not isinstance(targets, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in targets):
        return [f"target_modules={targets!r} must be a list of names, or one regular expression"]
    return [] if targets and all(targets) else [f"target_modules={targets!r} must hold at least one name, none empty"]


def _mistakes_in_parameters(config: LoraConfig) -> list[str]:
    names = config.target_parameters
    if names is None:
        return []
    if isinstance(names, str) or not names or not all(it and isinstance(it, str) for it in names):
        return [f"target_parameters={names!r} must be a list of names, such as ['experts.gate_up_proj']"]
    mistakes = []
    if config.lora_dropout:  # dropout differs per token, so it cannot be part of the weights
        mistakes.append(f"target_parameters does not support lora_dropout={config.lora_dropout}; set it to 0")
    if config.use_dora is True:
        mistakes.append("target_parameters does not support use_dora=True; set it to False")
    return mistakes
