"""The ways to make a traced model: `parallel_model_trace`, `ModelBuilder`, `trace_module` and `parallel_model_load`.

`parallel_model_save` saves one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
from nxd_state import active_group, set_shard_spec
from torch import Tensor, nn

from nxd_trace.buckets import BucketModelConfig
from nxd_trace.caching import TraceContent
from nxd_trace.errors import ModelFolderError
from nxd_trace.exporting import named_tensors
from nxd_trace.manifest import MANIFEST, ModelManifest
from nxd_trace.model import TensorParallelModel, copy_model
from nxd_trace.programs import Program
from nxd_trace.sharding import rank_spec
from nxd_trace.tracing import TraceSettings, trace_programs
from nxd_trace.weights import Weights


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
    inputs: Any = None,
    compiler: str | None = None,
    weights: Weights | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
    content: TraceContent | None = None,
) -> TensorParallelModel:
    """Trace a tensor-parallel model: one worker process per rank builds its shard, records it and compiles it.

    The shorter documented form, `parallel_model_trace(func, inputs, tp_degree)`, also works.

    Args:
        func: function called in every worker, with model parallelism initialized. Returns the model, or the model and
            its aliases: a dict from state (a parameter or buffer, or its name) to the index of the output with its new
            value, or a list of state that forward updates in place. It must be importable: a function at the top level
            of a module, or of a script with its main code under `if __name__ == "__main__"`. If cloudpickle is
            installed, it may also be defined in a function or a notebook.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs; with `bucket_config` a list
            of these, one per bucket. Only shapes and dtypes matter.
        compiler_workdir: folder for the compiler's intermediate files; None keeps none.
        compiler_args: arguments of the compiler, as a list or one string.
        inline_weights_to_neff: whether the weights belong to the compiled programs; otherwise `replace_weights` can
            replace them.
        bucket_config: how a call selects its bucket.
        tp_degree: number of ranks.
        max_parallel_compilations: maximum number of ranks that record and compile at once; by default all.
        inputs: another name of `example_inputs`.
        compiler: "export", "inductor", "neuronx", "neuron" or "hlo"; by default chosen by device and installed tools.
        weights: logical tensors to fill the model with, whose parameters may be on the meta device: a safetensors file
            or a folder of them, a dict of tensors, or an open checkpoint. Each rank reads only its shard.
        cache_dir: folder of compiled programs for later traces; by default in the user's cache folder.
        progress: whether to report progress on standard error.
        content: description of the model that `func` makes. An earlier equal trace is reused, and only weights are
            read. Needs `weights`; ignored with buckets, and with compilers that keep weights in their programs.

    Returns:
        The model, with running workers.

    Raises:
        TypeError: `func` cannot be sent to workers, or inputs are not tensors.
        ValueError: arguments contradict each other.
        WorkerError: building, recording or compiling failed in a worker; the message has its traceback.
        OSError: the folder for temporary files is full or read-only.
        MissingMainGuardError: the script lacks its main guard.
    """
    if isinstance(compiler_workdir, int):  # parallel_model_trace(func, inputs, tp_degree)
        tp_degree, compiler_workdir = compiler_workdir, None
    if (example_inputs is None) == (inputs is None):
        raise ValueError("pass the example inputs once, as example_inputs (or inputs)")
    example_inputs = inputs if example_inputs is None else example_inputs
    settings = TraceSettings(
        compiler_workdir=compiler_workdir,
        compiler_args=compiler_args,
        inline_weights_to_neff=inline_weights_to_neff,
        tp_degree=tp_degree,
        max_parallel_compilations=max_parallel_compilations,
        compiler=compiler,
        weights=weights,
        cache_dir=cache_dir,
        progress=progress,
        content=content,
    )
    if bucket_config is None:
        return trace_programs(func, [Program("main", example_inputs)], settings)
    if not isinstance(example_inputs, list) or not example_inputs:
        raise ValueError("with bucket_config, example_inputs must be a list of inputs, one entry per bucket")
    programs = [
        Program(f"bucket_{index}", inputs_of_bucket, bucket_config.kwargs_of(index, len(example_inputs)))
        for index, inputs_of_bucket in enumerate(example_inputs)
    ]
    return trace_programs(func, programs, settings, bucket_config)


def parallel_model_save(model: TensorParallelModel, save_dir: str | Path) -> None:
    """Save a traced model: a folder with a manifest, the compiled programs, and one subfolder per rank.

    The save is atomic: a new folder is written and renamed. A traced model at `save_dir` is replaced. If `save_dir` is
    a link, its target is written.

    Args:
        model: a traced or loaded model.
        save_dir: folder to write.

    Raises:
        TypeError: `model` is not a traced model.
        ValueError: `save_dir` exists and is neither an empty folder nor a traced model without other files.
        ModelFolderError: the model's own files have been changed or removed.
    """
    if not isinstance(model, TensorParallelModel):
        raise TypeError(
            f"parallel_model_save got a {type(model).__name__}; expected a TensorParallelModel, which "
            "parallel_model_trace returns"
        )
    target = Path(save_dir).resolve()
    _check_replaceable(target)
    if target == model.folder.resolve():
        return
    manifest = ModelManifest.read(model.folder)
    manifest.check(model.folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
        new, old = Path(beside) / "new", Path(beside) / "old"
        new.mkdir()
        copy_model(model.folder, new)
        manifest.write(new)
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise


def _check_replaceable(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"save_dir={str(target)!r} is a file; pass a folder")
    found = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    if not found:
        return
    try:
        others = found - ModelManifest.read(target).files.keys() - {MANIFEST}
    except ModelFolderError:
        others = found
    if others:
        raise ValueError(
            f"save_dir={str(target)!r} holds other files ({sorted(others)[0]!r} and {len(others) - 1} more); pass a "
            "new folder, or that of a traced model"
        )


def parallel_model_load(
    load_dir: str | Path, *, bucket_config: BucketModelConfig | None = None, trust_code: bool = True
) -> TensorParallelModel:
    """Load a traced model and start its worker processes.

    Args:
        load_dir: folder written by `parallel_model_save`; it must exist while the model is in use.
        bucket_config: the configuration of the trace, if its functions are plain Python.
        trust_code: whether to run code from the folder: programs of the compilers "inductor" and "neuronx", and
            scripted bucket functions. Pass False for a folder from someone you do not trust; programs of the compiler
            "export" contain no code.

    Raises:
        ModelFolderError: the folder is incomplete or damaged, was made for another platform, device, torch or compiler,
            or contains untrusted code.
        WorkerError: a worker could not load its shard.
    """
    folder = Path(load_dir)
    manifest = ModelManifest.read(folder)
    if not trust_code:
        manifest.check_is_data(folder)
    manifest.check(folder)
    return TensorParallelModel(folder, bucket_config=bucket_config)


class ModelBuilder:
    """Collects programs that share weights and state, such as prefill and decode, and compiles a model from them.

    Example:
        model = ModelBuilder(build_llama, tp_degree=2).trace(prompt, tag="prefill").trace(token, tag="decode").compile()
        logits = model.run("decode", token)

    Args:
        func: function that builds the model, as for `parallel_model_trace`.
        tp_degree: number of ranks per replica.
        replicas: number of replicas, which run every call together: ranks with equal shards form a data-parallel group,
            over which forward may share work. Callers get the outputs of rank 0.
        expert_parallel_size: number of ranks that split the experts of a mixture, if `func` splits them: ranks with
            equal shards if there are enough replicas, otherwise any ranks, which then hold whole experts.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        tp_degree: int = 1,
        *,
        replicas: int = 1,
        expert_parallel_size: int = 1,
    ) -> None:
        self._func = func
        self._ranks = TraceSettings(tp_degree=tp_degree, replicas=replicas, expert_parallel_size=expert_parallel_size)
        self._programs: list[Program] = []

    def trace(self, inputs: Any, tag: str, func_kwargs: Mapping[str, Any] | None = None) -> Self:
        """Add a program.

        Args:
            inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs.
            tag: name of the program, for `TensorParallelModel.run`.
            func_kwargs: arguments of `func`; programs with equal arguments are recorded from one model.

        Returns:
            The builder.

        Raises:
            TypeError: the inputs are not tensors.
        """
        self._programs.append(Program(tag, inputs, dict(func_kwargs or {})))
        return self

    def compile(self, **settings: Any) -> TensorParallelModel:
        """Trace and compile all programs.

        Args:
            **settings: arguments of `parallel_model_trace`: compiler, compiler_args, compiler_workdir, weights,
                cache_dir, inline_weights_to_neff, max_parallel_compilations, progress, content.

        Raises:
            ValueError: there are no programs, two have the same name, or `parallel_model_trace` would raise it.
        """
        return trace_programs(self._func, self._programs, replace(self._ranks, **settings))


