"""Cutting a model by its structure: a list of layers, with modules that only its first or last stage needs.

Every stage runs the model's own forward, with `stand_ins` for the modules it does not hold. So masks, positions and
everything else that follows from the inputs are computed on each stage as the model computes them, and only outputs of
layers are sent. Nothing is traced.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from nxd_pipeline.partition.stage import Stage, boundary
from nxd_pipeline.partition.stand_ins import (
    OTHER_WAYS,
    AbsentLayer,
    AbsentModule,
    StageEnd,
    StageForward,
    replay_of,
    shallow_copy,
    tensors_in,
)


@dataclass(frozen=True)
class ModelStructure:
    """The structure of a model, as a cut by structure needs it.

    Attributes:
        layers: names of the layers in the order of calls, all in one `nn.ModuleList`.
        first: names of modules used only before the layers, and only for the input of the first layer.
        last: names of modules used only after the layers.
        inputs_of_first: names of inputs that only modules in `first` use; later stages get none.
        skipped: names of layers that the model does not call for some inputs, such as cross-attention without images.
        recorded: names of modules in a layer whose output the model also uses after the layers, by layer.
        arguments: arguments passed in every call of the model.
    """

    layers: tuple[str, ...]
    first: frozenset[str] = frozenset()
    last: frozenset[str] = frozenset()
    inputs_of_first: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()
    recorded: Mapping[str, Sequence[str]] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def below(self, path: str) -> Self:
        """Return the structure of a model that has this one at a path, and passes its inputs on."""
        return replace(
            self,
            layers=tuple(f"{path}.{it}" for it in self.layers),
            first=frozenset(f"{path}.{it}" for it in self.first),
            last=frozenset(f"{path}.{it}" for it in self.last),
            skipped=frozenset(f"{path}.{it}" for it in self.skipped),
            recorded={f"{path}.{it}": names for it, names in self.recorded.items()},
        )


def structural_partition(
    model: nn.Module, structure: ModelStructure, cuts: Sequence[str], input_names: Sequence[str]
) -> tuple[Stage, ...]:
    """Cut `model` after the layers named `cuts`; every stage takes all inputs but those of the first alone.

    Modules that are neither layers nor in `first` or `last` are on every stage, their parameters as tied weights.

    Raises:
        ValueError: a cut is not a layer, is the last layer, or is out of order.
    """
    ends = [_position(cut, structure.layers) for cut in cuts]
    if sorted(set(ends)) != ends or (ends and ends[-1] == len(structure.layers) - 1):
        raise ValueError(
            f"pipeline_cuts={list(cuts)} must be in the order of the layers, each once and without the last layer, "
            f"{structure.layers[-1]!r}"
        )
    bounds = [0, *(end + 1 for end in ends), len(structure.layers)]
    stages = []
    for index in range(len(bounds) - 1):
        layers = _LayerRange(bounds[index], bounds[index + 1], len(structure.layers))
        names = [name for name in input_names if layers.is_first or name not in structure.inputs_of_first]
        inputs = tuple(names) if layers.is_first else (boundary(index - 1), *names)
        outputs = () if layers.is_last else (boundary(index),)
        stages.append(Stage(StructuralStage(model, structure, layers, names), inputs, outputs, {"model": ""}))
    return tuple(stages)


@dataclass(frozen=True)
class _LayerRange:
    """A stage's layers: from `start` up to, without, `end`, of `total`."""

    start: int
    end: int
    total: int

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.total


