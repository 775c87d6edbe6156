"""`compare`: trains a layout and one process side by side and reports the first tensor that differs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from nxd_engine.config import ensure_model_parallel
from nxd_parity.float64 import InFloat64
from nxd_state import (
    ParallelDegrees,
    all_gather_object,
    destroy_model_parallel,
    get_group,
    get_mesh,
    get_world_group,
    initialize_model_parallel,
)
from torch import Tensor

from nxd_trainer.parity.case import ParityCase, check_batches, checked_config
from nxd_trainer.parity.layout import (
    Distance,
    LayoutRun,
    LayoutStep,
    RankPart,
    TensorPiece,
    candidate_slices,
    distance,
    is_close,
)
from nxd_trainer.parity.reference import Reference, ReferenceStep, run_reference


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs from one process.

    Attributes:
        step: the step, from 1.
        kind: "initial parameter", "activation", "loss", "gradient", "gradient norm" or "parameter".
        name: name of the module or parameter.
        rank: the global rank that has the values.
        problem: the problem, if it is not that values differ.
        max_abs: largest absolute difference.
        max_rel: largest difference, relative to the tensor's largest value in one process.
        index: index of the largest difference in the whole tensor.
        expected: the value there in one process.
        found: the value there in the layout.
    """

    step: int
    kind: str
    name: str
    rank: int = 0
    problem: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    index: tuple[int, ...] = ()
    expected: float = 0.0
    found: float = 0.0

    def __str__(self) -> str:
        title = f"step {self.step}: {self.kind} {self.name}".rstrip()
        if self.problem:
            return f"{title} {self.problem}"
        place = f" at {list(self.index)}" if self.index else ""
        return (
            f"{title} differs on rank {self.rank}: largest difference {self.max_abs:.3g} (relative {self.max_rel:.3g})"
            f"{place}, where one process has {self.expected:.10g} and the layout {self.found:.10g}"
        )


@dataclass
class ParityReport:
    """The outcome, the same on every rank.

    Attributes:
        layout: the layout, such as "TP 2 x PP 1 x DP 2".
        dtype: dtype of weights and inputs, such as "float64".
        rtol: tolerance, relative to the largest value of a tensor.
        steps: number of steps that were compared.
        compared: number of tensors of each kind that agree.
        not_compared: modules whose outputs cannot be compared with one process, and why.
        difference: the first tensor that differs; None if all agree.
    """

    layout: str
    dtype: str
    rtol: float
    steps: int = 0
    compared: dict[str, int] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)
    difference: Difference | None = None

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return self.difference is None

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in self.compared.items())
        agree = f"{counts.replace('losss', 'losses')} agree"
        lines = [f"{self.layout} against one process, {self.dtype}, {self.steps} steps, tolerance {self.rtol:g}"]
        if self.difference is None:
            lines.append(agree)
        else:
            lines += [f"DIFFERENT  {self.difference}", f"before that, {agree if counts else 'nothing was compared'}"]
        if self.not_compared:
            name, reason = next(iter(self.not_compared.items()))
            lines.append(f"outputs of {len(self.not_compared)} modules were not compared, such as {name}: {reason}")
        return "\n".join(lines)


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


ItemT = TypeVar("ItemT")


Verdict = Difference | str | None  # the difference; why it was not compared; None: it agrees


Check = Callable[[str, Sequence[Any]], Verdict]


def compare(case: ParityCase, *, dtype: torch.dtype = torch.float64, rtol: float | None = None) -> ParityReport:
    """Train a few steps in the case's layout and, on rank 0, in one process; compare them tensor by tensor.

    The order is: weights before the first step; then for each step the module outputs in execution order, the loss,
    the gradients in the order of backward, their norm, and the weights after the step. It stops at the first
    difference, since later ones follow from it. Dropout is off. Call it on all ranks, with or without a mesh; it
    destroys the mesh.

    Args:
        case: the case to compare.
        dtype: dtype of weights and inputs. float64 separates errors from rounding; then nothing is computed in float32,
            whatever a model asks for.
        rtol: tolerance, relative to the largest value of a tensor; by default 1e-10 in float64, 1e-5 in float32.

    Returns:
        The report, the same on every rank.

    Raises:
        ValueError: the case is invalid, or its degrees or batches do not fit the ranks.
        RuntimeError: the one-process run failed on rank 0.
    """
    if rtol is not None and not 0 <= rtol < 1:
        raise ValueError(f"rtol={rtol} is out of range; use at least 0 and less than 1")
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype={dtype} is too imprecise to compare in; use torch.float64 or torch.float32")
    config = checked_config(case)
    destroy_model_parallel()
    try:
        with InFloat64() if dtype == torch.float64 else nullcontext():
            return _compared(case, config, dtype, TOLERANCES[dtype] if rtol is None else rtol)
    finally:
        destroy_model_parallel()


