"""Stages written by hand, for models that cannot be traced.

A model is given as a list of its stages (modules, or `Stage` for free wiring), or as a list of layers, each of which
takes the output of the one before; a loss may follow the last.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from nxd_pipeline.partition.cuts import check_layer_count, even_cuts
from nxd_pipeline.partition.stage import Stage, Wiring, boundary


class StageChain(nn.Module):
    """The whole model as a chain of its stages, with modules named by stage, such as "0.weight".

    Args:
        stages: the stages, in order.
        input_names: the model's inputs; the modules' arguments without a default if None.

    Raises:
        ValueError: as for `manual_partition`.
    """

    def __init__(self, stages: Sequence[nn.Module | Stage], input_names: Sequence[str] | None = None) -> None:
        super().__init__()
        if input_names is None:
            input_names = [name for index, stage in enumerate(stages) for name in _needed_inputs(stage, index)]
        self._stages = manual_partition(stages, input_names=input_names)
        self._wiring = Wiring(self._stages)
        self.input_names = sorted(self._wiring.model_inputs)
        for index, stage in enumerate(self._stages):
            self.add_module(str(index), stage.module)

    def forward(self, **inputs: Any) -> Any:
        """Return the output of the last stage.

        Raises:
            TypeError: inputs are missing or unknown.
        """
        if inputs.keys() != self._wiring.model_inputs:
            raise TypeError(f"these stages take the inputs {self.input_names}, got {sorted(inputs)}")
        values, output = dict(inputs), None
        for index, stage in enumerate(self._stages):
            output = stage.module(*(values[name] for name in stage.inputs))
            values |= self._wiring.named_values(index, output)
        return output


def manual_partition(
    stages: Sequence[nn.Module | Stage], *, input_names: Sequence[str], model: nn.Module | None = None
) -> tuple[Stage, ...]:
    """Make stages of modules.

    The first module takes inputs of the model. Each further one takes the previous module's output (a tensor, tuple or
    dict) as its first argument, followed by any inputs of the model; arguments are matched by name. Values that skip
    stages need `Stage`, which names them; all stages or none are given as `Stage`.

    Args:
        stages: the stages of the pipeline.
        input_names: the model's inputs.
        model: the unpartitioned model; where a stage holds modules of it, parameters keep their names there.

    Raises:
        ValueError: a stage is neither a module nor `Stage`, these are mixed, a module takes an argument that is not an
            input of the model, or the stages have only some of the model's parameters.
    """
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module | Stage):
            raise ValueError(
                f"stages[{index}] is a {type(stage).__name__}; pass modules, or Stage(module, inputs, outputs)"
            )
    wired = [stage for stage in stages if isinstance(stage, Stage)]
    if wired and len(wired) < len(stages):
        raise ValueError(
            f"{len(wired)} of {len(stages)} stages are of class Stage; pass all as Stage, or all as modules"
        )
    paths = {module: path for path, module in model.named_modules()} if model is not None else {}
    result = []
    for index, stage in enumerate(stages):
        if isinstance(stage, Stage):
            module, inputs, outputs = stage.module, stage.inputs, stage.outputs
        else:
            module, inputs = stage, _chain_inputs(stage, index, input_names)
            outputs = (boundary(index),) if index < len(stages) - 1 else ()
        names = {path: paths[submodule] for path, submodule in module.named_modules() if submodule in paths}
        result.append(Stage(module, inputs, outputs, names))
    if model is not None:
        _check_complete(model, result)
    return tuple(result)


def _check_complete(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Raise unless the stages have all parameters of the model, or none: checkpoints would lack the others."""
    held = {parameter for stage in stages for parameter in stage.module.parameters()}
    missing = [name for name, parameter in model.named_parameters() if parameter not in held]
    if missing and len(missing) < len(list(model.parameters())):
        raise ValueError(
            f"no stage has the parameters {missing} of the model, so checkpoints would lack them; make them attributes "
            "of a stage's module, even if it does not use them"
        )


