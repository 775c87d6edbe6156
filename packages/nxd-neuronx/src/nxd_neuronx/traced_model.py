"""Traced models as scripts for the old runtime call, save and load them, over nxd_trace.

Compiled programs are in a folder, which `NxDModel.save` and `load` name; they are not TorchScript.
"""

import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import nxd_trace
from nxd_trace import BucketModelConfig, TensorParallelModel
from nxd_trace.compilers import choose_compiler
from torch import Tensor, nn

from nxd_neuronx.arguments import takes_names_too

_logger = logging.getLogger(__name__)


@takes_names_too(model_dir="load_dir")
def parallel_model_load(load_dir: str | Path, **settings: Any) -> TensorParallelModel:
    """Load a traced model; see `nxd_trace.parallel_model_load`. `model_dir` is another name of the folder."""
    return nxd_trace.parallel_model_load(load_dir, **settings)


def arguments_of_compiler(given: Sequence[str] | str | None, compiler: str | None) -> Sequence[str] | str | None:
    """`compiler_args` without options of neuronx-cc, such as "-O1", where torch's own compilers build.

    Settings of inductor are "name=value", so that all is neuronx-cc's where something begins with "-".

    Args:
        given: by a script.
        compiler: the name that it asks for, if any.
    """
    arguments = shlex.split(given) if isinstance(given, str) else list(given or ())
    name = choose_compiler(compiler).name
    if name in ("export", "inductor") and any(it.startswith("-") for it in arguments):
        _logger.info("compiler_args=%s are options of neuronx-cc; %r compiles without them", arguments, name)
        return None
    return given


def parallel_model_trace(
    func: Callable[..., Any],
    example_inputs: Any = None,
    compiler_workdir: str | Path | int | None = None,
    compiler_args: Sequence[str] | str | None = None,
    inline_weights_to_neff: bool = True,
    bucket_config: BucketModelConfig | None = None,
    tp_degree: int = 1,
    max_parallel_compilations: int | None = None,
    *,
    states: object = None,
    spmd_mode: bool = False,
    checkpoint_loader_callable: Callable[[], Mapping[str, Tensor]] | None = None,
    force_custom_init_on_device: bool = False,
    serialization_path: str | Path | None = None,
    **settings: Any,
) -> TensorParallelModel:
    """Trace a tensor-parallel model; see `nxd_trace.parallel_model_trace`, which knows the other arguments.

    Args:
        compiler_args: for the compiler; options of neuronx-cc have no effect where torch's own compilers build.
        states: must be None: state is what `func` returns as its aliases, or what the model assigns.
        spmd_mode: accepted without effect; equal programs of ranks are compiled once anyway.
        checkpoint_loader_callable: gives the whole model's weights by name.
        force_custom_init_on_device: accepted without effect.
        serialization_path: a folder to save the traced model to as well.
        **settings: further keywords of `nxd_trace.parallel_model_trace`.

    Raises:
        ValueError: `states` are given, or weights twice.
    """
    if states is not None:
        raise ValueError("states= is not supported; return the model and its aliases from func")
    if checkpoint_loader_callable is not None:
        if "weights" in settings:
            raise ValueError("weights= and checkpoint_loader_callable= both provide the weights; pass only one of them")
        settings["weights"] = dict(checkpoint_loader_callable())
    model = nxd_trace.parallel_model_trace(
        func,
        example_inputs,
        compiler_workdir,
        arguments_of_compiler(compiler_args, settings.get("compiler")),
        inline_weights_to_neff,
        bucket_config,
        tp_degree,
        max_parallel_compilations,
        **settings,
    )
    if serialization_path is not None:
        nxd_trace.parallel_model_save(model, serialization_path)
    return model


class BaseNxDModel:
    """What all compiled models are an instance of."""


