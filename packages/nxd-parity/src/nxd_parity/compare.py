"""`compare`: finds the first tensor in which a recorded program differs from a recorded reference, and says why."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.comparison import Comparison
from nxd_parity.consequences import Consequences, place_of_fault
from nxd_parity.diagnosis import Diagnostician
from nxd_parity.location import add_tensors
from nxd_parity.model_names import is_model, model_of
from nxd_parity.order import about_sums, added_up_after_backward, partings, sums_of
from nxd_parity.outcome import Diagnosis, Outcome, Status
from nxd_parity.recording import Recording
from nxd_parity.report import Finding, Report
from nxd_parity.sequence import Key, owner_of
from nxd_parity.sides import OF_CALLS, steps_of
from nxd_parity.writer import RAISED, REACHED

MOST_FINDINGS = 50  # later ones follow from the first
COLLECTIVE = "collective"  # of a finding that is about no tensor
EFFECTS = (events.PARAMETER, events.OPTIMIZER_STATE)  # what a step leaves behind
LASTING = (*EFFECTS, events.GRADIENT, events.GRADIENT_NORM, events.LOSS)


def compare(
    reference: Path | str,
    candidate: Path | str,
    *,
    spread: Sequence[Path | str] = (),
    rtol: float | None = None,
    shards: Mapping[str, int] | None = None,
) -> Report:
    """Compare a recording with that of a reference, tensor by tensor, in the order of execution.

    The reference is one process: whole tensors, whole batches. The candidate's parameters are found in it by their
    placements (DTensor, FSDP2), by `shards`, or by their initial values; its activations by the inputs that each rank
    has and by their values. Tensors that are parts of a sum on several ranks are right if later tensors are.

    Args:
        reference: folder of the reference's recording.
        candidate: folder of the candidate's recording.
        spread: recordings of the reference with noise (`record(noise=1)`): differences within eight times their spread
            are rounding. Without them the bound is `rtol`.
        rtol: the largest difference, relative to a tensor's largest value; by default 1e-9 in float64, 1e-4 in
            float32, 0.1 in bfloat16.
        shards: for parameters whose initial values differ: the dim along which ranks have equal parts in the order of
            ranks, by pattern of names, such as `{"*.down_proj.weight": 1}`.

    Returns:
        The report; `agrees` says whether nothing differs.

    Raises:
        FileNotFoundError: a folder has no recording.
        ValueError: a recording is damaged, incomplete or empty, the reference has several ranks, or `rtol` is no
            tolerance.
    """
    recordings = [Recording(it) for it in (reference, *spread)]
    for recording in recordings:
        if recording.world_size > 1:
            raise ValueError(
                f"{recording.folder} is a recording of {recording.world_size} ranks; the reference is one process: "
                "record the program on a single rank, with its whole batches"
            )
    if rtol is not None and not 0 <= rtol < math.inf:
        raise ValueError(f"rtol={rtol}; pass a finite number that is not negative")
    of_candidate = Recording(candidate)
    comparison = Comparison(recordings[0], of_candidate, recordings[1:], rtol=rtol, shards=shards)
    report = Report(str(reference), str(candidate), of_candidate.world_size, comparison.steps)
    if not comparison.order:
        raise ValueError(f"{reference} has no tensors: no model was called while it was recorded")
    if not any(of_candidate.tensors):
        raise ValueError(f"{candidate} has no tensors: no model was called while it was recorded")
    outcomes = list(comparison.outcomes())
    for outcome in outcomes:
        if outcome.status in (Status.AGREES, Status.SUM):
            report.agree[outcome.key.kind] = report.agree.get(outcome.key.kind, 0) + 1
        elif outcome.status is Status.UNKNOWN:
            report.not_compared[_title(outcome)] = outcome.reason
    wrong = _faults_in(outcomes, comparison)
    report.findings = _with_orders(_findings(comparison, outcomes, wrong), of_candidate)
    report.different = len(report.findings) + max(len(wrong) - MOST_FINDINGS, 0)
    harmless = [it for it in outcomes if it.status is Status.DIFFERS and it.key.kind in OF_CALLS and _is_large(it)]
    if harmless and not wrong:
        report.notes.append(
            f"{len(harmless)} tensors differ without an effect on losses, gradients and parameters, such as "
            f"{_title(harmless[0])}"
        )
    add_tensors(report, comparison, outcomes)
    _add_notes(report, comparison)
    return report


def _findings(comparison: Comparison, outcomes: Sequence[Outcome], wrong: Sequence[Outcome]) -> list[Finding]:
    diagnostician = Diagnostician(comparison)
    found = [
        Finding(0, events.PARAMETER, name, fault=of_faults.WRONG_SHARD, detail=problem)
        for name, problem in comparison.parameters.problems.items()
    ]
    if wrong and not comparison.unknown_parameters:  # else they may be there by another name
        found += [
            Finding(0, events.PARAMETER, name, fault=of_faults.WRONG_SHARD, detail="no rank has its initial values")
            for name in comparison.lost_parameters
        ]
    for number, outcome in enumerate(wrong[:MOST_FINDINGS]):
        diagnosis, is_of_all = Diagnosis(of_faults.DIFFERENT_VALUES), False
        if not outcome.pieces:
            diagnosis = Diagnosis(of_faults.DIFFERENT_VALUES, "no rank has one")
        elif number == 0:
            consequences = Consequences(comparison, diagnostician, wrong, outcomes)
            diagnosis = _with_collectives(consequences.diagnose(outcome), outcome, comparison)
            is_of_all = consequences.is_of_all(outcome, diagnosis)
        found.append(
            _finding(outcome, diagnosis, "" if is_of_all else diagnosis.place or place_of_fault(outcome, comparison))
        )
    return found


def _with_orders(found: list[Finding], candidate: Recording) -> list[Finding]:
    """Add where ranks call collectives in different orders, before what differs in the same step or later."""
    for parting in partings(candidate.collectives, candidate.ends):
        call = parting.first
        finding = Finding(
            call.step, COLLECTIVE, call.module, fault=of_faults.ORDER, detail=str(parting), ranks=parting.ranks
        )
        at = next((number for number, it in enumerate(found) if it.step >= call.step), len(found))
        found.insert(at, finding)
    return found


def _with_collectives(diagnosis: Diagnosis, outcome: Outcome, comparison: Comparison) -> Diagnosis:
    """Say which recorded collectives belong to a fault of a sum."""
    key, shape = outcome.key, outcome.differing[0].event.shape if outcome.differing else ()
    collectives = comparison.candidate.collectives
    if diagnosis.fault == of_faults.MISSING_SUM and outcome.summed_over and shape:
        said = about_sums(collectives, key.step, shape, outcome.summed_over)
    elif diagnosis.fault in (of_faults.SUMMED_TWICE, of_faults.SCALED) and diagnosis.axis:
        size = round(max(diagnosis.factor, 1 / diagnosis.factor))
        places = [key.name, owner_of(key.name), *comparison.users(key)]
        said = sums_of(collectives[outcome.differing[0].rank], key.step, shape, places, size)
    else:
        return diagnosis
    return replace(diagnosis, detail=f"{diagnosis.detail}; {said}") if said else diagnosis


def _faults_in(outcomes: Sequence[Outcome], comparison: Comparison) -> list[Outcome]:
    """Return what differs, the cause first.

    If nothing that a step leaves behind differs, and no gradient and no loss, then nothing does: an activation may be
    computed in another way. So are those that differ, or are parts of a sum, where what is made of them is right.
    Where nothing is trained, outputs of whole models are what lasts.
    """
    lasting = [it for it in outcomes if it.status is Status.DIFFERS and it.key.kind in LASTING]
    evaluated = _evaluated(outcomes, comparison)
    lasting += [it for it in outcomes if it.key in evaluated and is_model(it.key.name)]
    if not any(it.key.kind in LASTING and it.key.step > 0 for it in outcomes):
        returned = [it for it in outcomes if it.key.kind == events.ACTIVATION and is_model(it.key.name)]
        lasting += [it for it in returned if it.status in (Status.DIFFERS, Status.SUM)]
    if not lasting:
        has_effects = {it.key.kind for it in outcomes} & set(EFFECTS)
        return [] if has_effects else [it for it in outcomes if it.status is Status.SUM and it.key.kind in LASTING]
    step = min(it.key.step for it in lasting)  # what differs before it had no effect, such as a norm without a limit
    of_lasting = {(it.key.kind, it.key.step) for it in lasting}
    in_step = [it for it in outcomes if it.key.step == step]
    is_exact = _is_exact(in_step)
    agree = [it for it in in_step if it.status is Status.AGREES]
    partly = {it.key[1:3] for it in in_step if it.status is Status.DIFFERS}  # of several outputs, one is wrong
    right = {(it.key.kind, it.key.name) for it in agree if is_exact or _is_large(it)} - partly
    is_loss_right = any(it.key.kind == events.LOSS for it in agree)
    has_loss = any(it.key.kind == events.LOSS for it in in_step)
    is_step_wrong = _is_step_wrong(in_step)
    lost = _lost_gradients(in_step)
    summed_in_buckets = _summed_in_buckets(outcomes, comparison)
    gradients = [it.key.name for it in lasting if it.key.kind == events.GRADIENT and it.key.step == step]
    with_wrong_gradients = {owner_of(it) for it in gradients}
    wrong = []
    for outcome in outcomes:
        if outcome.key in lost:
            wrong.append(outcome)
        if outcome.key in summed_in_buckets:
            continue
        if outcome.key.step < step or outcome.status not in (Status.DIFFERS, Status.SUM):
            continue
        if outcome.key.step == step and outcome.key.kind in (events.ACTIVATION, events.INPUT):
            is_mean = has_loss and not _is_large(outcome)  # of a rank's own rows, perhaps; the loss is that of all
            is_of_data = bool(outcome.reason) and is_step_wrong  # though what is computed from the rows is right
            if (is_mean or (is_loss_right and is_exact)) and outcome.key not in evaluated:
                continue
            if not is_of_data and _is_right_afterwards(outcome.key, right, comparison):
                continue
        elif outcome.key.step == step and outcome.key.kind == events.ACTIVATION_GRADIENT:
            if outcome.key.name not in with_wrong_gradients and _is_right_before(outcome, outcomes, right):
                continue
        elif outcome.key.kind == events.GRADIENT_NORM and (events.GRADIENT, outcome.key.step) in of_lasting:
            continue
        wrong.append(outcome)
    return wrong


def _is_step_wrong(outcomes: Sequence[Outcome]) -> bool:
    """Whether the loss of a step differs, or most of its gradients do, as they do with other data."""
    gradients = [it.status is Status.DIFFERS for it in outcomes if it.key.kind == events.GRADIENT]
    is_loss_wrong = any(it.key.kind == events.LOSS and it.status is Status.DIFFERS for it in outcomes)
    return is_loss_wrong or 2 * sum(gradients) > len(gradients)


def _lost_gradients(outcomes: Sequence[Outcome]) -> Set[Key]:
    """Return a step's gradients that no rank has: most others are there, and the parameters or the norm are wrong."""
    gradients = [it for it in outcomes if it.key.kind == events.GRADIENT]
    lost = [it.key for it in gradients if not it.pieces]
    if 2 * len(lost) >= len(gradients):
        return set()
    differing = {it.key[1:3] for it in outcomes if it.status is Status.DIFFERS}
    has_other_norm = (events.GRADIENT_NORM, "") in differing
    return {it for it in lost if has_other_norm or (events.PARAMETER, it.name) in differing}