def _compared(case: ParityCase, config: Mapping[str, Any], dtype: torch.dtype, rtol: float) -> ParityReport:
    degrees = ParallelDegrees.of_config(config)
    ensure_model_parallel(degrees)  # degrees that do not fit raise here, before any work
    check_batches(case, get_group("dp").size)
    destroy_model_parallel()
    reference = _reference_on_first_rank(case, config, dtype)
    ensure_model_parallel(degrees)
    run = LayoutRun(case, config, dtype)
    layout = ParallelDegrees.of_mesh(get_mesh(), sequence_parallel=config["sequence_parallel"]).describe()
    report = ParityReport(layout, str(dtype).removeprefix("torch."), rtol)
    comparison = _Comparison(reference, report, config)
    comparison.check_initial(run)
    for index, batch in enumerate(case.batches):
        if not report.agrees:
            break
        report.steps = index + 1
        comparison.check_step(index, run.step(batch))
    return report


def _reference_on_first_rank(case: ParityCase, config: Mapping[str, Any], dtype: torch.dtype) -> Reference | None:
    """Run one process on rank 0 while the other ranks wait."""
    # In this mesh every rank is a whole replica: layers act as ordinary ones, and nothing is communicated.
    initialize_model_parallel()
    reference: Reference | None = None
    failure: Exception | None = None
    if get_world_group().rank == 0:
        try:
            reference = run_reference(case, config, dtype)
        except Exception as error:  # the other ranks learn of it, and all stop
            failure = error
    cause = None if failure is None else f"{type(failure).__name__}: {failure}"
    told, is_mistake = all_gather_object((cause, isinstance(failure, ValueError)), get_world_group())[0]
    destroy_model_parallel()
    if failure is not None:
        raise failure
    if told is not None:
        raise (ValueError if is_mistake else RuntimeError)(f"the one-process run failed on rank 0: {told}")
    return reference


