"""Tensor-parallel plans: how patterns match a model, and plans of our own for types of transformers' models.

A plan is a dict from patterns to names of styles, as transformers has them: a pattern is a path in which `*` stands for
one part, such as "model.layers.*.self_attn.q_proj". A path is that of a module or of a parameter.
`ADDED_PLANS` has the model types for which transformers has no plan, or one that leaves parts out.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from torch import nn

from nxd_layers.hf.supported_models import check_expert_parallel, check_tensor_parallel
from nxd_layers.hf.transformers_models import (
    base_model_path,
    model_type_of,
    text_config,
    transformers_expert_plan,
    transformers_plan,
)

Plan: TypeAlias = Mapping[str, str] | Literal["own"] | None  # as `parallelize` takes it

EP_DISPATCH = "ep_dispatch_experts"  # the style of a module of experts that are distributed over ranks
GROUPED_GEMM = "grouped_gemm"  # the style of its parameters
EXPERT_STYLES = (EP_DISPATCH, GROUPED_GEMM)


def layer_styles(model: Any, plan: Plan) -> dict[str, str]:
    """Return the styles of the model's layers by path, those of distributed experts left out.

    Raises:
        ValueError: there is no plan, models of this type have not been compared, or a given pattern matches nothing.
    """
    if isinstance(plan, Mapping):
        given = {pattern: style for pattern, style in plan.items() if style not in EXPERT_STYLES}
        return named_styles(model, given, must_match=True)
    own = tensor_parallel_plan(model)
    if not own:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan; give one, such as "
            'plan={"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}'
        )
    if plan is None:
        check_tensor_parallel(model)
    return named_styles(model, own, must_match=False)


def expert_styles(model: Any, plan: Plan) -> dict[str, str]:
    """Return the styles of the model's distributed experts and of their parameters, by path.

    Raises:
        ValueError: as for `layer_styles`.
    """
    given = plan if isinstance(plan, Mapping) else expert_parallel_plan(model)
    if given and plan is None:
        check_expert_parallel(model)
    of_experts = {pattern: style for pattern, style in given.items() if style in EXPERT_STYLES}
    styles = named_styles(model, of_experts, must_match=isinstance(plan, Mapping))
    if not styles:
        raise ValueError(
            f"{type(model).__name__} has no expert-parallel plan; leave expert_parallel out, or give a plan, such as "
            'plan={"layers.*.experts": "ep_dispatch_experts", "layers.*.experts.down_proj": "grouped_gemm", ...}'
        )
    return styles


def tensor_parallel_plan(model: Any) -> dict[str, str]:
    """Return the plan that transformers has for the model, with our additions; empty if there is neither."""
    ours = ADDED_PLANS.get(model_type_of(model))
    if ours is None:
        return dict(transformers_plan(model))
    base = base_model_path(model)
    return {**transformers_plan(model), **{join_path(base, pattern): style for pattern, style in ours.items()}}


def expert_parallel_plan(model: Any) -> dict[str, str]:
    """Return the plan that transformers has for the model's experts; empty if there is none."""
    return {pattern: style for pattern, style in transformers_expert_plan(model).items() if style in EXPERT_STYLES}


def number_of_experts(model: nn.Module) -> int:
    """Return the number of experts per layer that the model's own expert-parallel plan can distribute over ranks.

    It is the greatest common divisor of the layers' numbers; 0 without a plan, or if it matches no experts.
    """
    plan = {pattern: style for pattern, style in expert_parallel_plan(model).items() if style == GROUPED_GEMM}
    paths = named_styles(model, plan, must_match=False)
    return math.gcd(*(model.get_parameter(path).shape[0] for path in paths))


def has_plan(model: Any) -> bool:
    """Return whether transformers or this package has a tensor-parallel plan for the layers of models of this type.

    A class of transformers may have a plan of its head alone, which does not count.
    """
    configs = (model.config, text_config(model))  # of a multimodal model, that of its language model has the plan
    has_own = any(getattr(config, "base_model_tp_plan", None) for config in configs)
    return has_own or model_type_of(model) in ADDED_PLANS


def named_styles(model: nn.Module, plan: Mapping[str, str], *, must_match: bool) -> dict[str, str]:
    """Return the style of each module and parameter that the plan names.

    Args:
        model: the model that has the modules and parameters.
        plan: the style of each pattern. Where several patterns match, the last one counts.
        must_match: whether a pattern that matches nothing is an error.

    Returns:
        Styles by path, in the model's order: modules before their parameters and submodules.

    Raises:
        ValueError: `must_match`, and a pattern matches nothing.
    """
    paths = list(_paths(model))
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        matches = [path for path in paths if _matches(pattern, path)]
        if must_match and not matches:
            raise ValueError(
                f"{pattern!r} in the plan matches no module or parameter of {type(model).__name__}; a pattern is a "
                f"full path in which * stands for one part, such as {_example(paths)!r}"
            )
        styles.update(dict.fromkeys(matches, style))
    return {path: styles[path] for path in paths if path in styles}


def join_path(path: str, name: str) -> str:
    """Return the path of `name` in the module at `path`, which is "" for the model itself."""
    return f"{path}.{name}" if path else name


def is_within(path: str, outer: str) -> bool:
    """Return whether a path is `outer`, or that of something in `outer`."""
    return f"{path}.".startswith(f"{outer}.")


