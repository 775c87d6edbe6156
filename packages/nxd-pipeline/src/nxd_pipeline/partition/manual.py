"""Stages written by hand, for models that cannot be traced: a list of modules, or of `Stage` for free wiring."""

import inspect
from collections.abc import Sequence

from torch import nn

from nxd_pipeline.partition.stage import Stage, boundary


def manual_partition(
    stages: Sequence[nn.Module | Stage], *, input_names: Sequence[str], model: nn.Module | None = None
) -> tuple[Stage, ...]:
    """Make stages of modules.

    The first module takes inputs of the model. Each further one takes as its first argument what the one before
    returned (a tensor, tuple or dict), and behind it any inputs of the model; arguments are matched by their names.
    Values that skip stages need `Stage`, which names them; either all stages are given as `Stage`, or none.

    Args:
        stages: one per stage of the pipeline.
        input_names: the model's inputs.
        model: the unpartitioned model; where a stage holds modules of it, parameters keep their names there.

    Raises:
        ValueError: modules and `Stage` are mixed, a module takes an argument that is no input of the model, or stages
            have some parameters of the model and not all.
    """
    wired = [stage for stage in stages if isinstance(stage, Stage)]
    if wired and len(wired) < len(stages):
        raise ValueError(
            f"{len(wired)} of {len(stages)} stages are of class Stage; give all as Stage, or all as modules"
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
    """What no stage has would be missing in a checkpoint. Stages may also have none of the model's own modules."""
    held = {parameter for stage in stages for parameter in stage.module.parameters()}
    missing = [name for name, parameter in model.named_parameters() if parameter not in held]
    if missing and len(missing) < len(list(model.parameters())):
        raise ValueError(
            f"no stage has the parameters {missing} of the model, which checkpoints would lack; make them attributes "
            "of a stage's module, also if it does not use them"
        )


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
                f"stage {index} ({type(module).__name__}) takes {parameter.name!r}, which is none of the inputs "
                f"{list(input_names)}; rename it, or wire the stages with Stage(module, inputs, outputs)"
            )
        else:
            break  # this and what follows keep their defaults
    return tuple(inputs)
