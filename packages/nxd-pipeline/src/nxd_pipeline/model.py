"""`NxDPPModel`: a model cut into pipeline stages, trained and evaluated by a schedule."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from nxd_state import Group, broadcast, get_group, model_parallel_is_initialized
from torch import Tensor, fx, nn

from nxd_pipeline.partition import (
    Stage,
    Wiring,
    check_cuts,
    even_cuts,
    layer_names,
    manual_partition,
    trace_model,
    traced_partition,
)
from nxd_pipeline.partition.cuts import LayerClasses
from nxd_pipeline.runtime.executor import Executor
from nxd_pipeline.runtime.failure import first_failure_named
from nxd_pipeline.runtime.loss import LossSpec, check_loss, pick_loss, share_loss
from nxd_pipeline.runtime.mailbox import Mailbox, message_device
from nxd_pipeline.runtime.microbatches import split_batch
from nxd_pipeline.runtime.tied_weights import TiedWeights
from nxd_pipeline.schedules import Schedule, forward_only, insert_communication, make_schedule


class NxDPPModel(nn.Module):
    """Runs a model over the ranks of the "pp" group; every rank holds its stages only.

    Every rank of a pipeline makes it from the same model and gives the same inputs to each call. Where the pipeline
    has one rank (or `initialize_model_parallel` was not called) the model stays whole, and all calls work as well.
    """

    def __init__(
        self,
        module: nn.Module,
        transformer_layer_cls: LayerClasses | None = None,
        num_microbatches: int = 1,
        output_loss_value_spec: LossSpec = None,
        return_mb_loss: bool = False,
        broadcast_and_average_loss: bool = False,
        pipeline_cuts: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        leaf_module_cls: Sequence[type[nn.Module] | str] | None = None,
        autowrap_functions: Sequence[Callable[..., Any]] | None = None,
        autowrap_modules: Sequence[ModuleType] | None = None,
        tracer_cls: str | type[fx.Tracer] | None = None,
        use_zero1_optimizer: bool = False,
        auto_partition: bool = False,
        *,
        stages: Sequence[nn.Module | Stage] | None = None,
        virtual_pipeline_size: int = 1,
        schedule: str | Schedule | None = None,
        return_loss_on_cpu: bool = True,
    ) -> None:
        """Cut the model and keep this rank's stages.

        Args:
            module: the model.
            transformer_layer_cls: the class (or classes) of its layers, which a trace does not look into.
            num_microbatches: how many parts a batch is cut into, along dim 0.
            output_loss_value_spec: where in the model's output the loss is, as True in a tuple or dict of the
                output's structure; None: the output is the loss.
            return_mb_loss: `run_train` and `run_eval` return a list with each microbatch's loss.
            broadcast_and_average_loss: every rank gets the loss, averaged over the data-parallel ranks.
            pipeline_cuts: the last layer of each stage but the last.
            input_names: the arguments of `forward` that calls give; those without a default if None.
            leaf_module_cls: further classes, or their names, that a trace does not look into.
            autowrap_functions: functions that a trace does not look into.
            autowrap_modules: Python modules whose functions a trace does not look into.
            tracer_cls: "torch" or a subclass of `torch.fx.Tracer`.
            use_zero1_optimizer: taken for scripts that give it; averaging gradients over data-parallel ranks is
                left to the optimizer in any case.
            auto_partition: cut between layers of `transformer_layer_cls`, equally many to each stage.
            stages: stages written by hand, see `manual_partition`; nothing is traced then.
            virtual_pipeline_size: stages per rank.
            schedule: a name, see `make_schedule`, or a schedule; None for 1F1B, interleaved if there are several
                stages per rank.
            return_loss_on_cpu: losses come back as CPU tensors.

        Raises:
            ValueError: arguments that exclude each other, or a model or schedule that cannot be cut or played so.
        """
        super().__init__()
        if return_mb_loss and broadcast_and_average_loss:
            raise ValueError("return_mb_loss and broadcast_and_average_loss exclude each other; choose one")
        self._num_microbatches = num_microbatches
        self._loss_spec = output_loss_value_spec
        self._return_mb_loss = return_mb_loss
        self._broadcast_loss = broadcast_and_average_loss
        self._return_loss_on_cpu = return_loss_on_cpu
        self._group = get_group("pp") if model_parallel_is_initialized() else Group.solo("pp")
        self._schedule = _make_schedule(schedule, self._group.size, num_microbatches, virtual_pipeline_size)
        cut = _Cut(
            transformer_layer_cls,
            pipeline_cuts,
            auto_partition,
            input_names,
            tuple(leaf_module_cls or ()),
            tuple(autowrap_functions or ()),
            tuple(autowrap_modules or ()),
            _tracer_class(tracer_cls),
        )
        self._whole_model: nn.Module | None = None
        self._stages: dict[int, Stage] = {}
        if self._schedule.num_stages == 1:
            self._whole_model = module
        else:
            every_stage = cut.apply(module, self._schedule.num_stages, stages)
            self._keep_stages(every_stage)

    def _keep_stages(self, every_stage: Sequence[Stage]) -> None:
        """Keep what this rank needs of all stages; the rest goes with the last reference to the model."""
        wiring = Wiring(every_stage)
        self._inputs = wiring.model_inputs
        self._tied_weights = TiedWeights(every_stage, self._schedule.rank_of_stage, self._group)
        self._stages = {index: every_stage[index] for index in self._schedule.stages_of(self._group.rank)}
        self._local_modules = nn.ModuleList(stage.module for stage in self._stages.values())
        modules = {index: stage.module for index, stage in self._stages.items()}
        mailbox = Mailbox(self._group)
        training = insert_communication(self._schedule, wiring.edges)
        evaluation = insert_communication(forward_only(self._schedule), wiring.edges)
        self._train_executor = Executor(modules, wiring, training, mailbox)
        self._eval_executor = Executor(modules, wiring, evaluation, mailbox)

    def partition(self) -> None:
        """Does nothing: the model is cut when it is made. For scripts that ask for it."""

    def run_train(self, **kwargs: Any) -> Tensor | list[Tensor] | None:
        """Forward and backward of a batch; gradients are added to those that the parameters have.

        Args:
            **kwargs: the model's inputs, the same on every rank of the pipeline.

        Returns:
            The mean of the microbatches' losses (or their list, by `return_mb_loss`) on the rank of the last stage;
            None elsewhere, unless `broadcast_and_average_loss`.

        Raises:
            ValueError: inputs are missing, unknown or cannot be cut into microbatches, or the model returned no loss.
        """
        microbatches = self._microbatches(kwargs)
        if self._whole_model is not None:
            losses = []
            for microbatch in microbatches:
                loss = self._training_loss(self._whole_model(**microbatch))
                (loss / self._num_microbatches).backward()
                losses.append(loss.detach())
        else:
            with first_failure_named(self._group), self._tied_weights.gradients_summed():
                losses = self._train_executor.run(self._group.rank, microbatches, self._training_loss)
        return self._finished(losses)

    def run_eval(self, **kwargs: Any) -> Any:
        """Forward of a batch, without gradients.

        Args:
            **kwargs: the model's inputs, the same on every rank of the pipeline.

        Returns:
            On the rank of the last stage: as `run_train` where the model returns a loss, else the list of the
            microbatches' outputs. None elsewhere, unless `broadcast_and_average_loss`.
        """
        microbatches = self._microbatches(kwargs)
        if self._whole_model is not None:
            with torch.no_grad():
                results = [self._evaluated(self._whole_model(**microbatch)) for microbatch in microbatches]
        else:
            with first_failure_named(self._group):
                results = self._eval_executor.run(self._group.rank, microbatches, self._evaluated)
        is_loss = all(isinstance(it, Tensor) and it.numel() == 1 for it in results)
        if self._broadcast_loss:  # only the last stage's rank has seen what the model returns
            seen = torch.tensor(is_loss, device=message_device(self._group))
            is_loss = bool(broadcast(seen, self._group, source=self._schedule.rank_of_stage[-1]))
        if is_loss:
            return self._finished(results)
        return results or None

    def forward(self, **kwargs: Any) -> Any:
        """What the model returns, where the pipeline has one rank.

        Raises:
            RuntimeError: the model is cut.
        """
        if self._whole_model is None:
            raise RuntimeError("a model cut into stages has no forward of its own; call run_train or run_eval")
        return self._whole_model(**kwargs)

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the unpartitioned model's names; a tied weight once per rank."""
        seen: set[nn.Parameter] = set()
        for part in self._local_parts():
            for name, parameter in part.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """This rank's modules by the unpartitioned model's names; each stage itself has the name of the whole, ""."""
        for part in self._local_parts():
            yield from part.named_modules()

    def local_state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers by the unpartitioned model's names."""
        return {name: tensor for part in self._local_parts() for name, tensor in part.state_dict().items()}

    def _local_parts(self) -> list[nn.Module | Stage]:
        return list(self._stages.values()) if self._whole_model is None else [self._whole_model]

    def _microbatches(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._whole_model is None:
            missing, unknown = sorted(self._inputs - batch.keys()), sorted(batch.keys() - self._inputs)
            if missing:
                raise ValueError(f"the inputs {missing} are missing; the model was cut for {sorted(self._inputs)}")
            if unknown:
                raise ValueError(
                    f"no stage uses the inputs {unknown}; the model was cut for {sorted(self._inputs)}. "
                    "Name all inputs in input_names"
                )
        return split_batch(batch, self._num_microbatches)

    def _training_loss(self, output: Any) -> Tensor:
        return check_loss(pick_loss(output, self._loss_spec))

    def _evaluated(self, output: Any) -> Any:
        """The loss where the output has one in its place, else the output."""
        loss = pick_loss(output, self._loss_spec)
        return output if loss is None else loss

    def _finished(self, losses: Sequence[Tensor]) -> Tensor | list[Tensor] | None:
        if self._return_loss_on_cpu:
            losses = [loss.cpu() for loss in losses]
        if self._return_mb_loss:
            return list(losses) or None
        mean = torch.stack([loss.reshape(()) for loss in losses]).mean() if losses else None
        if self._broadcast_loss:
            source = self._schedule.rank_of_stage[-1]
            replicas = get_group("dp") if model_parallel_is_initialized() else Group.solo("dp")
            mean = share_loss(mean, self._group, replicas, source=source)
            return mean.cpu() if self._return_loss_on_cpu else mean
        return mean


@dataclass(frozen=True)
class _Cut:
    """Where and how a model is to be cut; the fields are those of `NxDPPModel`."""

    transformer_layer_cls: LayerClasses | None
    pipeline_cuts: Sequence[str] | None
    auto_partition: bool
    input_names: Sequence[str] | None
    leaf_classes: tuple[type[nn.Module] | str, ...]
    autowrap_functions: tuple[Callable[..., Any], ...]
    autowrap_modules: tuple[ModuleType, ...]
    tracer_cls: type[fx.Tracer]

    def apply(
        self, module: nn.Module, num_stages: int, stages: Sequence[nn.Module | Stage] | None
    ) -> tuple[Stage, ...]:
        """All stages of the model."""
        if stages is not None:
            return self._by_hand(module, num_stages, stages)
        cuts = self._cuts(module, num_stages)
        layer_classes = self.transformer_layer_cls or ()
        graph = trace_model(
            module,
            input_names=self.input_names,
            leaf_classes=(
                *((layer_classes,) if isinstance(layer_classes, type) else layer_classes),
                *self.leaf_classes,
            ),
            leaf_names=cuts,
            autowrap_functions=self.autowrap_functions,
            autowrap_modules=self.autowrap_modules,
            tracer_cls=self.tracer_cls,
        )
        return traced_partition(module, graph, cuts)

    def _by_hand(self, module: nn.Module, num_stages: int, stages: Sequence[nn.Module | Stage]) -> tuple[Stage, ...]:
        if self.pipeline_cuts is not None or self.auto_partition:
            raise ValueError("stages are given by hand; leave out pipeline_cuts and auto_partition")
        if len(stages) != num_stages:
            raise ValueError(
                f"{len(stages)} stages are given; this pipeline needs {num_stages}, one for each rank and each of its "
                "virtual_pipeline_size"
            )
        names = list(inspect.signature(module.forward).parameters) if self.input_names is None else self.input_names
        return manual_partition(stages, input_names=names, model=module)

    def _cuts(self, module: nn.Module, num_stages: int) -> Sequence[str]:
        if self.auto_partition:
            if self.pipeline_cuts is not None:
                raise ValueError("pipeline_cuts and auto_partition exclude each other; choose one")
            if self.transformer_layer_cls is None:
                raise ValueError("auto_partition needs transformer_layer_cls, the class of the layers to spread")
            return even_cuts(layer_names(module, self.transformer_layer_cls), num_stages)
        if self.pipeline_cuts is None:
            raise ValueError(
                f"nothing says where to cut the model into {num_stages} stages; give pipeline_cuts, or "
                "auto_partition=True with transformer_layer_cls, or stages"
            )
        check_cuts(module, self.pipeline_cuts, num_stages)
        return self.pipeline_cuts


def _make_schedule(
    schedule: str | Schedule | None, pipeline_size: int, num_microbatches: int, virtual_pipeline_size: int
) -> Schedule:
    if schedule is None:
        schedule = "1f1b" if virtual_pipeline_size == 1 else "interleaved"
    if isinstance(schedule, str):
        return make_schedule(schedule, pipeline_size, num_microbatches, virtual_pipeline_size=virtual_pipeline_size)
    if (schedule.num_ranks, schedule.num_microbatches) != (pipeline_size, num_microbatches):
        raise ValueError(
            f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} "
            f"microbatches; this pipeline has {pipeline_size} ranks and num_microbatches={num_microbatches}"
        )
    return schedule


def _tracer_class(tracer: str | type[fx.Tracer] | None) -> type[fx.Tracer]:
    if tracer is None or tracer == "torch":
        return fx.Tracer
    if isinstance(tracer, type) and issubclass(tracer, fx.Tracer):
        return tracer
    raise ValueError(f"tracer_cls={tracer!r} is not known; use 'torch', a subclass of torch.fx.Tracer, or stages")
