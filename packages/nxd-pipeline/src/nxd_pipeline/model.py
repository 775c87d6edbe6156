"""`NxDPPModel`: a model cut into pipeline stages, trained and evaluated by a schedule."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from nxd_state import (
    Group,
    get_group,
    is_transformers_model,
    model_parallel_is_initialized,
    transformers_model_in,
    use_loss_over_labels,
)
from torch import Tensor, nn

from nxd_pipeline.partition import (
    Balance,
    LayerClasses,
    LocalParts,
    LossFunction,
    ParamInit,
    PartitionOptions,
    Stage,
    StageOfLayers,
    Tracer,
    check_old_flags,
    partition_model,
    whole_model,
)
from nxd_pipeline.runtime.gradient_sync import GradientSync, GradientSyncs, average_over_replicas
from nxd_pipeline.runtime.loss import LossReport, LossSpec, check_loss_spec
from nxd_pipeline.runtime.microbatches import split_batch
from nxd_pipeline.runtime.runner import PipelineAbort, StagesRunner, WholeModelRunner
from nxd_pipeline.schedules import (
    Schedule,
    choose_schedule,
)
from nxd_pipeline.timeline import BubbleReport, TraceFile, bubble_report


class NxDPPModel(nn.Module):
    """Runs a model over the ranks of the "pp" group; every rank holds its stages only.

    Every rank of a pipeline creates it from the same model and passes the same inputs to each call. If the pipeline has
    one rank (or `initialize_model_parallel` was not called) the model stays whole, and all calls work as well.

    Attributes and methods of the user's model are also available here. A method that changes weights changes only those
    of this rank; the others are on the meta device.

    Attributes:
        original_torch_module: the model before it was cut, with the weights of this rank only.
    """

    original_torch_module: nn.Module

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module] | None = None,
        transformer_layer_cls: LayerClasses | None = None,
        num_microbatches: int = 1,
        output_loss_value_spec: LossSpec = None,
        return_mb_loss: bool = False,
        broadcast_and_average_loss: bool = False,
        pipeline_cuts: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        leaf_module_cls: Sequence[type[nn.Module] | str] | None = None,
        autowrap_functions: Sequence[Callable[..., Any] | ModuleType] | None = None,
        autowrap_modules: Sequence[ModuleType | Callable[..., Any]] | None = None,
        tracer_cls: Tracer | None = None,
        param_init_fn: ParamInit | None = None,
        trace_file_path: str | Path | None = None,
        use_zero1_optimizer: bool = False,
        auto_partition: bool = False,
        *,
        balance: Balance = "layers",
        stages: Sequence[nn.Module | Stage] | None = None,
        manual_pp_partition: bool = False,
        manual_pp_stage_partition_fn: StageOfLayers | None = None,
        manual_pp_loss_fn: LossFunction | None = None,
        virtual_pipeline_size: int = 1,
        schedule: str | Schedule | None = None,
        return_loss_on_cpu: bool = True,
        deallocate_pipeline_outputs: bool = False,
        use_model_wrapper: bool = False,
        use_optimizer_wrapper: bool = False,
        autowrap_obj_methods: Mapping[Any, Sequence[str]] | None = None,
        fuse_microbatches: bool = False,
        on_filled: Callable[[nn.Module], None] | None = None,
        **old_flags: Any,
    ) -> None:
        """Cut the model and keep this rank's stages.

        Args:
            module: the model; with `manual_pp_partition` a list of layers. It may be on the meta device. With `stages`
                it may be omitted: they are the model then, and names start with the stage, such as "0.weight".
            transformer_layer_cls: the class (or classes) of the layers, which stay whole in a trace. Models of
                transformers declare theirs.
            num_microbatches: number of parts that a batch is split into, along dim 0.
            output_loss_value_spec: place of the loss in the model's output: a tuple or dict of the output's structure
                with True at the loss; True if the output is the loss; None for the output, or its `loss` for a
                transformers model.
            return_mb_loss: whether `run_train` and `run_eval` return a list with each microbatch's loss.
            broadcast_and_average_loss: whether every rank gets the loss, averaged over the data-parallel ranks.
            pipeline_cuts: the last layer of each stage but the last.
            input_names: the arguments of `forward` in calls; those without a default if None. Calls of a
                transformers model may omit those with a default.
            leaf_module_cls: further classes, or their names, that stay whole in a trace.
            autowrap_functions: functions that stay whole in a trace.
            autowrap_modules: Python modules whose functions stay whole in a trace.
            tracer_cls: "torch" or a subclass of `torch.fx.Tracer` to trace with; "hf", the default for models of
                transformers, cuts them by their structure without a trace.
            param_init_fn: function called with each module of this rank that is on the meta device, to fill its own
                parameters and buffers; see `materialize`.
            trace_file_path: path of a JSON file for the timeline of the first training steps on all ranks, which
                Perfetto shows, with a picture beside it; see `TraceFile`.
            use_zero1_optimizer: whether the optimizer, not `run_train`, averages gradients over the replicas.
            auto_partition: whether to cut between layers by `balance`.
            balance: "layers": equal numbers of layers per stage, the remainder on later stages. "parameters" or
                "flops": the largest stage is as small as possible, with embeddings and head counted where they are.
                Costs of the layers, such as measured times or `layer_flops`: the same by these.
            stages: stages written by hand, see `manual_partition`; nothing is traced then.
            manual_pp_partition: whether `module` is a list of layers, called one after the other; inputs are `inputs`
                and, with a loss function, `labels`.
            manual_pp_stage_partition_fn: function that returns the stage of each layer, see `sequence_partition`.
            manual_pp_loss_fn: function of the last layer's output and the labels that returns the loss.
            virtual_pipeline_size: number of stages per rank; a given schedule has its own.
            schedule: a name, see `make_schedule`, or a schedule; None for 1F1B, interleaved if there are several
                stages per rank.
            return_loss_on_cpu: whether losses are returned as CPU tensors.
            deallocate_pipeline_outputs: no effect; the runtime keeps what backward needs.
            use_model_wrapper: no effect.
            use_optimizer_wrapper: the same as `use_zero1_optimizer`.
            autowrap_obj_methods: names of methods, by object, that stay whole in a trace.
            on_filled: called with each module of this rank's stages once `param_init_fn` has filled it.
            fuse_microbatches: no effect; a device that records graphs records one per action.
            **old_flags: the flags in `OLD_RUNTIME_FLAGS`, accepted for existing scripts; a log line says that they have
                no effect.

        Raises:
            TypeError: an unknown argument.
            ValueError: arguments cannot be combined, or the model cannot be cut or the schedule executed this way.
        """
        super().__init__()
        check_old_flags(old_flags)
        if return_mb_loss and broadcast_and_average_loss:
            raise ValueError("return_mb_loss and broadcast_and_average_loss cannot be combined; set only one")
        check_loss_spec(output_loss_value_spec)
        options = PartitionOptions(
            transformer_layer_cls=transformer_layer_cls,
            pipeline_cuts=pipeline_cuts,
            auto_partition=auto_partition,
            balance=balance,
            input_names=input_names,
            leaf_module_cls=leaf_module_cls,
            autowrap_functions=autowrap_functions,
            autowrap_modules=autowrap_modules,
            autowrap_obj_methods=autowrap_obj_methods,
            tracer_cls=tracer_cls,
            stages=stages,
            manual_pp_partition=manual_pp_partition,
            manual_pp_stage_partition_fn=manual_pp_stage_partition_fn,
            manual_pp_loss_fn=manual_pp_loss_fn,
        )
        whole = whole_model(module, options)
        module = whole if module is None else module
        if is_transformers_model(inner := transformers_model_in(whole)):
            use_loss_over_labels(inner)
            if output_loss_value_spec is None:
                output_loss_value_spec = {"loss": True}
        self._num_microbatches = num_microbatches
        self._group = get_group("pp") if model_parallel_is_initialized() else Group.solo("pp")
        self._abort = PipelineAbort(self._group)
        self._schedule = choose_schedule(schedule, self._group.size, num_microbatches, virtual_pipeline_size)
        self._report = LossReport(
            spec=output_loss_value_spec,
            per_microbatch=return_mb_loss,
            broadcast_and_average=broadcast_and_average_loss,
            on_cpu=return_loss_on_cpu,
            pipeline=self._group,
            last_rank=self._schedule.rank_of_stage[-1],
        )
        optimizer_averages = use_zero1_optimizer or use_optimizer_wrapper
        self._gradient_syncs = GradientSyncs(whole, optimizer_averages=optimizer_averages)
        self._tied_names = LocalParts([whole]).tied_names()
        self._runner = self._make_runner(module, whole, options, param_init_fn, on_filled)
        self.__dict__["original_torch_module"] = self._runner.original  # not a second name of its parameters
        self._trace_file = None
        if trace_file_path is not None:
            self._trace_file = TraceFile(trace_file_path, self._runner.schedule, self._group)

    def _make_runner(
        self,
        module: nn.Module | Sequence[nn.Module],
        whole: nn.Module,
        options: PartitionOptions,
        param_init_fn: ParamInit | None,
        on_filled: Callable[[nn.Module], None] | None,
    ) -> WholeModelRunner | StagesRunner:
        """Cut the model, unless there is one stage, and register the modules of this rank."""
        if self._schedule.num_stages == 1:
            self._whole_model = whole
            return WholeModelRunner(whole, self._num_microbatches, param_init_fn)
        runner = StagesRunner(  # nothing here holds the stages of other ranks
            partition_model(module, self._schedule.num_stages, options),
            whole,
            self._schedule,
            self._group,
            self._abort,
            param_init_fn,
            on_filled,
        )
        self._local_modules = runner.modules
        gc.collect()  # torch.fx leaves cycles, which would keep the whole model alive after the caller releases it
        return runner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "original_torch_module" not in self.__dict__:
                raise
            return getattr(self.original_torch_module, name)

    def partition(self) -> None:
        """Do nothing, for scripts that call it: the constructor has cut the model."""

    def sync_gradients_by(self, sync: GradientSync, parameters: Iterable[Tensor]) -> None:
        """Let `sync` average gradients while `run_train` runs backward; no reference to it is kept.

        It replaces an earlier one for any of these parameters.
        """
        self._gradient_syncs.add(sync, parameters)

    @property
    def loss_scale(self) -> float:
        """The factor of gradients in `run_train`, for an optimizer in `sync_gradients_by` that scales the loss."""
        return self._gradient_syncs.loss_scale()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a block in which `run_train` only accumulates gradients, for all calls of a step but the last.

        As in DistributedDataParallel: without it each call communicates, and the gradients are the same.
        """
        return self._gradient_syncs.off()

    def run_train(self, **kwargs: Any) -> Tensor | list[Tensor] | None:
        """Run forward and backward of a batch; gradients are added to those that the parameters have.

        An optimizer in `sync_gradients_by` averages them over the replicas, each as soon as the last microbatch's
        backward has computed it, except in `no_sync`. Without one they are averaged at the end, unless the model was
        created with `use_zero1_optimizer` or `use_optimizer_wrapper`, as it must be if the mesh splits experts.
        `torch.autocast` around the call applies to the forward passes.

        Args:
            **kwargs: the model's inputs, the same on every rank of the pipeline.

        Returns:
            The mean of the microbatches' losses (or their list, by `return_mb_loss`) on the rank of the last stage;
            None elsewhere, unless `broadcast_and_average_loss`.

        Raises:
            ValueError: inputs are missing, unknown or cannot be cut into microbatches, the model returned no loss, the
                schedule is for evaluation only, no optimizer averages the gradients of split experts, or, on the first
                call without such an optimizer, ranks that should hold the same weights have different ones.
        """
        if self._runner.schedule.is_forward_only:
            raise ValueError(
                f"schedule {self._schedule.name!r} has no backward, so this pipeline can only run_eval; create it "
                "with another schedule, see SCHEDULE_NAMES"
            )
        microbatches = self._microbatches(kwargs)
        averages = self._gradient_syncs.must_average(self.local_parameters())
        with nullcontext() if self._trace_file is None else self._trace_file.step() as record:
            losses = self._runner.train(microbatches, self._report.training_loss, self._gradient_syncs, record)
        if averages:
            average_over_replicas(self.local_parameters())
        with self._abort.end_all_ranks():
            return self._report.of_losses(losses)

    def run_eval(self, **kwargs: Any) -> Any:
        """Run forward of a batch, without gradients.

        Args:
            **kwargs: the model's inputs, the same on every rank of the pipeline.

        Returns:
            On the rank of the last stage: as `run_train` if the model returns a loss, else the list of the
            microbatches' outputs. None elsewhere, unless `broadcast_and_average_loss`.
        """
        microbatches = self._microbatches(kwargs)
        results = self._runner.evaluate(microbatches, self._report.evaluated)
        with self._abort.end_all_ranks():
            return self._report.of_evaluation(results)

    def synchronize_tied_weights(self) -> None:
        """Set all copies of a tied weight to the values of the first; an optimizer leaves rounding differences.

        `run_train` and `run_eval` begin with it; call it only to read the copies in between. Called by all ranks of the
        pipeline; optimizer states of further copies are meaningless and should not be saved.
        """
        self._runner.synchronize_tied_weights()

    def tie_added_parameters(self) -> None:
        """Make parameters that were added to the stages, such as adapters, equal where several ranks hold their module.

        Called by all ranks of the pipeline, before an optimizer is made.
        """
        self._runner.tie_added_parameters()

    def bubble_report(self) -> BubbleReport:
        """Return the measured idle fraction of the last traced step on this pipeline's ranks, and the simulated one.

        Raises:
            RuntimeError: no step has been traced.
        """
        step = None if self._trace_file is None else self._trace_file.last_step
        if step is None:
            raise RuntimeError("no step has been traced; pass trace_file_path, and call run_train")
        return bubble_report(step.timelines[step.pipelines.index(self._group.ranks)])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, if the pipeline has one rank.

        Raises:
            RuntimeError: the model is cut.
        """
        return self._runner.forward(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # called by to(), half(), cuda()
        local = self._runner.local
        before = [tensor.dtype for tensor in local.tensors()]
        super()._apply(fn, recurse)
        if before != [tensor.dtype for tensor in local.tensors()]:
            self._runner.forget_layouts()  # stages return other dtypes than before
        return self

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's parameters by the unpartitioned model's names; a tied weight once per rank."""
        return self._runner.local.named_parameters()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Return this rank's buffers by the unpartitioned model's names."""
        return self._runner.local.named_buffers()

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Return this rank's modules by the unpartitioned model's names; each stage has the name of the whole, ""."""
        return self._runner.local.named_modules()

    def tied_names(self) -> dict[str, str]:
        """Map each further name of a tied weight of the unpartitioned model to the first, which checkpoints use."""
        return dict(self._tied_names)

    def local_state_dict(self, *, keep_vars: bool = False) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers by the unpartitioned model's names.

        Args:
            keep_vars: whether to return the parameters themselves, as for `torch.nn.Module.state_dict`.

        Raises:
            RuntimeError: the parameters are sharded over the replicas (ZeRO-3), and `keep_vars` is not set.
        """
        return self._runner.local.state_dict(keep_vars=keep_vars)

    def load_local_state_dict(self, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Copy values from a `local_state_dict`, or from the state of the unpartitioned model.

        Raises:
            ValueError: values of this rank are missing (if `strict`), or shapes differ.
        """
        self._runner.local.load_state_dict(state, strict=strict)

    def _microbatches(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        return split_batch(self._runner.complete(batch), self._num_microbatches)