class _Comparison:
    """Compares on rank 0, which has the reference; the other ranks send their parts, one tensor at a time."""

    def __init__(self, reference: Reference | None, report: ParityReport, config: Mapping[str, Any]) -> None:
        self._reference = reference
        self._report = report
        self._world = get_world_group()
        replicas, shards = get_group("dp", "cp"), get_group("tp")
        microbatches = (config["pipeline_config"] or {}).get("num_microbatches", 1)
        self._place = (replicas.rank, shards.rank)
        self._dp, self._tp, self._microbatches = replicas.size, shards.size, microbatches

    def check_initial(self, run: LayoutRun) -> None:
        """Compare the weights before the first step."""
        expected = {} if self._reference is None else self._reference.initial
        own = run.parameters()
        unknown = sorted(
            {name for names in self._gather(list(own)) for name in names} - set(self._share(list(expected)))
        )
        if unknown:
            problem = "does not exist in one process, whose parameters have other names"
            self._report.difference = Difference(1, "initial parameter", unknown[0], problem=problem)
            return
        self._check_pieces(1, "initial parameter", expected, own)

    def check_step(self, index: int, step: LayoutStep) -> None:
        """Compare a step, kind by kind, until something differs."""
        expected = None if self._reference is None else self._reference.steps[index]
        number = index + 1
        checks: list[Callable[[], None]] = [
            lambda: self._check_activations(number, expected, step),
            lambda: self._check_loss(number, None if expected is None else expected.loss, step.loss),
            lambda: self._check_pieces(
                number, "gradient", {} if expected is None else expected.gradients, step.gradients
            ),
            lambda: self._check_norm(number, None if expected is None else expected.grad_norm, step.grad_norm),
            lambda: self._check_pieces(
                number, "parameter", {} if expected is None else expected.parameters, step.parameters
            ),
        ]
        if get_mesh().cp > 1:
            del checks[0]  # each rank's activations cover only its own positions
        for check in checks:
            if self._report.agrees:
                check()

    def _check_activations(self, step: int, expected: ReferenceStep | None, own: LayoutStep) -> None:
        wanted = {} if expected is None else expected.activations
        peers = _largest(tensor for tensors in wanted.values() for tensor in tensors)

        def check(name: str, parts: Sequence[tuple[tuple[int, int], list[Tensor] | None]]) -> Verdict:
            if all(outputs is None for _, outputs in parts):
                return "not called on any rank"
            for rank, ((dp_rank, tp_rank), outputs) in enumerate(parts):
                if outputs is None:
                    continue
                if len(outputs) != len(wanted[name]) * self._microbatches:
                    return f"{len(outputs)} calls on rank {rank}, {len(wanted[name])} in one process"
                for call, output in enumerate(outputs):
                    microbatch, index = divmod(call, len(wanted[name]))
                    whole = wanted[name][index]
                    part = RankPart(
                        dp_rank * self._microbatches + microbatch, self._dp * self._microbatches, tp_rank, self._tp
                    )
                    nearest = _nearest(whole, output, part)
                    if nearest is None:
                        return f"{list(output.shape)} on rank {rank} is not a part of {list(whole.shape)}"
                    if not is_close(nearest, whole, rtol=self._report.rtol, peers=peers):
                        return _difference(step, "activation", name, rank, nearest)
            return None

        self._go_through("activation", list(wanted), lambda name: (self._place, own.activations.get(name)), check)

    def _check_pieces(
        self, step: int, kind: str, expected: Mapping[str, Tensor], own: Mapping[str, list[TensorPiece]]
    ) -> None:
        peers = _largest(expected.values())

        def check(name: str, parts: Sequence[tuple[tuple[int, int], list[TensorPiece] | None]]) -> Verdict:
            if all(pieces is None for _, pieces in parts):
                return Difference(step, kind, name, problem="is missing on all ranks")
            whole = expected[name]
            for rank, (_, pieces) in enumerate(parts):
                for position, piece in enumerate(pieces or []):
                    if piece.shape != tuple(whole.shape):
                        problem = f"has the shape {list(piece.shape)}, in one process {list(whole.shape)}"
                        return Difference(step, kind, name, rank, problem=problem)
                    values = piece.values if kind != "gradient" else _combined(parts, rank, position)
                    found = distance(whole[piece.box.slices], values, piece.box.offset)
                    if not is_close(found, whole, rtol=self._report.rtol, peers=peers):
                        return _difference(step, kind, name, rank, found)
            return None

        self._go_through(kind, list(expected), lambda name: (self._place, own.get(name)), check)

    def _check_loss(self, step: int, expected: Tensor | None, own: float | None) -> None:
        """Each replica has the loss of its part of the batch, equal on all its tensor-parallel ranks."""

        def check(name: str, found: Sequence[tuple[tuple[int, int], float | None]]) -> Verdict:
            known = [(rank, tp_rank, value) for rank, ((_, tp_rank), value) in enumerate(found) if value is not None]
            if not known:
                return Difference(step, "loss", name, problem="is missing")
            numbers = {}
            for place in {tp_rank for _, tp_rank, _ in known}:
                ranks, values = zip(*((rank, value) for rank, tp_rank, value in known if tp_rank == place), strict=True)
                numbers[ranks[0]] = sum(values) / len(values)
            return self._compare_numbers(step, "loss", expected, numbers)

        self._go_through("loss", [""], lambda name: (self._place, own), check)

    def _check_norm(self, step: int, expected: Tensor | None, own: float | None) -> None:
        """Every rank has the norm over all gradients."""

        def check(name: str, found: Sequence[float | None]) -> Verdict:
            numbers = {rank: value for rank, value in enumerate(found) if value is not None}
            return self._compare_numbers(step, "gradient norm", expected, numbers) if numbers else "not computed"

        self._go_through("gradient norm", [""], lambda name: own, check)

    def _compare_numbers(self, step: int, kind: str, expected: Tensor | None, numbers: Mapping[int, float]) -> Verdict:
        assert expected is not None  # checks are made on rank 0
        for rank, number in numbers.items():
            apart = distance(expected.double(), torch.tensor(number, dtype=torch.float64))
            if not is_close(apart, expected, rtol=self._report.rtol, peers=0.0):
                return _difference(step, kind, "", rank, apart)
        return None

    def _go_through(self, kind: str, names: list[str], mine: Callable[[str], Any], check: Check) -> None:
        """Gather each tensor's parts on rank 0, in its order, until one differs; all ranks learn the result."""
        difference: Difference | None = None
        agreed = 0
        not_compared: dict[str, str] = {}
        for name in self._share(names):
            gathered = self._gather((difference is not None, mine(name)))
            if gathered[0][0]:
                break
            if self._reference is None:
                continue
            verdict = check(name, [part for _, part in gathered])
            if isinstance(verdict, Difference):
                difference = verdict
            elif verdict is None:
                agreed += 1
            else:
                not_compared[name] = verdict
        difference, agreed, not_compared = self._share((difference, agreed, not_compared))
        self._report.difference = difference
        if kind == "activation":
            self._report.not_compared.update(not_compared)
        if agreed:
            self._report.compared[kind] = self._report.compared.get(kind, 0) + agreed

    def _gather(self, item: ItemT) -> list[ItemT]:
        return all_gather_object(item, self._world)

    def _share(self, item: ItemT) -> ItemT:
        """Return rank 0's item on every rank."""
        return self._gather(item)[0]


