"""Models given as a list of layers: each takes the output of the one before; a loss may follow the last."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from nxd_pipeline.partition.cuts import check_layer_count, even_cuts
from nxd_pipeline.partition.stage import Stage, boundary

StageOfLayers = Callable[[Sequence[nn.Module], int], Mapping[nn.Module, int]]
LossFunction = Callable[[Any, Any], Any]

INPUTS, LABELS = "inputs", "labels"


class LayerChain(nn.Module):
    """Some layers of a list, named by their indices in it, and possibly the loss."""

    def __init__(self, layers: Mapping[int, nn.Module], loss_fn: LossFunction | None = None) -> None:
        super().__init__()
        for place, layer in layers.items():
            self.add_module(str(place), layer)
        self._places = tuple(map(str, layers))
        self._loss_fn = loss_fn

    def forward(self, inputs: Any, labels: Any = None) -> Any:
        """The output of the last layer; with a loss and labels, the loss."""
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
    """Stages of a list of layers; the model's inputs are "inputs" and, with a loss, "labels".

    Args:
        layers: called one after the other.
        num_stages: how many stages to make.
        stage_of_layers: called with the layers and the number of stages, gives the stage of each layer; equally many
            layers for each stage if None, the remainder to later ones.
        loss_fn: called with what the last layer returns, or the first of a list or tuple, and the labels.

    Raises:
        ValueError: there are fewer layers than stages, or `stage_of_layers` leaves a layer out, a stage empty, or has
            stages that do not follow the order of the layers.
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
                f"the stage function puts the {len(layers)} layers on stages {stage_of}, in their order; every layer "
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
