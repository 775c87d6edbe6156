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
        func: called in every worker, with model parallelism initialised; returns the model, or the model and its
            aliases: a dict of state (a parameter or buffer, or its name) to the number of the output that is its new
            value, or a list of the state that forward updates in place. It must be importable: a function at the top
            level of a module, or of a script that keeps what it does under `if __name__ == "__main__"`. Where
            cloudpickle is installed, it may also be defined in a function or a notebook.
        example_inputs: a tensor, a tuple of positional inputs or a dict of keyword inputs; with `bucket_config` a list
            of these, one per bucket. Shapes and dtypes count, values do not.
        compiler_workdir: where compilers leave their intermediate files; none are kept if None.
        compiler_args: for the compiler; a list, or one string.
        inline_weights_to_neff: the weights belong to the compiled programs. False keeps them apart, so that
            `replace_weights` can put in new ones.
        bucket_config: how a call chooses its bucket.
        tp_degree: number of ranks.
        max_parallel_compilations: how many ranks record and compile at once; all if None.
        inputs: another name of `example_inputs`.
        compiler: "export", "inductor", "neuronx" or "hlo"; chosen by device and installed tools if None.
        weights: logical tensors to fill the model with, whose parameters may be on the meta device: a safetensors file
            or a folder of them, a dict of tensors, or an open checkpoint. Each rank reads only its part.
        cache_dir: where compiled programs are kept for later traces; in the user's cache folder if None.
        progress: say on standard error what is being done.
        content: what `func` makes its model of. An equal trace that was made before is used again, and only weights are
            read. Needs `weights`; not with buckets, nor with compilers that keep weights in their programs.

    Returns:
        The model, whose workers run.

    Raises:
        TypeError: `func` cannot be sent to workers, or inputs are no tensors.
        ValueError: arguments that do not fit each other.
        WorkerError: building, recording or compiling failed in a worker; the text holds its traceback.
        OSError: the folder for temporary files is full or read-only.
        MissingMainGuardError: the script lacks its main guard.
    """
    if isinstance(compiler_workdir, int):  # parallel_model_trace(func, inputs, tp_degree)
        tp_degree, compiler_workdir = compiler_workdir, None
    if (example_inputs is None) == (inputs is None):
        raise ValueError("give the example inputs once, as example_inputs (or inputs)")
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
