"""`compare`: finds the first tensor in which a recorded program differs from a recorded reference, and says why."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import torch

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.comparison import Comparison
from nxd_parity.diagnosis import OTHER_COUNTS, Diagnosis, Diagnostician
from nxd_parity.labels import are_others
from nxd_parity.location import add_tensors
from nxd_parity.outcome import Outcome, Status
from nxd_parity.recording import Recording
from nxd_parity.report import Finding, Report
from nxd_parity.sequence import Key, owner_of

MOST_FINDINGS = 50  # later ones follow from the first
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
    comparison = Comparison(recordings[0], of_candidate, recordings[1:], rtol=rtol, shards=shards)
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
    wrong = _faults_in(outcomes, comparison)
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
        diagnosis = Diagnosis(of_faults.DIFFERENT_VALUES)
        if not outcome.pieces:
            diagnosis = Diagnosis(of_faults.DIFFERENT_VALUES, "no rank has one")
        elif number == 0:
            diagnosis = diagnostician.diagnose(outcome)
            if outcome.key.kind == events.LOSS and _are_labels_others(outcome.key.step, wrong, comparison):
                what = "outputs are right, and their gradients differ at two classes of a row, as with other labels"
                diagnosis = Diagnosis(of_faults.DIFFERENT_DATA, what)
            diagnosis = _with_what_follows(diagnostician, diagnosis, outcome, wrong, comparison)
        is_one_fault = diagnosis.fault != of_faults.DIFFERENT_VALUES or diagnosis.factor != 1
        is_of_all = is_one_fault and _is_of_all_parameters(outcome, outcomes)
        found.append(_finding(outcome, diagnosis, "" if is_of_all else _place_of_fault(outcome, comparison)))
    return found


def _with_what_follows(
    diagnostician: Diagnostician,
    diagnosis: Diagnosis,
    outcome: Outcome,
    wrong: Sequence[Outcome],
    comparison: Comparison,
) -> Diagnosis:
    """Say more of the first difference by those that follow it, where it says little itself."""
    kind, step = outcome.key.kind, outcome.key.step
    of_step = sum(it.kind == events.GRADIENT and it.step == step for it in comparison.order)
    gradients = [it for it in wrong if it.key.kind == events.GRADIENT and it.key.step == step]
    if kind == events.LOSS and diagnosis.fault == of_faults.DIFFERENT_VALUES and gradients:
        of_gradient = diagnostician.diagnose(gradients[0])
        if of_gradient.fault in (of_faults.SCALED, of_faults.SUMMED_TWICE, of_faults.WRONG_AVERAGING):
            return of_gradient
        if 2 * len(gradients) > of_step:
            return Diagnosis(of_faults.WRONG_AVERAGING, "outputs are right, the loss and most gradients are not")
    is_backward_right = not any(it.key.kind == events.ACTIVATION_GRADIENT and it.key.step == step for it in wrong)
    if kind == events.GRADIENT and is_backward_right:
        has_other_counts = 2 * len(gradients) > of_step and comparison.have_other_counts(step)
        return _after_right_backward(diagnosis, has_other_counts=has_other_counts)
    if kind == events.OPTIMIZER_STATE and step > 1 and diagnosis.fault == of_faults.DIFFERENT_VALUES and not gradients:
        return Diagnosis(of_faults.OTHER_STATE, "gradients and earlier states are right: it was changed in between")
    if kind == events.ACTIVATION_GRADIENT and diagnosis.fault == of_faults.DIFFERENT_VALUES:
        users = [it for it in comparison.users(outcome.key) if comparison.parameters.is_split(it)]
        if users:
            return Diagnosis(
                of_faults.MISSING_SUM, f"ranks have parts of {users[0]}; what they give back was not added up, it seems"
            )
    return diagnosis


def _after_right_backward(diagnosis: Diagnosis, *, has_other_counts: bool) -> Diagnosis:
    """Say more of a gradient that differs where those of all activations are right, up to a factor of each rank."""
    if diagnosis.fault == of_faults.WRONG_AVERAGING:
        what = f"{diagnosis.detail}, after a right backward: they were clipped by another norm, or scaled"
        return Diagnosis(of_faults.DIFFERENT_VALUES, what, diagnosis.factor)
    if diagnosis.fault == of_faults.DIFFERENT_VALUES and has_other_counts:
        return Diagnosis(of_faults.WRONG_AVERAGING, OTHER_COUNTS)
    return diagnosis


def _are_labels_others(step: int, wrong: Sequence[Outcome], comparison: Comparison) -> bool:
    of_outputs = [it for it in wrong if it.key.kind == events.ACTIVATION_GRADIENT and it.key.step == step]
    if not of_outputs or not of_outputs[0].differing or of_outputs[0].differing[0].place is None:
        return False
    piece = of_outputs[0].differing[0]
    return are_others(comparison.expected(piece, of_outputs[0].key), comparison.read(piece))


def _is_of_all_parameters(outcome: Outcome, outcomes: Sequence[Outcome]) -> bool:
    """Whether a parameter's tensor is wrong as all others of its kind are in the step: the fault is in none of them."""
    alike = [it for it in outcomes if it.key[:2] == outcome.key[:2] and it.status is not Status.UNKNOWN]
    is_of_parameter = outcome.key.kind in (events.GRADIENT, *EFFECTS)
    return is_of_parameter and len(alike) > 2 and all(it.status is not Status.AGREES for it in alike)