def trace_module(model: nn.Module, programs: Sequence[Program], tp_degree: int, **settings: Any) -> TensorParallelModel:
    """Trace an existing model of one rank; tensors that its forward changes in place are state.

    Args:
        model: the model of one of `tp_degree` ranks; its class must be importable, or cloudpickle installed.
        programs: programs to record.
        tp_degree: number of ranks.
        **settings: arguments of `parallel_model_trace`.

    Returns:
        A model whose weights can be replaced; with several ranks they must be.

    The errors are those of `parallel_model_trace`.
    """
    wanted = TraceSettings(tp_degree=tp_degree, inline_weights_to_neff=False, **settings)
    return trace_programs(ModuleOnRank(model, programs), programs, wanted)


class ModuleOnRank:
    """A `func` that adapts one rank's model to each rank, and finds the state that its forward changes.

    Args:
        model: the model of one of the ranks. Other ranks' weights are wrong until they are replaced.
        programs: programs whose calls show which tensors forward changes.
    """

    def __init__(self, model: nn.Module, programs: Sequence[Program]) -> None:
        self._model = model
        self._calls = [program.call for program in programs]

    def __call__(self) -> tuple[nn.Module, list[str]]:
        """Return the model and the names of its state; called in a worker."""
        rank = active_group("tp").rank
        for name, tensor in named_tensors(self._model):
            spec = rank_spec(name, tensor, rank)
            if spec is not None:
                set_shard_spec(tensor, spec)
        self._model.eval()
        return self._model, self._changed_by_forward()

    @torch.no_grad()
    def _changed_by_forward(self) -> list[str]:
        tensors = dict(named_tensors(self._model))
        before = {name: (tensor._version, tensor.detach().clone()) for name, tensor in tensors.items()}
        for args, kwargs in self._calls:
            self._model(*args, **kwargs)
        after = dict(named_tensors(self._model))
        assigned = [name for name, tensor in tensors.items() if after.get(name) is not tensor]
        for name in assigned:
            _check_assigned(name, tensors[name], after.get(name))
            module, _, buffer = name.rpartition(".")
            setattr(self._model.get_submodule(module), buffer, tensors[name])
        written = [name for name, tensor in tensors.items() if tensor._version != before[name][0]]
        for name in written:
            tensors[name].copy_(before[name][1])
        return sorted({*assigned, *written}, key=list(tensors).index)


def _check_assigned(name: str, before: Tensor, after: Tensor | None) -> None:
    if after is None or isinstance(before, nn.Parameter) or (after.shape, after.dtype) != (before.shape, before.dtype):
        found = "nothing" if after is None else f"{after.dtype} {list(after.shape)}"
        raise ValueError(
            f"forward replaces {name}, {before.dtype} {list(before.shape)}, by {found}; state must be a buffer that "
            "keeps its shape and dtype"
        )