def _combined(parts: Sequence[tuple[tuple[int, int], list[TensorPiece] | None]], rank: int, position: int) -> Tensor:
    """Return the gradient for this rank's optimizer: the mean over replicas of the sum over a split sequence."""
    (_, tp_rank), pieces = parts[rank]
    assert pieces is not None  # the caller iterates over its pieces
    box, adds = pieces[position].box, pieces[position].sums_over_tp
    if pieces[position].holders:
        return _combined_of_experts(parts, pieces[position])
    by_replica: dict[int, list[Tensor]] = {}
    for (other_dp, other_tp), others in parts:
        if others is None or (other_tp != tp_rank and not adds):
            continue
        by_replica.setdefault(other_dp, []).extend(it.values for it in others if it.box == box)
    sums = []
    for values in by_replica.values():
        total = torch.stack(values).sum(0)
        # Each stage that shares a tied weight has the whole gradient.
        sums.append(total / (len(values) / (len({p[0][1] for p in parts}) if adds else 1)))
    return torch.stack(sums).mean(0)


def _combined_of_experts(
    parts: Sequence[tuple[tuple[int, int], list[TensorPiece] | None]], piece: TensorPiece
) -> Tensor:
    """Return the gradient of experts: the sum of the ranks' gradients, each from the rank's own tokens."""
    values = [it.values for _, others in parts for it in others or [] if it.box == piece.box]
    replicas = len({dp_rank for (dp_rank, _), _ in parts})
    return torch.stack(values).sum(0) / piece.holders / replicas


def _nearest(whole: Tensor, output: Tensor, part: RankPart) -> Distance | None:
    found = [
        distance(whole[box], output, [it.start for it in box])
        for box in candidate_slices(whole.shape, output.shape, part)
    ]
    return min(found, key=lambda it: it.max_abs) if found else None


def _largest(tensors: Iterable[Tensor]) -> float:
    return max((tensor.abs().nan_to_num().max().item() for tensor in tensors if tensor.numel()), default=0.0)


def _difference(step: int, kind: str, name: str, rank: int, found: Distance) -> Difference:
    return Difference(
        step, kind, name, rank, "", found.max_abs, found.max_rel, found.index, found.expected, found.found
    )
