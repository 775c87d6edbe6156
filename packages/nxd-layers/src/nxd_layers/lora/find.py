"""The layers of a model that a config gives adapters to."""

from collections.abc import Mapping

from torch import nn

from nxd_layers.lora.adapter import adapted_layers
from nxd_layers.lora.config import LoraConfig
from nxd_layers.lora.kinds import adaptable_layers, kind_of
from nxd_layers.lora.targets import match_targets

TargetLayers = Mapping[str, tuple[str, ...]]


def find_target_layers(module: nn.Module, config: LoraConfig) -> TargetLayers:
    """What `config.target_modules` names in a whole model, which may be on the meta device. Changes nothing.

    Returns:
        By the name of a layer, which of its parts are adapted: `("",)` for all but fused ones.

    Raises:
        ValueError: a target names nothing that can be adapted, the model has adapters already, or biases that are to
            train cannot do so alone.
    """
    if adapted_layers(module):
        raise ValueError("this model has adapters already; unload() them first")
    adaptable = adaptable_layers(module)
    others = {name: type(layer).__name__ for name, layer in module.named_modules() if name not in adaptable}
    holders = {name: holder for name, (holder, _) in adaptable.items()}
    targeted: dict[str, set[str]] = {}
    for target in match_targets(config.target_modules, holders, others):
        holder, parts = adaptable[target]
        targeted.setdefault(holder, set()).update(parts)
    chosen: dict[str, tuple[str, ...]] = {}
    for name, found in targeted.items():
        layer = module.get_submodule(name)
        kind = kind_of(layer)
        assert kind is not None, f"{name} was found among the layers that can be adapted"
        chosen[name] = tuple(part for part in kind.parts if part in found)
        if config.bias == "lora_only":
            kind.bias_names(layer, chosen[name])
    return chosen
