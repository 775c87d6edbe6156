"""`compare`: finds the first tensor in which a recorded program differs from a recorded reference, and says why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.comparison import Comparison
from nxd_parity.consequences import Consequences, place_of_fault
from nxd_parity.diagnosis import Diagnostician
from nxd_parity.faults import faults_in, is_large, recorded_after_clipping
from nxd_parity.location import add_tensors
from nxd_parity.order import about_sums, partings, sums_of
from nxd_parity.outcome import Diagnosis, Outcome, Status
from nxd_parity.rank_by_rank import OfRank, merged, recordings_of_rank
from nxd_parity.recording import Recording
from nxd_parity.report import Finding, Report
from nxd_parity.sequence import modules_around, owner_of
from nxd_parity.sides import OF_CALLS, steps_of
from nxd_parity.writer import RAISED, REACHED

MOST_FINDINGS = 50  # later ones follow from the first
COLLECTIVE = "collective"  # of a finding that is about no tensor


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

    A reference of several ranks is compared with as many ranks of the same layout, each with the same one.

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
        ValueError: a recording is damaged, incomplete or empty, the reference has several ranks and the candidate
            has others, or `rtol` is no tolerance.
    """
    if rtol is not None and not 0 <= rtol < math.inf:
        raise ValueError(f"rtol={rtol}; pass a finite number that is not negative")
    recordings = [Recording(it) for it in (reference, *spread)]
    of_candidate, ranks = Recording(candidate), recordings[0].world_size
    for recording in recordings:
        if recording.world_size != ranks or ranks not in (1, of_candidate.world_size):
            raise ValueError(
                f"{recording.folder} is a recording of {recording.world_size} ranks, {candidate} of "
                f"{of_candidate.world_size}; record the reference in one process with its whole batches, which any "
                "layout can be compared with, or on as many ranks, of which each is compared with the same one"
            )
    if ranks == 1:
        return _compared(recordings[0], of_candidate, recordings[1:], rtol, shards).report
    of_ranks = [
        _compared(*recordings_of_rank(rank, reference, candidate, spread), rtol, shards) for rank in range(ranks)
    ]
    return merged(reference, candidate, of_ranks)


def _compared(
    reference: Recording,
    of_candidate: Recording,
    spread: Sequence[Recording],
    rtol: float | None,
    shards: Mapping[str, int] | None,
) -> OfRank:
    """Compare with a reference of one process."""
    comparison = Comparison(reference, of_candidate, spread, rtol=rtol, shards=shards)
    report = Report(str(reference.folder), str(of_candidate.folder), of_candidate.world_size, comparison.steps)
    for recording in (reference, of_candidate):
        if not any(recording.tensors):
            raise ValueError(f"{recording.folder} has no tensors: no model was called while it was recorded")
    outcomes = list(comparison.outcomes())
    clipped = recorded_after_clipping(outcomes, comparison)
    outcomes = [replace(it, status=Status.AGREES) if it.key in clipped else it for it in outcomes]
    wrong = faults_in(outcomes, comparison)
    lost = {it.key for it in wrong if it.status is Status.SUM}  # sums that nobody makes later
    shown = [replace(it, status=Status.DIFFERS) if it.key in lost else it for it in outcomes]
    for outcome in shown:
        if outcome.status in (Status.AGREES, Status.SUM):
            report.agree[outcome.key.kind] = report.agree.get(outcome.key.kind, 0) + 1
        elif outcome.status is Status.UNKNOWN:
            report.not_compared[_title(outcome)] = outcome.reason
    report.findings = _with_orders(_findings(comparison, outcomes, wrong), of_candidate)
    report.different = len(report.findings) + max(len(wrong) - MOST_FINDINGS, 0)
    harmless = [it for it in outcomes if it.status is Status.DIFFERS and it.key.kind in OF_CALLS and is_large(it)]
    if harmless and not wrong:
        report.notes.append(
            f"{len(harmless)} tensors differ without an effect on losses, gradients and parameters, such as "
            f"{_title(harmless[0])}"
        )
    if clipped:
        report.notes.append(
            f"{len(clipped)} gradients were recorded after one of the programs clipped them, which no norm says; the "
            "optimizer got the right ones"
        )
    report.notes += [
        f"gradients of step {step} are {next(iter(factors.values())):.6g} times the expected ones, as after clipping "
        "by a norm that the wrong ones are part of"
        for step, factors in comparison.clipped.items()
        if factors
    ][:1]
    report.notes += [
        f"gradients of step {step} were not compared: in this precision noise changes most of them by as much as they "
        "are large"
        for step, is_noisy in comparison.noisy.items()
        if is_noisy
    ]
    add_tensors(report, comparison, shown)
    _add_notes(report, comparison)
    return OfRank(report, comparison.order)


def _findings(comparison: Comparison, outcomes: Sequence[Outcome], wrong: Sequence[Outcome]) -> list[Finding]:
    diagnostician = Diagnostician(comparison)
    found = [
        Finding(0, events.PARAMETER, name, fault=of_faults.WRONG_SHARD, detail=problem)
        for name, problem in comparison.parameters.problems.items()
    ]
    if wrong and not comparison.unknown_parameters:  # else they may be there by another name
        found += [
            Finding(0, events.PARAMETER, name, fault=of_faults.WRONG_SHARD, detail="no rank has its initial values")
            if name in comparison.lost_parameters
            else Finding(0, events.PARAMETER, name, fault=of_faults.NOT_CALLED, detail="no rank has its parameters")
            for name in _lost(comparison)
        ]
    for number, outcome in enumerate(wrong[:MOST_FINDINGS]):
        diagnosis, of_all = Diagnosis(of_faults.DIFFERENT_VALUES), None
        if not outcome.pieces:
            diagnosis = Diagnosis(of_faults.MISSING_TERM, "no rank has one")
        elif number == 0:
            consequences = Consequences(comparison, diagnostician, wrong, outcomes)
            diagnosis = _with_collectives(consequences.diagnose(outcome), outcome, comparison)
            of_all = consequences.place_of_all(outcome, diagnosis)
        place = diagnosis.place or place_of_fault(outcome, comparison) if of_all is None else of_all
        found.append(_finding(outcome, diagnosis, place))
    return found


def _lost(comparison: Comparison) -> list[str]:
    """Return the outermost modules of which no rank has a parameter, and other parameters that no rank has."""
    kept = {key.name for key in comparison.of_candidate if key.kind == events.PARAMETER}
    around = {module for name in kept for module in modules_around(name)}
    found = []
    for name in comparison.lost_parameters:
        found.append(next((it for it in modules_around(name) if it not in around), name))
    return list(dict.fromkeys(found))


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
        if _lacks_steps(recording):
            report.notes.append(
                f"no optimizer of torch stepped in the {name}: gradients of parameters, and parameters after a step, "
                "were not compared; record(by_hand=True) can record them"
            )
        for rank, end in zip(recording.ranks, recording.ends, strict=True):
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


def _lacks_steps(recording: Recording) -> bool:
    """Whether a program that ran to its end computed gradients, and recorded nothing that is made of them."""
    recorded = {(it.kind, it.step > 0) for it in recording.tensors[0]}
    of_steps = {(it, True) for it in (events.GRADIENT, events.OPTIMIZER_STATE, events.PARAMETER)}
    has_backward = bool(recorded & {(events.LOSS, True), (events.ACTIVATION_GRADIENT, True)})
    return has_backward and not recorded & of_steps and all(it == REACHED for it in recording.ends)


def _title(outcome: Outcome) -> str:
    key = outcome.key
    return f"step {key.step}, {key.kind} {key.name}".rstrip()
