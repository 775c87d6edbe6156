"""A pipeline stage and how stages are wired: the one interface between partitioning and the runtime.

`manual` and `traced` cut models into stages; this module does not know how stages run.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from nxd_pipeline.schedules import Edge


def boundary(stage: int) -> str:
    """Return the name of a stage's output in a chain."""
    return f"stage_{stage}.output"


@dataclass(frozen=True)
class Stage:
    """One stage of a model.

    Attributes:
        module: the module, called with the values of `inputs` in order.
        inputs: names of the values it uses, each an input of the model or an output of an earlier stage.
        outputs: names of the returned values: one value for one name, else a tuple. The last stage has none; it returns
            the model's output.
        logical_names: paths in the unpartitioned model, by path in `module`, of submodules for which they differ.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    logical_names: Mapping[str, str] = field(default_factory=dict)

    def logical_name(self, path: str) -> str:
        """Return the name of a submodule, parameter or buffer of this stage in the unpartitioned model."""
        known, rest = path, ""
        while known not in self.logical_names:
            if not known:
                return path
            known, _, last = known.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
        return ".".join(part for part in (self.logical_names[known], rest) if part)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield submodules by logical name; the stage itself has the whole model's name, ""."""
        for path, module in self.module.named_modules():
            name = self.logical_name(path)
            if name or not path:  # not the model inside a stage that wraps it
                yield name, module

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Return parameters by logical name; without `remove_duplicate` a tied one by each of its names here."""
        named = self.module.named_parameters(remove_duplicate=remove_duplicate)
        return ((self.logical_name(path), parameter) for path, parameter in named)

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by logical name."""
        return {self.logical_name(path): it for path, it in self.module.state_dict(keep_vars=keep_vars).items()}


class Wiring:
    """Which stage uses which values of which other stage; every rank knows this of all stages.

    Attributes:
        inputs: names of the values that each stage uses.
        outputs: names of the values that each stage returns.
        edges: the edges, one per pair of stages that share values.
        model_inputs: names of the model's inputs: the values that no stage returns.

    Raises:
        ValueError: a value is an output of two stages or of no earlier stage, or the last stage names outputs.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.inputs = tuple(stage.inputs for stage in stages)
        self.outputs = tuple(stage.outputs for stage in stages)
        self._carried: dict[tuple[int, int], tuple[str, ...]] = {}
        if self.outputs and self.outputs[-1]:
            raise ValueError(f"the last stage names outputs {self.outputs[-1]}; it returns the model's output")
        maker: dict[str, int] = {}
        for index, names in enumerate(self.outputs):
            for name in names:
                if maker.setdefault(name, index) != index or names.count(name) > 1:
                    raise ValueError(f"value {name!r} is an output of stages {maker[name]} and {index}; rename one")
        for consumer, names in enumerate(self.inputs):
            for name in names:
                producer = maker.get(name)
                if producer is None:
                    continue
                if producer >= consumer:
                    raise ValueError(
                        f"stage {consumer} uses value {name!r} of stage {producer}; "
                        "a stage can only use values of earlier stages"
                    )
                self._carried[producer, consumer] = (*self._carried.get((producer, consumer), ()), name)
        self.edges = tuple(Edge(producer, consumer) for producer, consumer in sorted(self._carried))
        self.model_inputs = frozenset(name for names in self.inputs for name in names if name not in maker)

    def check_inputs(self, names: Set[str]) -> None:
        """Raise a ValueError unless these are the inputs of the model."""
        missing, unknown = sorted(self.model_inputs - names), sorted(names - self.model_inputs)
        if missing:
            raise ValueError(f"the inputs {missing} are missing; the model was cut for {sorted(self.model_inputs)}")
        if unknown:
            raise ValueError(
                f"no stage uses the inputs {unknown}; the model was cut for {sorted(self.model_inputs)}. "
                "Name all inputs in input_names"
            )

    def carried(self, producer: int, consumer: int) -> tuple[str, ...]:
        """Return the names of the values sent from one stage to another."""
        return self._carried[producer, consumer]

    def named_values(self, stage: int, output: Any) -> dict[str, Any]:
        """Return a stage's output by the names of its values; nothing for the last stage.

        Raises:
            ValueError: the output is not a tuple with a value for each name.
        """
        names = self.outputs[stage]
        if len(names) > 1 and not (isinstance(output, tuple) and len(output) == len(names)):
            raise ValueError(
                f"stage {stage} returned a {type(output).__name__}; expected a tuple of the values {names}"
            )
        return dict(zip(names, output if len(names) > 1 else (output,), strict=False))

    def producers(self, stage: int) -> list[int]:
        """Return the stages whose values this one uses."""
        return [edge.producer for edge in self.edges if edge.consumer == stage]

    def consumers(self, stage: int) -> list[int]:
        """Return the stages that use this one's values."""
        return [edge.consumer for edge in self.edges if edge.producer == stage]