def _paths(model: nn.Module) -> list[str]:
    """Return the paths of all modules (a module in several places has several) and their parameters."""
    paths = []
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            paths.append(name)
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        paths += [join_path(name, key) for key, _ in own]
    return paths


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), path) is not None


def _example(paths: list[str]) -> str:
    longest = max(paths, key=lambda path: path.count("."), default="layers.0.q_proj")
    return re.sub(r"\.\d+(?=\.)", ".*", longest.removesuffix(".weight").removesuffix(".bias"))


# Patterns are relative to the base model, the model without its head; `parallelize` shards tied
# embeddings by itself. Modules that a plan does not name are full on every rank, such as Falcon-H1's Mamba mixers.

_FEED_FORWARD = {"fc1": "colwise", "fc2": "rowwise"}
_GATED = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def _under(prefix: str, styles: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": style for name, style in styles.items()}


def _attention(path: str, output: str) -> dict[str, str]:
    return _under(path, {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise"), output: "rowwise"})


def _bert(layers: str) -> dict[str, str]:
    attention = dict.fromkeys(("query", "key", "value"), "colwise")
    return {
        **_under(f"{layers}.attention.self", attention),
        f"{layers}.attention.output.dense": "rowwise",
        f"{layers}.intermediate.dense": "colwise",
        f"{layers}.output.dense": "rowwise",
    }


def _t5(stack: str, feed_forward: int) -> dict[str, str]:
    attention = {**dict.fromkeys("qkv", "colwise"), "o": "rowwise"}
    return {
        **_under(f"{stack}.block.*.layer.0.SelfAttention", attention),
        f"{stack}.block.*.layer.0.SelfAttention.relative_attention_bias.weight": "rowwise",  # [buckets, heads]
        **_under(f"{stack}.block.*.layer.1.EncDecAttention", attention),
        **_under(
            f"{stack}.block.*.layer.{feed_forward}.DenseReluDense",
            {**dict.fromkeys(("wi", "wi_0", "wi_1"), "colwise"), "wo": "rowwise"},
        ),
    }


def _norms_of_heads(*names: str, attention: str = "self_attn") -> dict[str, str]:
    """Norms that all heads share."""
    return _under(f"layers.*.{attention}", dict.fromkeys(names, "replicated_with_grad_allreduce"))


_BART = {
    **_attention("encoder.layers.*.self_attn", "out_proj"),
    **_under("encoder.layers.*", _FEED_FORWARD),
    **_attention("decoder.layers.*.self_attn", "out_proj"),
    **_attention("decoder.layers.*.encoder_attn", "out_proj"),
    **_under("decoder.layers.*", _FEED_FORWARD),
}

ADDED_PLANS: dict[str, dict[str, str]] = {
    # Additions to plans that transformers has.
    "cohere": _under("layers.*.self_attn", dict.fromkeys(("q_norm.weight", "k_norm.weight"), "colwise")),
    "glm4_moe": _norms_of_heads("q_norm", "k_norm"),
    "glm4_moe_lite": {"layers.*.self_attn.q_proj": "colwise"},  # without q_lora_rank
    "phi": _norms_of_heads("q_layernorm", "k_layernorm"),
    "sarvam_moe": _norms_of_heads("q_norm", "k_norm"),
    "inkling_text": {
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.shared_experts": "moe_tp_experts",  # sums the gradients of the inputs, too
    },
    # Whole plans.
    "bart": _BART,
    "bert": _bert("encoder.layer.*"),
    "bloom": {
        "h.*.self_attention": "alibi",
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    },
    "falcon_h1": {
        **_attention("layers.*.self_attn", "o_proj"),
        **_under("layers.*.feed_forward", _GATED),
        "embed_tokens": "embedding_rowwise",
    },
    "gpt2": {
        "h.*.attn.c_attn": "qkv_colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "gpt_oss": {
        **_attention("layers.*.self_attn", "o_proj"),
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "interleaved_rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "interleaved_rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",  # stored as [experts, in, out]: its inputs are cut
        "layers.*.mlp.experts.down_proj_bias": "bias_of_sum",
        "embed_tokens": "embedding_rowwise",
    },
    "mamba2": {"embeddings": "embedding_rowwise"},
    "mllama": _under(
        "language_model",
        {
            **_attention("layers.*.self_attn", "o_proj"),
            **_attention("layers.*.cross_attn", "o_proj"),
            **_norms_of_heads("q_norm", "k_norm", attention="cross_attn"),
            **_under("layers.*.mlp", _GATED),
        },
    ),
    "opt": {
        **_attention("decoder.layers.*.self_attn", "out_proj"),
        **_under("decoder.layers.*", _FEED_FORWARD),
    },
    "qwen3_vl": _under(
        "language_model",
        {
            **_attention("layers.*.self_attn", "o_proj"),
            **_norms_of_heads("q_norm", "k_norm"),
            **_under("layers.*.mlp", _GATED),
        },
    ),
    "roberta": _bert("encoder.layer.*"),
    "t5": {**_t5("encoder", 1), **_t5("decoder", 2)},
    "vit": {
        **_attention("layers.*.attention", "o_proj"),
        **_under("layers.*.mlp", _FEED_FORWARD),
    },
    "whisper": _BART,
}
