"""`ModelBuilder`: traces several programs of one model, such as prefill and decode, that share weights and state."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from nxd_trace.manifest import RankManifest, rank_folder
from nxd_trace.model import TensorParallelModel
from nxd_trace.program import Program
from nxd_trace.tracing import TraceSettings, Weights, trace_programs
from nxd_trace.weights import as_source, read_weights


class ModelBuilder:
    """Collects programs with `trace`, then makes a model from them with `compile`.

    Example:
        model = ModelBuilder(build_llama, tp_degree=2).trace(prompt, tag="prefill").trace(token, tag="decode").compile()
        logits = model.run("decode", token)

    Args:
        func: the function that builds the model, as for `parallel_model_trace`.
        tp_degree: ranks per replica.
        replicas: number of replicas, which run every call together: ranks with equal parts of the model form a
            data-parallel group, over which forward may share work. Callers get the result of rank 0.
        expert_parallel_size: ranks that split the experts of a mixture, if `func` splits them: ranks with equal parts
            of the model if there are enough replicas, otherwise ranks with any parts, which then hold whole experts.
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
            tag: its name, for `TensorParallelModel.run`.
            func_kwargs: arguments for `func`; programs with equal arguments are recorded from one model.

        Returns:
            The builder itself.

        Raises:
            TypeError: the inputs are not tensors.
        """
        self._programs.append(Program(tag, inputs, dict(func_kwargs or {})))
        return self

    def compile(self, **settings: Any) -> TensorParallelModel:
        """Trace and compile all programs.

        Args:
            **settings: as for `parallel_model_trace`: compiler, compiler_args, compiler_workdir, weights, cache_dir,
                inline_weights_to_neff, max_parallel_compilations, progress, content.

        Raises:
            As `parallel_model_trace`; ValueError if there are no programs or two have the same name.
        """
        return trace_programs(self._func, self._programs, replace(self._ranks, **settings))


def shard_checkpoint(weights: Weights, model: TensorParallelModel) -> list[dict[str, Tensor]]:
    """Return each rank's shards of some weights, without passing them to the workers.

    Args:
        weights: as for `TensorParallelModel.replace_weights`.
        model: a traced or loaded model; its workers need not run.

    Returns:
        For each rank, tensors by their names in the model.

    Raises:
        ValueError: the weights do not fit the model.
    """
    shards = []
    with as_source(weights) as source:
        for rank in range(model.num_ranks):
            stored = RankManifest.read(model.folder / rank_folder(rank)).weights
            tensors = {
                name: torch.empty(weight.shape, dtype=getattr(torch, weight.dtype)) for name, weight in stored.items()
            }
            filled = read_weights(stored, source, tensors.__getitem__)
            shards.append({name: tensors[name] for name in filled})
    return shards
