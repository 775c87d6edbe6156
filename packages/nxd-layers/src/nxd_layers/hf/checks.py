"""What makes a plan wrong for a model: refused before anything is changed, because it would change numbers silently."""

from collections.abc import Mapping
from typing import Any

from nxd_state import get_shard_spec
from torch import nn

from nxd_layers.hf.compared import COMPARED, CORRECTIONS, REFUSED
from nxd_layers.hf.plan import joined
from nxd_layers.hf.transformers_models import base_model_path, own_plan

# In latent attention these come before the split layers, which sum the gradient of their input.
_BEFORE_SPLIT_LAYERS = ("q_a_proj", "q_a_layernorm", "kv_a_layernorm", "indexer")
_FUSED = ("gate_up_proj", "gate_up_proj_bias")


def checked_plan(model: Any) -> dict[str, str]:
    """The model's own plan, put right where that is known to be needed.

    Raises:
        ValueError: models of this type, split by their own plan, have not been compared with one process.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if model_type in COMPARED:
        base = base_model_path(model)
        corrections = CORRECTIONS.get(model_type, {}).items()
        return {**own_plan(model), **{joined(base, pattern): style for pattern, style in corrections}}
    reason = REFUSED.get(
        model_type, "loss and gradients of its split models have not been compared with those of one process"
    )
    raise ValueError(
        f"models of type {model_type!r} are not split by their own plan: {reason}. To split one all the same, give "
        "the plan yourself (plan=...), and compare the numbers"
    )


def check_plan(model: nn.Module, styles: Mapping[str, str], attentions: Mapping[str, nn.Module]) -> None:
    """Raise a ValueError where a plan cannot be right, whatever the sizes.

    Args:
        model: the whole model.
        styles: of its modules and parameters, by path.
        attentions: modules whose heads are split.
    """
    split = {name for name, it in model.named_parameters(remove_duplicate=False) if get_shard_spec(it) is not None}
    for path, style in styles.items():
        if any(f"{name}.".startswith(f"{path}.") for name in split):
            raise ValueError(f"{path} is split already; parallelize() takes a model with whole parameters, once")
        if path.rpartition(".")[2] in _FUSED and style in ("colwise", "rowwise"):
            parent = model.get_submodule(path.rpartition(".")[0])
            raise ValueError(
                f"{path} of {type(parent).__name__} holds two matrices, but {style!r} cuts it as one; give it the "
                f"style packed_{style}"
            )
    for path, attention in attentions.items():
        for name, _ in attention.named_parameters():
            full_name = joined(path, name)
            if not _is_planned(full_name, styles) and name.partition(".")[0] not in _BEFORE_SPLIT_LAYERS:
                raise ValueError(
                    f"{full_name} lies among the split heads of {type(attention).__name__}, but the plan does not "
                    "say how; give it a style, such as replicated_with_grad_allreduce for a norm of single heads"
                )
    _check_shared(model, styles)


def _is_planned(path: str, styles: Mapping[str, str]) -> bool:
    parts = path.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return any(styles.get(prefix, "local_params") != "local_params" for prefix in prefixes)


def _check_shared(model: nn.Module, styles: Mapping[str, str]) -> None:
    """A module in several places would be split several times."""
    places: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if path in styles and places.setdefault(module, path) != path:
            raise ValueError(f"{path} is the same module as {places[module]}, and cannot be split for both")
