"""Traced models with the old calls, over nxd_trace. A saved model is a folder, not TorchScript."""

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
    """Load a traced model; see `nxd_trace.parallel_model_load`. `model_dir` is another name of `load_dir`."""
    return nxd_trace.parallel_model_load(load_dir, **settings)


def arguments_of_compiler(given: Sequence[str] | str | None, compiler: str | None) -> Sequence[str] | str | None:
    """Return `compiler_args`, or None if they are options of neuronx-cc and one of torch's compilers is used.

    Arguments that begin with "-", such as "-O1", are neuronx-cc's; settings of inductor are "name=value".
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
    """Trace a tensor-parallel model; see `nxd_trace.parallel_model_trace` for the arguments that are not listed.

    Args:
        compiler_args: arguments of the compiler; torch's own compilers ignore options of neuronx-cc.
        states: must be None: `func` returns the state as its aliases, or the model assigns it.
        spmd_mode: accepted without effect; identical programs of ranks are always compiled once.
        checkpoint_loader_callable: function that returns the whole model's weights by name.
        force_custom_init_on_device: accepted without effect.
        serialization_path: folder in which to save the traced model too.
        **settings: other keyword arguments of `nxd_trace.parallel_model_trace`.

    Raises:
        ValueError: `states` are passed, or the weights are passed twice.
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
    """Base class of all compiled models."""


class NxDModel(nn.Module, BaseNxDModel):
    """A compiled model, called like the traced one; its shards are in worker processes.

    Attributes:
        model: the traced model, from `ModelBuilder.compile` or `load`.
        world_size: number of ranks.
    """

    def __init__(self, model: TensorParallelModel) -> None:
        super().__init__()
        if not isinstance(model, TensorParallelModel):
            raise TypeError(f"NxDModel wraps a traced model, not a {type(model).__name__}; use ModelBuilder or load")
        self.model = model
        self.world_size = model.tp_degree

    def forward(self, *args: Any, model_name: str | None = None, forward_mode: str = "default", **kwargs: Any) -> Any:
        """Run the program traced with inputs of these shapes, or the program named `model_name`.

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
        """Return the names of the programs."""
        return set(self.model.programs)

    def set_weights(self, sharded_checkpoint: Sequence[Mapping[str, Tensor]]) -> None:
        """Set each rank's weights, from `shard_checkpoint`.

        Raises:
            ValueError: the weights do not fit the model.
        """
        self.model.replace_weights(nxd_trace.whole_weights(sharded_checkpoint, self.model))

    def replace_weights(self, sharded_checkpoint: Sequence[Mapping[str, Tensor]]) -> None:
        """See `set_weights`."""
        self.set_weights(sharded_checkpoint)

    def initialize(self, checkpoint: Sequence[Mapping[str, Tensor]], start_rank_tensor: Tensor | None = None) -> None:
        """See `set_weights`; `start_rank_tensor` has no effect, because all ranks are on this host."""
        self.set_weights(checkpoint)

    def initialize_with_saved_weights(self, start_rank_tensor: Tensor | None = None) -> None:
        """Do nothing: saved models contain their weights."""

    def to_neuron(self) -> None:
        """Do nothing: weights and state are already on the workers' devices."""

    def read_from_neuron_buffer(self, buffer_key: str, rank: int) -> Tensor:
        """Return a copy of one rank's part of a weight or state tensor.

        Raises:
            ValueError: the rank does not exist.
            WorkerError: the tensor does not exist.
        """
        weights = self.model.read_weights(rank)
        return weights[buffer_key] if buffer_key in weights else self.model.read_state(buffer_key, rank)

    def write_to_neuron_buffer(self, tensor: Tensor, buffer_key: str, rank: int) -> None:
        """Overwrite one rank's part of a state tensor; `replace_weights` replaces weights.

        Raises:
            ValueError: the rank has no such state, or its shape or dtype differs.
        """
        self.model.write_state(buffer_key, tensor, rank)

    @property
    def weights(self) -> list[dict[str, Tensor]]:
        """Copies of each rank's weights, by name."""
        return [self.model.read_weights(rank) for rank in range(self.model.num_ranks)]

    def save(self, path_to_save: str | Path, save_weights: bool = False) -> None:
        """Save programs and weights in a folder; weights are saved even without `save_weights`.

        Raises:
            ValueError: the path exists and is not a saved model.
        """
        nxd_trace.parallel_model_save(self.model, path_to_save)

    @classmethod
    def load(cls, path_to_model: str | Path, start_rank: int = 0, local_ranks_size: int | None = None) -> Self:
        """Load a saved model and start its workers. All ranks run on this host.

        Raises:
            ModelFolderError: the folder is incomplete, damaged or built for another machine.
            ValueError: `start_rank` or `local_ranks_size` selects a part of the ranks.
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
        """Stop the workers."""
        self.model.close()


class NxDModelExecutor(nn.Module):
    """Calls a compiled model with positional inputs."""

    def __init__(self, nxd_model: NxDModel) -> None:
        super().__init__()
        self.nxd_model = nxd_model

    def forward(self, *inputs: Any) -> Any:
        """Run the program traced with inputs of these shapes."""
        return self.nxd_model(*inputs)

    def save(self, path: str | Path, _extra_files: Mapping[str, Any] | None = None) -> None:
        """See `NxDModel.save`; `torch.jit.save` calls this."""
        self.nxd_model.save(path)
