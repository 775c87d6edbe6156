"""The training loop: from a recipe to a trained model, its checkpoints, metrics and report."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from nxd_ckpt.coordinator import announced_to_waiting_ranks
from nxd_engine.logs import get_logger
from nxd_engine.rank_sync import run_or_raise_peer_error
from nxd_optim import NeuronZero1Optimizer
from nxd_state import get_device, is_cpu, is_lazy_device, step_boundary
from nxd_state.neuron import extracting_graphs
from torch import Tensor

from nxd_trainer.from_recipe import describe_pipeline
from nxd_trainer.recipe import RUN_RECIPE_FILE, Recipe, recipe_to_dict, save_recipe
from nxd_trainer.report import (
    MetricsLog,
    ProgressDisplay,
    RunLog,
    StepRecord,
    Throughput,
    Tracker,
    open_trackers,
    peak_memory_bytes,
    render_summary,
)
from nxd_trainer.report.metrics import read_run
from nxd_trainer.report.run_log import recorded_warnings, remove_log
from nxd_trainer.report.run_page import next_commands, write_run_page
from nxd_trainer.training.diagnostics import Straggler, StragglerWatch, report_gradients
from nxd_trainer.training.initial_weights import load_reference
from nxd_trainer.training.output_folder import open_output
from nxd_trainer.training.resuming import resume_from_memory, resume_run
from nxd_trainer.training.run_facts import logged_run, measured_step
from nxd_trainer.training.run_state import RunState, build_run_state
from nxd_trainer.training.saving import MemorySaver, RunSaver, describe_checkpoints, diverged
from nxd_trainer.training.step import CAN_WAIT, URGENT, FinishedStep, StepsInFlight, evaluate, take_step
from nxd_trainer.training.stop import StopRequest, StopSignal

EXTRACTED_STEPS = 3  # the first creates the optimizer states, the second is like all others, the third confirms that


@dataclass(frozen=True)
class TrainResult:
    """How an invocation ended, the same on every rank."""

    step: int  # optimizer steps taken since the run began
    loss: float  # training loss of the last step; nan if no step was taken
    stopped: bool  # whether SIGTERM or Ctrl-C on any rank ended the run early, after a checkpoint


def prepare_run(recipe: Recipe) -> tuple[RunState, str | None]:
    """Prepare a run's data, model and optimizer; also return a label of the checkpoint it resumes from, or None.

    The mesh must be initialized with the recipe's degrees.

    Raises:
        ValueError: the recipe does not fit the ranks, the data or the checkpoint; the same error on every rank.
    """
    early_warnings: list[tuple[str, str, str]] = []
    with recorded_warnings(lambda *warning: early_warnings.append(warning)):
        state = build_run_state(recipe, output_lock=open_output(recipe.output))
        tag = resume_from_memory(state) or resume_run(state)
        load_reference(state)
    state.early_warnings = early_warnings
    _renew_in_order(state)
    state.trackers = run_or_raise_peer_error("opening the trackers", lambda: _trackers(state), error_type=ValueError)
    report_gradients(state)
    return state, tag


def train(recipe: Recipe) -> TrainResult:
    """Train a recipe, from scratch or from the newest checkpoint, as `prepare_run` does. Call it on every rank."""
    with StopRequest() as stop:
        return run_training(*prepare_run(recipe), stop)


def run_training(state: RunState, resumed: str | None, stop: StopSignal) -> TrainResult:
    """Run the steps of a prepared run, with progress, metrics, checkpoints and the final report.

    `stop` is checked between steps; it may already have been active during the preparation. Under
    `neuron_parallel_compile` a few steps are taken and nothing is written.

    Raises:
        TrainingDiverged: the loss, a gradient or a weight became infinite or nan; it has not been saved.
        CheckpointError: a checkpoint could not be written; a background failure is raised before the next checkpoint
            starts, or at the end.
    """
    logger = get_logger("nxd_trainer")
    if extracting_graphs():
        _extract_graphs(state, logger.info)
        return TrainResult(step=state.step, loss=math.nan, stopped=False)
    shows_steps = state.is_writer and logger.isEnabledFor(logging.INFO)
    with (
        logged_run(state) as log,
        closing(state.train_batches),
        ProgressDisplay(state.recipe.last_step, first_step=state.step, is_writer=shows_steps) as progress,
        MetricsLog(
            state.recipe.output,
            is_writer=state.is_writer,
            first_step=state.step,
            layout=state.layout,
            trackers=state.trackers,
        ) as metrics,
    ):
        _announce(state, logger, resumed)
        saver = RunSaver(state, logger.info)
        in_memory = MemorySaver(state, logger.warning)
        with announced_to_waiting_ranks():
            result = _Loop(state, progress, metrics, log, saver, in_memory).run(stop)
            saver.close()
        if state.is_writer:
            log.write("end", step=result.step, how="stopped" if result.stopped else "finished")
    if state.is_writer:
        _report(state, logger, metrics.file)
        if not result.stopped:
            print(_render_next(state.recipe))
    return result


def _trackers(state: RunState) -> list[Tracker]:
    if not state.is_writer or extracting_graphs():
        return []
    if state.step == 0:  # here, because no rank writes into the log before all have left this function
        remove_log(state.recipe.output)
    return open_trackers(
        state.recipe.train.report_to,
        state.recipe.output,
        first_step=state.step,
        settings=recipe_to_dict(state.recipe),
        say=get_logger("nxd_trainer").warning,
    )


@torch.no_grad()
def _renew_in_order(state: RunState) -> None:
    """On XLA, recreate weights and optimizer states one after the other, through the host.

    XLA graphs list their results in creation order, and each rank reads a checkpoint in a different order: without
    this, the ranks would record and compile graphs that differ only in that order.
    """
    if not is_lazy_device():
        return
    step_boundary()  # computes loaded tensors now, outside the next step's graph
    for tensor in _tensors(state):
        tensor.data = tensor.detach().cpu().to(tensor.device)


def _tensors(state: RunState) -> Iterator[Tensor]:
    yield from state.model.parameters()
    if isinstance(state.optimizer.optimizer, NeuronZero1Optimizer):
        for bucket, base in state.optimizer.optimizer.parts():
            for it in bucket.ranges:
                yield it.weight
                yield from _on_xla(base.state.get(it.weight, {}))
        return
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            yield from _on_xla(state.optimizer.state.get(parameter, {}))


def _on_xla(values: dict[str, Tensor]) -> Iterator[Tensor]:
    return (value for value in values.values() if is_lazy_device(value))


def _extract_graphs(state: RunState, say: Callable[[str], None]) -> None:
    """Take a few steps, and evaluate if the recipe does, so that `neuron_parallel_compile` gets each graph.

    Nothing is computed and all values are zeros, so losses are not checked and nothing is written.
    """
    say(f"extracting graphs: {EXTRACTED_STEPS} steps on zeros; nothing is trained, saved or reported")
    for _ in range(EXTRACTED_STEPS):
        take_step(state)
    if state.recipe.train.eval_every:
        evaluate(state)


@dataclass
class _Loop:
    """The steps of a run; each may also be evaluated, reported and saved."""

    state: RunState
    progress: ProgressDisplay
    metrics: MetricsLog
    log: RunLog
    saver: RunSaver
    in_memory: MemorySaver
    throughput: Throughput = field(default_factory=Throughput)
    stragglers: StragglerWatch = field(default_factory=lambda: StragglerWatch(get_logger("nxd_trainer").warning))

    def run(self, stop: StopSignal) -> TrainResult:
        state, last_step = self.state, self.state.recipe.last_step
        steps, stopping = StepsInFlight(state), state.early_stopping
        loss, tokens_seen, first_step = math.nan, state.train_loader.tokens_seen, state.step
        while state.step < last_step and not steps.stopping and not stopping.is_due:
            with measured_step(self.log, state, state.step + 1 - first_step), self.stragglers.step():
                steps.begin(stopping=(CAN_WAIT if stop.can_wait else URGENT) if stop.signal_number else 0.0)
            for step in steps.finish(all_of_them=_needs_results(state.recipe, state.step)):
                loss = step.loss
                _check_finite(state, self.saver, step)
                self.in_memory.finish()  # before the step counts: losing a rank after this costs only this step
                self.throughput.add(state.recipe.train.global_batch_size, step.tokens_seen - tokens_seen)
                tokens_seen = step.tokens_seen
                self.progress.advance(step.number)
                held_out_loss = None if steps.is_urgent else self._evaluate_if_due(step.number)
                is_last = step.number == (state.step if steps.stopping else last_step)
                is_last = is_last or (held_out_loss is not None and stopping.is_due)
                self._report_if_due(step, held_out_loss, is_last=is_last)
                self._save_if_due(step.number, held_out_loss, is_last=is_last)
        if stopping.is_due:
            get_logger("nxd_trainer").info(
                f"stopped early at step {state.step}: no held-out loss below {stopping.best_loss:.4f} in "
                f"{stopping.num_without_gain} evaluations (train.early_stopping_patience)"
            )
        return TrainResult(step=state.step, loss=loss, stopped=steps.stopping)

    def _evaluate_if_due(self, step: int) -> float | None:
        """Return the held-out loss, which counts for early stopping; None if no evaluation is due."""
        every = self.state.recipe.train.eval_every
        is_regular = _is_due(step, every)
        if not every or not (is_regular or step == self.state.recipe.last_step):
            return None
        with self.throughput.paused():
            held_out_loss = evaluate(self.state)
        if held_out_loss is not None and is_regular:
            self.state.early_stopping.add(held_out_loss)
        return held_out_loss

    def _report_if_due(self, step: FinishedStep, held_out_loss: float | None, *, is_last: bool) -> None:
        is_due = _is_due(step.number, self.state.recipe.train.log_every)
        if is_due or is_last or held_out_loss is not None or step.number == 1:
            record = _record(step, self.throughput, held_out_loss, self.stragglers.compare())
            self.progress.log(record)
            self.metrics.log(record)

    def _save_if_due(self, step: int, held_out_loss: float | None, *, is_last: bool) -> None:
        options = self.state.recipe.checkpoint
        if _is_due(step, options.memory_every):
            self.saver.finish()
            self.in_memory.save()
        if _is_due(step, options.save_every) or is_last:
            self.in_memory.finish()
            with self.throughput.paused():
                self.saver.save(held_out_loss)
        self.saver.poll()


def _needs_results(recipe: Recipe, step: int) -> bool:
    """Whether the run is evaluated or saved after this step, before the next one starts."""
    intervals = (recipe.train.eval_every, recipe.checkpoint.save_every, recipe.checkpoint.memory_every)
    return step == recipe.last_step or any(_is_due(step, every) for every in intervals)


def _check_finite(state: RunState, saver: RunSaver, step: FinishedStep) -> None:
    if step.is_skipped or (math.isfinite(step.loss) and (step.grad_norm is None or math.isfinite(step.grad_norm))):
        return
    saver.finish()  # so that the error names the newest checkpoint
    gradient = "" if step.grad_norm is None else f" and the gradient norm {step.grad_norm}"
    raise diverged(state, f"the loss is {step.loss}{gradient} in step {step.number}")


def _record(
    step: FinishedStep, throughput: Throughput, held_out_loss: float | None, straggler: Straggler | None
) -> StepRecord:
    sequences_per_second, tokens_per_second = throughput.lap()
    routing: dict[str, Any] = {}
    if step.routing is not None:
        losses = {"aux_loss": step.routing.aux_loss, "z_loss": step.routing.z_loss}
        routing = {name: None if loss is None else float(loss) for name, loss in losses.items()}
        routing["tokens_per_expert"] = step.routing.tokens_per_expert.to(torch.int64).tolist()
    return StepRecord(
        step=step.number,
        loss=step.loss,
        learning_rate=step.learning_rate,
        tokens=step.tokens,
        tokens_seen=step.tokens_seen,
        tokens_per_second=tokens_per_second,
        throughput=sequences_per_second,
        seconds=throughput.seconds,
        peak_memory_bytes=peak_memory_bytes(get_device()),
        grad_norm=step.grad_norm,
        loss_scale=step.loss_scale,
        skipped_steps=step.skipped_steps,
        held_out_loss=held_out_loss,
        straggler=None if straggler is None else straggler.name,
        slowdown=None if straggler is None else straggler.slowdown,
        **routing,
    )


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _announce(state: RunState, logger: logging.Logger, resumed: str | None) -> None:
    if state.is_writer:
        save_recipe(state.recipe, state.recipe.output / RUN_RECIPE_FILE)
    count = sum(it.numel() for it in state.model.parameters())
    trained = sum(it.numel() for it in state.model.parameters() if it.requires_grad)
    of_adapter = f" ({trained:,} of them trained)" if trained < count else ""
    begins = f"resumes from {resumed}" if resumed else "begins"
    logger.info(
        f"{state.layout} on {get_device().type}, {count:,} parameters on this rank{of_adapter}; the run {begins}"
    )
    if is_cpu():
        logger.info(f"{torch.get_num_threads()} threads per rank; the environment variable OMP_NUM_THREADS changes it")
    if state.recipe.parallel.pipeline_parallel_size > 1:
        logger.info(describe_pipeline(state.recipe))
    for note in state.data.notes:
        logger.info(note)
    for warning in state.data.warnings:
        logger.warning(warning)
    if state.step >= state.recipe.last_step:
        end = state.recipe.last_step
        logger.info(
            f"nothing to do: the run is at step {state.step} and ends at {end}; to train longer, add for example "
            f"--{state.recipe.last_step_key} {2 * state.step}, and to start anew --output FOLDER"
        )
    if resumed and state.recipe.train.eval_every:
        held_out_loss = evaluate(state)  # shows that the run resumed correctly
        if held_out_loss is not None:
            logger.info(f"held-out loss as resumed, at step {state.step}: {held_out_loss:.4f}")


def _report(state: RunState, logger: logging.Logger, metrics_file: Path) -> None:
    recipe, records = state.recipe, read_run(state.recipe.output)
    shown: dict[str, str | Path | None] = {
        "checkpoints": describe_checkpoints(recipe, records),
        "metrics": metrics_file,
        "report": _written_report(recipe.output, logger),
        "timeline": recipe.pipeline.trace_file if recipe.parallel.pipeline_parallel_size > 1 else None,
    }
    print(render_summary(records, shown))


def _render_next(recipe: Recipe) -> str:
    commands = next_commands(recipe)
    width = max(len(command) for _, command in commands)
    return "\n".join(["next:", *(f"  {command:{width}}  # {what}" for what, command in commands)])


def _written_report(folder: Path, logger: logging.Logger) -> Path | None:
    """Write the HTML report; one that cannot be written does not fail a run whose checkpoints are complete."""
    try:
        return write_run_page(folder)
    except OSError as error:
        logger.warning(f"the report cannot be written: {error}; `nxd report {folder}` writes it later")
        return None