def _needed_inputs(stage: nn.Module | Stage, index: int) -> list[str]:
    """Return the inputs of the model that a stage of a chain requires."""
    if not isinstance(stage, nn.Module):
        return []
    parameters = list(inspect.signature(stage.forward).parameters.values())[min(index, 1) :]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [it.name for it in parameters if it.kind in named and it.default is it.empty]


def _chain_inputs(module: nn.Module, index: int, input_names: Sequence[str]) -> tuple[str, ...]:
    parameters = list(inspect.signature(module.forward).parameters.values())
    inputs: list[str] = []
    if index > 0:
        inputs.append(boundary(index - 1))
        parameters = parameters[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            break
        if parameter.name in input_names:
            inputs.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ValueError(
                f"stage {index} ({type(module).__name__}) takes {parameter.name!r}, which is not one of the inputs "
                f"{list(input_names)}; rename it, or wire the stages with Stage(module, inputs, outputs)"
            )
        else:
            break  # this argument and those after it keep their defaults
    return tuple(inputs)


StageOfLayers = Callable[[Sequence[nn.Module], int], Mapping[nn.Module, int]]
LossFunction = Callable[[Any, Any], Any]

INPUTS, LABELS = "inputs", "labels"


class LayerChain(nn.Module):
    """Layers of a list, named by their indices in it, optionally followed by the loss."""

    def __init__(self, layers: Mapping[int, nn.Module], loss_fn: LossFunction | None = None) -> None:
        super().__init__()
        for place, layer in layers.items():
            self.add_module(str(place), layer)
        self._places = tuple(map(str, layers))
        self._loss_fn = loss_fn

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        """Return the output of the last layer; with a loss and labels, the loss."""
        for place in self._places:
            inputs = self._modules[place](inputs)  # type: ignore[misc]
        if self._loss_fn is None or labels is None:
            return inputs
        return self._loss_fn(inputs[0] if isinstance(inputs, list | tuple) else inputs, labels)


def sequence_partition(
    layers: Sequence[nn.Module],
    num_stages: int,
    *,
    stage_of_layers: StageOfLayers | None = None,
    loss_fn: LossFunction | None = None,
) -> tuple[Stage, ...]:
    """Cut a list of layers into stages; the model's inputs are "inputs" and, with a loss, "labels".

    Args:
        layers: the layers, in the order in which they are called.
        num_stages: number of stages.
        stage_of_layers: function of the layers and the number of stages that returns the stage of each layer; if None,
            equal numbers of layers, the remainder on later stages.
        loss_fn: function of the last layer's output (its first element, for a list or tuple) and the labels.

    Raises:
        ValueError: there are fewer layers than stages, or `stage_of_layers` omits a layer, leaves a stage empty, or
            does not follow the order of the layers.
    """
    check_layer_count(len(layers), num_stages)
    if stage_of_layers is None:
        ends = [int(cut) for cut in even_cuts([str(place) for place in range(len(layers))], num_stages)]
        stage_of = [sum(place > end for end in ends) for place in range(len(layers))]
    else:
        assigned = stage_of_layers(layers, num_stages)
        stage_of = [assigned.get(layer, -1) for layer in layers]
        if sorted(stage_of) != stage_of or set(stage_of) != set(range(num_stages)):
            raise ValueError(
                f"the stage function assigns the {len(layers)} layers to stages {stage_of}, in order; every layer "
                f"needs a stage from 0 to {num_stages - 1}, none lower than that of the layer before, and none empty"
            )
    stages = []
    for stage in range(num_stages):
        own = {place: layer for place, layer in enumerate(layers) if stage_of[place] == stage}
        is_last = stage == num_stages - 1
        inputs = (INPUTS,) if stage == 0 else (boundary(stage - 1),)
        labels = (LABELS,) if is_last and loss_fn is not None else ()
        outputs = () if is_last else (boundary(stage),)
        stages.append(Stage(LayerChain(own, loss_fn if is_last else None), (*inputs, *labels), outputs))
    return tuple(stages)