def _evaluated(outcomes: Sequence[Outcome], comparison: Comparison) -> Set[Key]:
    """Return the outputs that differ in calls of models that have no backward: what they return is what lasts."""
    trained = {
        (rank, it.step, it.model_call)
        for rank, tensors in enumerate(comparison.candidate.tensors)
        for it in tensors
        if it.kind == events.ACTIVATION_GRADIENT
    }
    return {
        it.key
        for it in outcomes
        if it.key.kind == events.ACTIVATION
        and it.status is Status.DIFFERS
        and not any((piece.rank, it.key.step, piece.event.model_call) in trained for piece in it.differing)
    }


def _summed_in_buckets(outcomes: Sequence[Outcome], comparison: Comparison) -> Set[Key]:
    """Return the gradients that are parts of sums, in steps in which ranks add up as many elements after backward.

    A program that copies its gradients into buckets adds them up there, and not where they are recorded: most of them
    are parts of sums then, and what the optimizer made of them is not.
    """
    without = {
        (it.key.step, it.summed_over) for it in outcomes if it.key.kind in EFFECTS and it.status is Status.DIFFERS
    }
    of_steps: dict[int, list[Outcome]] = defaultdict(list)
    for it in outcomes:
        if it.key.kind == events.GRADIENT and it.pieces:
            of_steps[it.key.step].append(it)
    found: set[Key] = set()
    for step, gradients in of_steps.items():
        parts = [it for it in gradients if it.status is Status.SUM and it.summed_over]
        for ranks in {it.summed_over for it in parts}:
            of_rank = {it.key: piece for it in gradients for piece in it.pieces if piece.rank == ranks[0]}
            elements = sum(math.prod(it.event.shape) for it in of_rank.values())
            is_of_most = 4 * sum(it.summed_over == ranks for it in parts) >= 3 * len(of_rank)
            if not is_of_most or (step, ranks) in without:
                continue
            if added_up_after_backward(comparison.candidate.collectives[ranks[0]], step, ranks) >= elements:
                found.update(it.key for it in parts if it.summed_over == ranks)
    return found