class StructuralStage(nn.Module):
    """The model with stand-ins for other stages' modules.

    Takes the previous stage's output, except on the first stage, and the model's inputs. Returns the output of its last
    layer, with the outputs of recorded modules if there are any; the last stage returns the model's output.
    """

    def __init__(
        self, model: nn.Module, structure: ModelStructure, layers: _LayerRange, input_names: Sequence[str]
    ) -> None:
        super().__init__()
        self._run = StageForward()
        self._layers = layers
        self._input_names = tuple(input_names)
        self._arguments = dict(structure.arguments)
        self._records = bool(structure.recorded)
        self._is_checked = False
        self._model_name = type(model).__name__
        own = structure.layers[layers.start : layers.end]
        modules = dict(model.named_modules())
        for name in own:
            modules[name].register_forward_pre_hook(self._check_arguments, with_kwargs=True)
            for path in structure.recorded.get(name, ()):
                modules[f"{name}.{path}"].register_forward_hook(self._record)
        if not layers.is_last:
            modules[own[-1]].register_forward_hook(self._leave)
        self.model = _with_stand_ins(model, self._stand_ins(modules, structure))

    def forward(self, *values: Any) -> Any:
        """See the class."""
        received, recorded = None, []
        if not self._layers.is_first:
            received, values = values[0], values[1:]
            if self._records:
                received, recorded = received
        self._run.begin(received, recorded)
        try:
            output = self.model(**dict(zip(self._input_names, values, strict=True)), **self._arguments)
            self._check_order(ended=False)
            return output
        except StageEnd:
            self._check_order(ended=True)
            leaving = self._run.leaving
            return (leaving, tuple(self._run.recorded)) if self._records else leaving
        except KeyError as error:
            if self._layers.is_first:
                raise
            raise RuntimeError(
                f"{self._model_name}.forward looks up {error} on the stage with layers {self._layers.start} to "
                f"{self._layers.end - 1}, which a layer of an earlier stage may have set, as layers that share "
                "keys and values do (num_kv_shared_layers); choose pipeline_cuts that keep these layers on one stage, "
                f"or {OTHER_WAYS}"
            ) from error
        finally:
            self._run.end()

    def _stand_ins(self, modules: Mapping[str, nn.Module], structure: ModelStructure) -> dict[str, nn.Module]:
        stand_ins: dict[str, nn.Module] = {}
        for index, name in enumerate(structure.layers):
            if self._layers.start <= index < self._layers.end:
                continue
            is_later = index >= self._layers.end
            last = structure.layers[self._layers.end - 1]
            absent = AbsentLayer(
                modules[name], self._run, is_later=is_later, ends_stage=is_later and last in structure.skipped
            )
            if self._layers.is_last:
                for path in structure.recorded.get(name, ()):
                    absent.add_replay(path, replay_of(modules[f"{name}.{path}"], self._run))
            stand_ins[name] = absent
        if not self._layers.is_first:
            stand_ins |= {name: AbsentModule(name, modules[name], self._run) for name in structure.first}
        if not self._layers.is_last:
            stand_ins |= {name: AbsentModule(name, modules[name], self._run) for name in structure.last}
        return stand_ins

    def _record(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._run.is_active:
            self._run.recorded.append(output if isinstance(output, Tensor) else output[0])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._run.is_active:
            self._run.leaving = output
            raise StageEnd

    def _check_arguments(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """On the first call, check that layers use other stages' modules only through the previous layer."""
        if self._layers.is_first or self._is_checked or not self._run.is_active:
            return
        if any(_has_nan(tensor) for tensor in tensors_in(self._run.received)):
            return
        if any(_has_nan(tensor) for tensor in tensors_in((args, kwargs))):
            raise ValueError(
                f"a {type(module).__name__} of {self._model_name} uses more of the embeddings than the previous layer "
                f"returns; {OTHER_WAYS}"
            )
        self._is_checked = True

    def _check_order(self, *, ended: bool) -> None:
        entered = self._layers.is_first or self._run.is_entered
        if ended != (not self._layers.is_last) or not entered:
            raise RuntimeError(
                f"{self._model_name}.forward did not call its layers in order on the stage of layers "
                f"{self._layers.start} to {self._layers.end - 1}; {OTHER_WAYS}"
            )


def optional_inputs(model: nn.Module, input_names: Sequence[str]) -> dict[str, Any]:
    """Return the inputs that calls may omit, with the defaults of the model's forward."""
    parameters = inspect.signature(model.forward).parameters
    return {
        name: parameters[name].default
        for name in input_names
        if name in parameters and parameters[name].default is not inspect.Parameter.empty
    }


def _with_stand_ins(module: nn.Module, stand_ins: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module with stand-ins in the named places; modules above them are copied, all others are shared."""
    if not stand_ins:
        return module
    copy = shallow_copy(module)
    below: dict[str, dict[str, nn.Module]] = {}
    for name, stand_in in stand_ins.items():
        child, _, rest = name.partition(".")
        if rest:
            below.setdefault(child, {})[rest] = stand_in
        else:
            copy._modules[child] = stand_in
    for child, inner in below.items():
        copy._modules[child] = _with_stand_ins(module.get_submodule(child), inner)
    return copy


def _position(cut: str, layers: Sequence[str]) -> int:
    if cut not in layers:
        raise ValueError(
            f"pipeline_cuts names {cut!r}; cuts must be after one of the layers {layers[0]!r} to {layers[-2]!r}"
        )
    return layers.index(cut)


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(torch.isnan(tensor).any())
