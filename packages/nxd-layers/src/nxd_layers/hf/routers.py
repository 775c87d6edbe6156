"""The routers of a model: of transformers, by what it says of the outputs it can record, or of this package."""

from torch import nn

from nxd_layers.experts import RouterBase, RouterLayer
from nxd_layers.hf.plans import joined
from nxd_layers.hf.transformers_models import router_class, text_config

_BIAS = "e_score_correction_bias"
# Some choose among more than there are: ZAYA's have a class for no expert, LongCat's for experts that do nothing.
_NUM_CHOICES = ("num_router_classes", "n_routed_experts", "num_experts")


def find_routers(model: nn.Module) -> dict[str, RouterLayer]:
    """The routers of a whole model by name, in the order of its layers.

    Left out are those that do not say among how many experts they choose, or return their logits in another place.
    """
    recorded = router_class(model)
    found: dict[str, RouterLayer] = {}
    for path, module in model.named_modules():
        is_own = isinstance(module, RouterBase)
        if not (is_own or (recorded is not None and isinstance(module, recorded))):
            continue
        num_experts = next((it for name in _NUM_CHOICES if (it := getattr(module, name, None))), None)
        if num_experts is None and isinstance(weight := getattr(module, "weight", None), nn.Parameter):
            num_experts = weight.shape[0]
        top_k = getattr(module, "top_k", None) or getattr(text_config(model), "num_experts_per_tok", None)
        if isinstance(num_experts, int) and isinstance(top_k, int):
            found[path] = RouterLayer(num_experts, top_k, _bias_of(model, path, num_experts), keeps_order=not is_own)
    return found


def _bias_of(model: nn.Module, router: str, num_experts: int) -> str | None:
    """The path of the router's bias, which is in it or in the block that has it."""
    block = router.rpartition(".")[0]
    for outer in (router, block):
        module = model.get_submodule(outer)
        for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
            if name.rpartition(".")[2] == _BIAS and tensor.numel() == num_experts:
                return joined(outer, name)
    return None