def _is_exact(outcomes: Sequence[Outcome]) -> bool:
    """Whether values are so precise that a right loss means that all activations are right."""
    dtypes = {it.pieces[0].event.dtype for it in outcomes if it.key.kind == events.LOSS and it.pieces}
    return dtypes == {torch.float64}


def _is_large(outcome: Outcome) -> bool:
    """Whether a tensor has so many elements that rounding cannot hide that one is wrong, as it can in a mean."""
    return any(it.event.shape and max(it.event.shape) > 1 for it in outcome.pieces)


def _is_right_afterwards(key: Key, right: Set[tuple[str, str]], comparison: Comparison) -> bool:
    """Whether a module that has a tensor's module in it, or that got the tensor, has a right output."""
    name = key.name
    around = {name[:end] for end, letter in enumerate(name) if letter == "."} | ({model_of(name)} - {name})
    later = {*around, *comparison.users(key), *([name] if key.kind == events.INPUT else [])}
    return any((events.ACTIVATION, it) in right for it in later)


def _is_right_before(outcome: Outcome, outcomes: Sequence[Outcome], right: Set[tuple[str, str]]) -> bool:
    """Whether backward is right for the modules whose outputs a module got."""
    name, step = outcome.key.name, outcome.key.step
    around = {name, *(name[:end] for end, letter in enumerate(name) if letter == ".")}
    sources = {
        source
        for it in outcomes
        if it.key.step == step and it.key.kind == events.ACTIVATION and it.key.name in around
        for piece in it.pieces
        for source in piece.event.inputs
    }
    return any((events.ACTIVATION_GRADIENT, it) in right for it in sources)