def _faults_in(outcomes: Sequence[Outcome], comparison: Comparison) -> list[Outcome]:
    """Return what differs, the cause first.

    If nothing that a step leaves behind differs, and no gradient and no loss, then nothing does: an activation may be
    computed in another way. So are those that differ, or are parts of a sum, where what is made of them is right.
    Where nothing is trained, outputs of whole models are what lasts.
    """
    lasting = [it for it in outcomes if it.status is Status.DIFFERS and it.key.kind in LASTING]
    if not any(it.key.kind in LASTING and it.key.step > 0 for it in outcomes):
        returned = [it for it in outcomes if it.key.kind == events.ACTIVATION and not it.key.name]
        lasting += [it for it in returned if it.status in (Status.DIFFERS, Status.SUM)]
    if not lasting:
        has_effects = {it.key.kind for it in outcomes} & set(EFFECTS)
        return [] if has_effects else [it for it in outcomes if it.status is Status.SUM and it.key.kind in LASTING]
    step = min(it.key.step for it in lasting)  # what differs before it had no effect, such as a norm without a limit
    of_lasting = {(it.key.kind, it.key.step) for it in lasting}
    in_step = [it for it in outcomes if it.key.step == step]
    right = {(it.key.kind, it.key.name) for it in in_step if it.status is Status.AGREES}
    is_forward_right = (events.LOSS, "") in right and _is_exact(in_step)
    is_step_wrong = _is_step_wrong(in_step)
    lost = _lost_gradients(in_step)
    wrong = []
    for outcome in outcomes:
        if outcome.key in lost:
            wrong.append(outcome)
        if outcome.key.step < step or outcome.status not in (Status.DIFFERS, Status.SUM):
            continue
        if outcome.key.step == step and outcome.key.kind in (events.ACTIVATION, events.INPUT):
            is_of_data = bool(outcome.reason) and is_step_wrong  # though what is computed from the rows is right
            if is_forward_right or (_is_right_afterwards(outcome.key, right, comparison) and not is_of_data):
                continue
        elif outcome.key.step == step and outcome.key.kind == events.ACTIVATION_GRADIENT:
            if _is_right_before(outcome, outcomes, right):
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


def _is_exact(outcomes: Sequence[Outcome]) -> bool:
    """Whether values are so precise that a right loss means that all activations are right."""
    dtypes = {it.pieces[0].event.dtype for it in outcomes if it.key.kind == events.LOSS and it.pieces}
    return dtypes == {torch.float64}


def _is_right_afterwards(key: Key, right: Set[tuple[str, str]], comparison: Comparison) -> bool:
    """Whether a module that has a tensor's module in it, or that got the tensor, has a right output."""
    name = key.name
    around = {name[:end] for end, letter in enumerate(name) if letter == "."} | ({""} if name else set())
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


def _place_of_fault(outcome: Outcome, comparison: Comparison) -> str:
    """Return the module or parameter where the fault is.

    The input of a module inside another was made by the other's own code. The gradient of a module's output was made by
    the backward of the module that got the output.
    """
    key = outcome.key
    if key.kind == events.INPUT and key.name:
        return owner_of(key.name)
    if key.kind == events.ACTIVATION_GRADIENT:
        return next(iter(comparison.users(key)), key.name)
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
    inferred = comparison.parameters.inferred
    if inferred:
        name, where = next(iter(inferred.items()))
        report.notes.append(f"the parts of {len(inferred)} parameters were inferred, such as {name}: {where}")


def _title(outcome: Outcome) -> str:
    key = outcome.key
    return f"step {key.step}, {key.kind} {key.name}".rstrip()