class NxDModel(nn.Module, BaseNxDModel):
    """A compiled model, called like the one that was traced; its shards live in worker processes.

    Args:
        model: the traced model; of `ModelBuilder.compile` or `load`.

    Attributes:
        model: the same.
        world_size: number of ranks.
    """

    def __init__(self, model: TensorParallelModel) -> None:
        super().__init__()
        if not isinstance(model, TensorParallelModel):
            raise TypeError(f"NxDModel wraps a traced model, not a {type(model).__name__}; use ModelBuilder or load")
        self.model = model
        self.world_size = model.tp_degree

    def forward(self, *args: Any, model_name: str | None = None, forward_mode: str = "default", **kwargs: Any) -> Any:
        """Run the program that was traced with inputs of these shapes, or that of a name.

        Raises:
            ValueError: the program does not exist, or the mode is not "default".
            WorkerError: a worker died, or the model is closed.
        """
        if forward_mode != "default":
            raise ValueError(f"forward_mode={forward_mode!r} is not supported; calls run to completion")
        args, kwargs = self._as_traced(args, kwargs)
        if model_name is not None:
            return self.model.run(model_name, *args, **kwargs)
        return self.model(*args, **kwargs)

    def _as_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`ModelBuilder` traces inputs by name, in the order of the model's forward."""
        for program in self.model.programs.values():
            names = program.keywords
            by_name = dict(zip(names, args, strict=False)) | kwargs
            if len(by_name) == len(args) + len(kwargs) and by_name.keys() == set(names):
                return (), {name: by_name[name] for name in names}
        return args, kwargs

    def get_available_keys(self) -> set[str]:
        """Names of the programs."""
        return set(self.model.programs)

    def set_weights(self, sharded_checkpoint: Sequence[Mapping[str, Tensor]]) -> None:
        """Put in each rank's weights, of `shard_checkpoint`.

        Raises:
            ValueError: they do not fit the model.
        """
        self.model.replace_weights(nxd_trace.whole_weights(sharded_checkpoint, self.model))

    def replace_weights(self, sharded_checkpoint: Sequence[Mapping[str, Tensor]]) -> None:
        """As `set_weights`."""
        self.set_weights(sharded_checkpoint)

    def initialize(self, checkpoint: Sequence[Mapping[str, Tensor]], start_rank_tensor: Tensor | None = None) -> None:
        """As `set_weights`; all ranks are on this host, whatever the first is said to be."""
        self.set_weights(checkpoint)

    def initialize_with_saved_weights(self, start_rank_tensor: Tensor | None = None) -> None:
        """Does nothing: saved models hold their weights."""

    def to_neuron(self) -> None:
        """Does nothing: the workers hold weights and state on their devices already."""

    def read_from_neuron_buffer(self, buffer_key: str, rank: int) -> Tensor:
        """A copy of one rank's part of a state tensor or weight.

        Raises:
            ValueError: there is no such rank.
            WorkerError: there is no such tensor.
        """
        weights = self.model.read_weights(rank)
        return weights[buffer_key] if buffer_key in weights else self.model.read_state(buffer_key, rank)

    def write_to_neuron_buffer(self, tensor: Tensor, buffer_key: str, rank: int) -> None:
        """Put other values into one rank's part of a state tensor; weights are replaced by `replace_weights`.

        Raises:
            ValueError: the rank has no such state, or has it in another shape or dtype.
        """
        self.model.write_state(buffer_key, tensor, rank)

    @property
    def weights(self) -> list[dict[str, Tensor]]:
        """A copy of each rank's weights, by name."""
        return [self.model.read_weights(rank) for rank in range(self.model.num_ranks)]

    def save(self, path_to_save: str | Path, save_weights: bool = False) -> None:
        """Save programs and weights as a folder of this name.

        Args:
            path_to_save: the folder.
            save_weights: accepted without effect; weights are always saved.

        Raises:
            ValueError: something else is there.
        """
        nxd_trace.parallel_model_save(self.model, path_to_save)

    @classmethod
    def load(cls, path_to_model: str | Path, start_rank: int = 0, local_ranks_size: int | None = None) -> Self:
        """Load a model of `save`, and start its workers.

        Args:
            path_to_model: the folder.
            start_rank: 0: all ranks are on this host.
            local_ranks_size: as above.

        Raises:
            ModelFolderError: the folder is incomplete, damaged or made for another machine.
            ValueError: a part of the ranks is requested.
        """
        model = nxd_trace.parallel_model_load(path_to_model)
        if start_rank or local_ranks_size not in (None, model.tp_degree):
            model.close()
            raise ValueError(
                f"start_rank={start_rank}, local_ranks_size={local_ranks_size}: a model's {model.tp_degree} ranks run "
                "on one host; remove both"
            )
        return cls(model)

    def close(self) -> None:
        """End the workers."""
        self.model.close()


class NxDModelExecutor(nn.Module):
    """Calls a compiled model with inputs by position.

    Args:
        nxd_model: the compiled model.
    """

    def __init__(self, nxd_model: NxDModel) -> None:
        super().__init__()
        self.nxd_model = nxd_model

    def forward(self, *inputs: Any) -> Any:
        """As the program that was traced with inputs of these shapes."""
        return self.nxd_model(*inputs)

    def save(self, path: str | Path, _extra_files: Mapping[str, Any] | None = None) -> None:
        """Save the model as `NxDModel.save` does; `torch.jit.save` calls this.

        Raises:
            ValueError: something else is there.
        """
        self.nxd_model.save(path)