def _finding(outcome: Outcome, diagnosis: Diagnosis, place: str) -> Finding:
    key, apart = outcome.key, outcome.apart
    index: tuple[int, ...] = ()
    if apart is not None and apart.index and outcome.differing[0].place is not None:
        index = outcome.differing[0].place.first_position(apart.index)
    return Finding(
        step=key.step,
        kind=key.kind,
        name=place,
        tensor=key.name if key.name != place else "",
        fault=diagnosis.fault,
        detail=diagnosis.detail,
        ranks=tuple(sorted({it.rank for it in outcome.differing or outcome.pieces})),
        factor=diagnosis.factor,
        axis=diagnosis.axis,
        largest=0.0 if apart is None else apart.largest,
        relative=0.0 if apart is None else apart.relative,
        index=index,
        expected=0.0 if apart is None else apart.expected,
        found=0.0 if apart is None else apart.found,
    )


def _add_notes(report: Report, comparison: Comparison) -> None:
    for name, recording in (("reference", comparison.reference), ("candidate", comparison.candidate)):
        steps = steps_of(recording)
        if steps > comparison.steps:
            report.notes.append(f"the {name} has {steps} steps: those after step {comparison.steps} were not compared")
        for rank, end in enumerate(recording.ends):
            if end != REACHED:
                how = "raised an error" if end == RAISED else "was ended"
                report.notes.append(f"rank {rank} of the {name} {how} while it was recorded")
    if comparison.names:
        ranks = ", ".join(map(str, sorted({rank for rank, _ in comparison.names})))
        (rank, _), names = next(iter(comparison.names.items()))
        own, name = next(it for it in names.parameters.items() if it[0] != it[1])
        report.notes.append(
            f"names of ranks {ranks} were inferred from initial values, such as {own} of rank {rank}: it is {name}"
        )
    if comparison.lost_parameters and comparison.unknown_parameters:
        report.notes.append(
            f"no rank has {comparison.lost_parameters[0]}, but ranks have {comparison.unknown_parameters[0]}, which "
            "the reference does not have: if it is the same, record(rename=...) can give it that name"
        )
    report.notes += [
        f"no parameter whose part had to be found is called {it!r}: the rule was not used"
        for it in sorted(comparison.parameters.unused_rules)
    ]
    inferred = comparison.parameters.inferred
    if inferred:
        name, where = next(iter(inferred.items()))
        report.notes.append(f"the parts of {len(inferred)} parameters were inferred, such as {name}: {where}")


def _title(outcome: Outcome) -> str:
    key = outcome.key
    return f"step {key.step}, {key.kind} {key.name}".rstrip()
