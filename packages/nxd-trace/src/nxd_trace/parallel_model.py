"""`parallel_model_trace`: the documented call, for one program or for buckets of one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nxd_trace.buckets import BucketModelConfig
from nxd_trace.caching import TraceContent
from nxd_trace.model import TensorParallelModel
from nxd_trace.program import Program
from nxd_trace.tracing import TraceSettings, Weights, trace_programs


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
    """Trace a tensor-parallel model: one worker process per rank builds its shard, records and compiles it.

    The shorter documented form, `parallel_model_trace(func, inputs, tp_degree)`, works as well.

    Args:
        func: function called in every worker, with model parallelism initialized; returns the model, or the model and
            its aliases: a dict from state (a parameter or buffer, or its name) to the index of the output that is its
            new value, or a list of the state that forward updates in place. It must be importable: a function at the
            top level of a module, or of a script with its main code under `if __name__ == "__main__"`. If cloudpickle
            is installed, it may also be defined in a function or a notebook.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs; with `bucket_config` a list
            of these, one per bucket. Only shapes and dtypes matter.
        compiler_workdir: folder for intermediate files of compilers; none are kept if None.
        compiler_args: arguments of the compiler; a list, or one string.
        inline_weights_to_neff: whether the weights belong to the compiled programs. False keeps them separate, so that
            `replace_weights` can put in new ones.
        bucket_config: rule by which a call selects its bucket.
        tp_degree: number of ranks.
        max_parallel_compilations: maximum number of ranks that record and compile at once; all if None.
        inputs: another name of `example_inputs`.
        compiler: "export", "inductor", "neuronx" or "hlo"; chosen by device and installed tools if None.
        weights: logical tensors to fill the model with, whose parameters may be on the meta device: a safetensors file
            or a folder of them, a dict of tensors, or an open checkpoint. Each rank reads only its part.
        cache_dir: folder of compiled programs for later traces; in the user's cache folder if None.
        progress: whether to report progress on standard error.
        content: description of the model that `func` makes. An equal trace made before is reused, and only weights are
            read. Needs `weights`; not with buckets, nor with compilers that keep weights in their programs.

    Returns:
        The model, whose workers run.

    Raises:
        TypeError: `func` cannot be sent to workers, or inputs are not tensors.
        ValueError: arguments contradict each other.
        WorkerError: building, recording or compiling failed in a worker; the text holds its traceback.
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
