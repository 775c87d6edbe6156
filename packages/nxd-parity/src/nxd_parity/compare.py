"""`compare`: finds the first tensor in which a recorded program differs from a recorded reference, and says why."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.diagnosis import Diagnosis, Diagnostician
from nxd_parity.location import add_tensors
from nxd_parity.outcomes import Comparison, Outcome, Status
from nxd_parity.recording import Recording
from nxd_parity.report import Finding, Report
from nxd_parity.sequence import owner_of

MOST_FINDINGS = 50  # later ones follow from the first
EFFECTS = (events.PARAMETER, events.OPTIMIZER_STATE)  # what a step leaves behind


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
        ValueError: a recording is damaged or incomplete, or the reference has several ranks.
    """
    recordings = [Recording(it) for it in (reference, *spread)]
    for recording in recordings:
        if recording.world_size > 1:
            raise ValueError(
                f"{recording.folder} is a recording of {recording.world_size} ranks; the reference is one process: "
                "record the program on a single rank, with its whole batches"
            )
    of_candidate = Recording(candidate)
    comparison = Comparison(recordings[0], of_candidate, recordings[1:], rtol=rtol, shards=dict(shards or {}))
    report = Report(str(reference), str(candidate), of_candidate.world_size, comparison.steps)
    if not comparison.order:
        raise ValueError(f"{reference} has no tensors: no model was called while it was recorded")
    outcomes = list(comparison.outcomes())
    for outcome in outcomes:
        if outcome.status in (Status.AGREES, Status.SUM):
            report.agree[outcome.key.kind] = report.agree.get(outcome.key.kind, 0) + 1
        elif outcome.status is Status.UNKNOWN:
            report.not_compared[_title(outcome)] = outcome.reason
    report.findings = _findings(comparison, outcomes)
    add_tensors(report, comparison, outcomes)
    _add_notes(report, comparison)
    return report


def _findings(comparison: Comparison, outcomes: Sequence[Outcome]) -> list[Finding]:
    wrong = _faults_in(outcomes)
    diagnostician = Diagnostician(comparison)
    found = [
        Finding(0, events.PARAMETER, name, fault=of_faults.WRONG_SHARD, detail=problem)
        for name, problem in comparison.parameters.problems.items()
    ]
    for number, outcome in enumerate(wrong[:MOST_FINDINGS]):
        diagnosis = diagnostician.diagnose(outcome) if number == 0 else Diagnosis(of_faults.DIFFERENT_VALUES)
        found.append(_finding(outcome, diagnosis, _place_of_fault(outcome, outcomes)))
    return found


def _faults_in(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return what differs, the cause first.

    Parts of a sum are right where what follows is right, as inside layers that add them up, or in optimizers that do.
    If nothing that a step leaves behind differs, and no gradient, then nothing does.
    """
    differs = [it for it in outcomes if it.status is Status.DIFFERS]
    lasting = [it for it in differs if it.key.kind in (*EFFECTS, events.GRADIENT, events.LOSS)]
    has_effects = {it.key.kind for it in outcomes} & set(EFFECTS)
    if not lasting:
        wrong = [it for it in outcomes if it.status is Status.SUM and it.key.kind == events.GRADIENT]
        return wrong if not has_effects else []
    step = min(it.key.step for it in lasting)  # what differs before it had no effect, such as a norm without a limit
    differs = [it for it in differs if it.key.step >= step]
    before = outcomes[: outcomes.index(differs[0])]
    unsummed = [it for it in before if it.status is Status.SUM and it.key.step == step]
    causes = [it for it in unsummed if it.key.kind == events.GRADIENT or not _is_added_up(it, before)]
    return [*causes[:1], *differs]


def _is_added_up(part: Outcome, before: Sequence[Outcome]) -> bool:
    """Whether a module that a part of a sum was given to, or that has the module in it, is right afterwards."""
    name = part.key.name
    is_gradient = part.key.kind == events.ACTIVATION_GRADIENT
    for later in before[before.index(part) + 1 :]:
        if later.status is not Status.AGREES or later.key.kind != part.key.kind:
            continue
        is_around = bool(name) and (name.startswith(f"{later.key.name}.") or not later.key.name)
        if is_gradient or is_around or any(name in piece.event.inputs for piece in later.pieces):
            return True
    return False


def _place_of_fault(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Return the module or parameter where the fault is.

    The input of a module inside another was made by the other's own code. The gradient of a module's output was made by
    the backward of the module that got the output.
    """
    key = outcome.key
    if key.kind == events.INPUT and key.name:
        return owner_of(key.name)
    if key.kind == events.ACTIVATION_GRADIENT:
        users = {
            it.key.name
            for it in outcomes
            if it.key.step == key.step
            and it.key.kind == events.ACTIVATION
            and any(key.name in piece.event.inputs for piece in it.pieces)
        }
        if users:
            return sorted(users)[0]
    if key.kind == events.OPTIMIZER_STATE:
        return key.name.rpartition("/")[0]
    return key.name


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
    inferred = comparison.parameters.inferred
    if inferred:
        name, where = next(iter(inferred.items()))
        report.notes.append(f"the parts of {len(inferred)} parameters were inferred, such as {name}: {where}")


def _title(outcome: Outcome) -> str:
    key = outcome.key
    return f"step {key.step}, {key.kind} {key.name}".rstrip()
