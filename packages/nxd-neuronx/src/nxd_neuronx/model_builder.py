"""`ModelBuilderV1` and `ModelBuilderV2`, the two builders for inference, over nxd_trace."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import nxd_trace
import torch
from nxd_state import (
    get_tensor_model_parallel_size,
    model_parallel_is_initialized,
)
from nxd_trace import BucketModelConfig, Program
from torch import Tensor, nn

from nxd_neuronx.layers import SPMDRank
from nxd_neuronx.planned_ranks import NxDParallelState, init_on_device
from nxd_neuronx.tensors import invoke_preshard_hooks
from nxd_neuronx.traced_model import NxDModel, NxDModelExecutor, arguments_of_compiler


class ModelBuilderV2:
    """Traces an existing model for several input shapes and compiles all of them.

    Buffers that forward changes in place, such as a key-value cache, are state, which stays in the workers.

    Args:
        model: one rank's model, built inside `NxDParallelState` or `mock_distributed`; its class must be importable,
            or cloudpickle installed.
        weights_to_skip_layout_optimization: accepted without effect.
    """

    def __init__(self, model: nn.Module, weights_to_skip_layout_optimization: set[str] | None = None) -> None:
        self.model = model
        self.world_size = get_tensor_model_parallel_size() if model_parallel_is_initialized() else 1
        self._programs: list[Program] = []

    def trace(
        self,
        args: Tensor | tuple[Tensor, ...] | None = None,
        kwargs: Mapping[str, Tensor] | None = None,
        tag: str | None = None,
        spmd: bool = True,
    ) -> Self:
        """Add a program.

        Args:
            args: example inputs by position.
            kwargs: example inputs by name, in addition to `args`.
            tag: the program's name; numbered if None.
            spmd: True.

        Returns:
            The builder itself.

        Raises:
            ValueError: no inputs; or `args` and `kwargs` for a forward that takes some inputs by position only.
            TypeError: inputs that are not tensors, or that forward does not accept.
        """
        if args is None and kwargs is None:
            raise ValueError("pass the example inputs as args (by position), kwargs (by name), or both")
        by_position = (args,) if isinstance(args, Tensor) else tuple(args or ())
        bound = inspect.signature(self.model.forward).bind(*by_position, **(kwargs or {}))
        kinds = {bound.signature.parameters[name].kind for name in bound.arguments}
        named = kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
        if by_position and kwargs and not named:
            raise ValueError(f"forward{bound.signature} does not name all inputs; pass them all as args, or as kwargs")
        inputs = dict(bound.arguments) if named else kwargs or by_position
        self._programs.append(Program(tag or f"program_{len(self._programs)}", inputs))
        return self

    def compile(
        self,
        priority_model_key: str | None = None,
        compiler_workdir: str | Path | None = None,
        compiler_args: str | Mapping[str, str] | None = None,
        max_workers: int | None = None,
    ) -> NxDModel:
        """Record and compile all programs.

        Args:
            priority_model_key: name of a program; accepted without effect.
            compiler_workdir: folder for the compiler's files.
            compiler_args: options of neuronx-cc, the same for all programs; ignored by other compilers.
            max_workers: number of ranks that record and compile at once.

        Returns:
            The compiled model. With several ranks, call its `set_weights` next.

        Raises:
            ValueError: nothing has been traced, the program does not exist, or options differ between programs.
            WorkerError: a worker failed; the message contains its traceback.
        """
        names = [program.name for program in self._programs]
        if not names:
            raise ValueError("No traces available for compilation. Call trace() first.")
        if priority_model_key is not None and priority_model_key not in names:
            raise ValueError(f"Invalid priority_model_key: {priority_model_key}; the names are {', '.join(names)}")
        of_programs = compiler_args if isinstance(compiler_args, Mapping) else dict.fromkeys(names, compiler_args)
        if missing := sorted(set(names) - of_programs.keys()):
            raise ValueError(f"compiler_args lack {missing}; pass options for each program, or one string for all")
        traced = nxd_trace.trace_module(
            self.model,
            self._programs,
            self.world_size,
            compiler_workdir=compiler_workdir,
            compiler_args=_one_for_all(of_programs),
            max_parallel_compilations=max_workers,
            progress=False,
        )
        return NxDModel(traced)


def _one_for_all(compiler_args: Mapping[str, str | None]) -> str | None:
    """The options of neuronx-cc, which must be the same for all programs; None for other compilers."""
    given = sorted({it for it in compiler_args.values() if it and arguments_of_compiler(it, None)})
    if len(given) > 1:
        raise ValueError(f"compiler_args differ between programs: {given}; pass the same to all")
    return given[0] if given else None


class BaseModelInstance:
    """How `ModelBuilderV1` builds a model in each worker; subclasses may override it.

    Args:
        module_cls: function without arguments that returns the model.
        input_output_aliases: for each state (a parameter, a buffer or its name), the index of the output with its new
            value; or a list of one such dict.
    """

    def __init__(self, module_cls: Callable[[], nn.Module], input_output_aliases: Any) -> None:
        self.module_cls = module_cls
        self.module: nn.Module | None = None
        self.input_output_aliases = [input_output_aliases]

    def load_module(self) -> None:
        """Build the model; called in each worker, where the mesh is initialized."""
        self.module = self.module_cls()

    def get(self, bucket_rank: int, **kwargs: Any) -> tuple[nn.Module | None, Any]:
        """Return the model and its aliases for a bucket, given its index and keyword arguments."""
        return self.module, self.input_output_aliases[0]


class InstanceOnRank:
    """Builds the models of `ModelBuilderV1` in a worker."""

    def __init__(self, instances: Mapping[str, BaseModelInstance]) -> None:
        self._instances = instances

    def __call__(self, key: str, bucket: int, bucket_kwargs: Mapping[str, Any]) -> Any:
        """Return the model of a key and a bucket, and its aliases."""
        instance = copy.copy(self._instances[key])
        instance.load_module()
        module, aliases = instance.get(bucket, **bucket_kwargs)
        return module, aliases[0] if isinstance(aliases, list) and len(aliases) == 1 else aliases


class ModelBuilderV1:
    """Collects models by key, with inputs for each bucket; the models share weights and state.

    With a function and no `checkpoint_loader`, the constructor returns an `nxd_trace.ModelBuilder`.

    Args:
        router: None: a call selects its program by the shapes of its inputs.
        tp_degree: number of ranks.
        checkpoint_loader: function without arguments that returns the whole model's weights by name; None to set them
            later.
        start_rank_id: 0.
        pp_degree: 1.
        ep_degree: 1.
        local_ranks_size: `tp_degree` or None, like `world_size`.
        world_size: `tp_degree` or None.
        compiler_workdir: folder for the compiler's files.
        **old_settings: settings of the old compiler and its processes; accepted without effect.

    Raises:
        ValueError: a router, several stages, or a part of the ranks.
    """

    def __new__(cls, router: Any = None, tp_degree: int = 1, checkpoint_loader: Any = None, **settings: Any) -> Any:
        """Return an `nxd_trace.ModelBuilder` if the first argument is a function that builds the model."""
        if checkpoint_loader is None and callable(router or settings.get("func")) and not settings.keys() - {"func"}:
            return nxd_trace.ModelBuilder(router or settings["func"], tp_degree)
        return super().__new__(cls)

    def __init__(
        self,
        router: Any,
        tp_degree: int,
        checkpoint_loader: Callable[[], Mapping[str, Tensor]] | None,
        start_rank_id: int = 0,
        pp_degree: int = 1,
        ep_degree: int = 1,
        local_ranks_size: int | None = None,
        world_size: int | None = None,
        compiler_workdir: str | Path | None = None,
        **old_settings: Any,
    ) -> None:
        if (pp_degree, ep_degree, start_rank_id) != (1, 1, 0) or {world_size, local_ranks_size} - {None, tp_degree}:
            raise ValueError(
                f"pp_degree={pp_degree}, ep_degree={ep_degree}, start_rank_id={start_rank_id}, world_size={world_size},"
                f" local_ranks_size={local_ranks_size}: a traced model has {tp_degree} tensor-parallel ranks, all on "
                "this host"
            )
        if router is not None:
            raise ValueError("router must be None: a call selects its program by the shapes of its inputs")
        self.tp_degree = tp_degree
        self.checkpoint_loader = checkpoint_loader
        self.compiler_workdir = compiler_workdir
        self._instances: dict[str, BaseModelInstance] = {}
        self._programs: list[Program] = []
        self._compiler_args: dict[str, str | None] = {}

    def add(
        self,
        key: str,
        model_instance: BaseModelInstance,
        example_inputs: Sequence[Any],
        compiler_args: str | None = None,
        bucket_config: BucketModelConfig | None = None,
        priority_model_idx: int | None = None,
    ) -> Self:
        """Add a model.

        Args:
            key: name of the model.
            model_instance: builds the model in each worker.
            example_inputs: a tuple of inputs for each bucket; one tuple without buckets.
            compiler_args: options of neuronx-cc, the same for all models; ignored by other compilers.
            bucket_config: its `func_kwargs` are passed to `model_instance.get`.
            priority_model_idx: accepted without effect.

        Returns:
            The builder itself.

        Raises:
            ValueError: the key is already used.
        """
        if key in self._instances:
            raise ValueError(f"a model with key {key!r} has already been added; use a different key for each")
        self._instances[key] = model_instance
        self._compiler_args[key] = compiler_args
        for index, inputs in enumerate(example_inputs):
            kwargs = {} if bucket_config is None else dict(bucket_config.kwargs_of(index, len(example_inputs)))
            kwargs.pop("bucket_rank", None)  # `get` takes it as its own argument
            name = key if len(example_inputs) == 1 else f"{key}_{index}"
            self._programs.append(Program(name, inputs, {"key": key, "bucket": index, "bucket_kwargs": kwargs}))
        return self

    def trace(self, initialize_model_weights: bool = True, **old_settings: Any) -> "NxDModelExecutor":
        """Record and compile all models, with the weights of `checkpoint_loader`.

        Args:
            initialize_model_weights: False allows a missing loader or one that returns nothing: the models keep their
                initial weights until `nxd_model.initialize` of the result.
            **old_settings: see the class.

        Returns:
            The executor of the models.

        Raises:
            ValueError: models differ in their weights or in `compiler_args`, or no model was added.
            WorkerError: a worker failed; the message contains its traceback.
        """
        if not self._programs:
            raise ValueError("nothing has been added; call add() before trace()")
        builder = nxd_trace.ModelBuilder(InstanceOnRank(self._instances), self.tp_degree)
        for program in self._programs:
            builder.trace(program.inputs, program.name, program.func_kwargs)
        loaded = self._loaded()
        traced = builder.compile(
            weights=self._checkpoint(loaded) if initialize_model_weights or loaded else None,
            inline_weights_to_neff=False,
            compiler_args=_one_for_all(self._compiler_args),
            compiler_workdir=self.compiler_workdir,
            progress=False,
        )
        self._executor = NxDModelExecutor(NxDModel(traced))
        return self._executor

    def _loaded(self) -> Mapping[str, Tensor]:
        return {} if self.checkpoint_loader is None else self.checkpoint_loader()

    def _checkpoint(self, loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole weights after the modules' preshard hooks, with the ranks of `SPMDRank` added where missing."""
        checkpoint = dict(loaded)
        instance = copy.copy(next(iter(self._instances.values())))
        planned = NxDParallelState(self.tp_degree, tensor_model_parallel_size=self.tp_degree)
        with nullcontext() if model_parallel_is_initialized() else planned, init_on_device(torch.device("meta")):
            instance.load_module()
        if instance.module is not None:
            invoke_preshard_hooks(instance.module, checkpoint)
            for name, module in instance.module.named_modules():
                if isinstance(module, SPMDRank):
                    checkpoint.setdefault(f"{name}.rank", torch.arange(module.world_size, dtype=torch.int32))
        return checkpoint

    def shard_checkpoint(self, serialize_path: str | Path | None = None) -> list[dict[str, Tensor]]:
        """Return each rank's shards of the weights of `checkpoint_loader`, after `trace`.

        Args:
            serialize_path: folder in which to write `tp<rank>_sharded_checkpoint.safetensors` too.

        Raises:
            ValueError: nothing has been traced.
        """
        executor = getattr(self, "_executor", None)
        if executor is None:
            raise ValueError("nothing has been traced; call trace() before shard_checkpoint()")
        shards = nxd_trace.shard_checkpoint(self._checkpoint(self._loaded()), executor.nxd_model.model)
        if serialize_path is not None:
            nxd_trace.write_rank_weights(shards, serialize_path)
        return shards
