"""Compares two recordings of as many ranks, each rank with the same one: two versions of a program at one layout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.activations import without_repeated_bias
from nxd_parity.bounds import TOLERANCES, distance
from nxd_parity.collectives import MESSAGES
from nxd_parity.events import TensorEvent
from nxd_parity.recording import Recording
from nxd_parity.report import Finding, Report
from nxd_parity.sequence import Key

SEVERITY = {status: number for number, status in enumerate(of_faults.STATUSES)}


@dataclass(frozen=True)
class OfRank:
    """The comparison of one rank.

    Attributes:
        report: its report.
        order: the tensors in the order in which they were compared.
    """

    report: Report
    order: Sequence[Key]


def recordings_of_rank(
    rank: int, reference: Path | str, candidate: Path | str, spread: Sequence[Path | str]
) -> tuple[Recording, Recording, list[Recording]]:
    """Return recordings of one rank: the reference's as that of one process, the candidate's with no other tensors.

    Which part of a whole tensor the rank has does not matter then, as both have the same part.
    """
    of_reference = [Recording(it, rank) for it in (reference, *spread)]
    of_candidate = Recording(candidate)
    for other, tensors in enumerate(of_candidate.tensors):
        of_candidate.replace_tensors(other, _without_placements(tensors) if other == rank else ())
    for recording in of_reference:
        recording.replace_tensors(0, _without_placements(recording.tensors[0]))
    return of_reference[0], of_candidate, of_reference[1:]


def merged(reference: Path | str, candidate: Path | str, of_ranks: Sequence[OfRank]) -> Report:
    """Return one report of the comparisons of all ranks.

    A tensor agrees if it does on all ranks. The first finding is that of the rank that differs first; ranks that differ
    in the same tensor are named with it.
    """
    reports = [it.report for it in of_ranks]
    report = Report(str(reference), str(candidate), len(reports), min(it.steps for it in reports))
    first = min(
        (it for it in of_ranks if it.report.first is not None),
        key=lambda it: _position(it, it.report.first),
        default=None,
    )
    for it in reports:
        report.not_compared |= it.not_compared
    report.notes = list(dict.fromkeys(note for it in reports for note in it.notes))
    report.notes.insert(0, "each rank was compared with the same rank of the reference")
    _add_statuses(report, reports)
    if first is not None:
        report.location = first.report.location
        report.findings = _findings(first.report, reports)
        report.findings[0] = _with_sum(report.findings[0], Recording(reference), Recording(candidate))
        report.different = max(it.different for it in reports)
    return report


def _without_placements(tensors: Sequence[TensorEvent]) -> list[TensorEvent]:
    return [replace(it, placement=None) for it in tensors]


def _position(of_rank: OfRank, first: Finding | None) -> tuple[int, float]:
    """Return where in the order of its rank a finding is: the step, and the share of the tensors before it."""
    assert first is not None
    at = [number for number, key in enumerate(of_rank.order) if _is_of(key, first)]
    return first.step, (at[0] if at else 0) / max(len(of_rank.order), 1)


def _is_of(key: Key, finding: Finding) -> bool:
    return (key.step, key.kind, key.name) == (finding.step, finding.kind, finding.shown_in)


def _findings(first: Report, reports: Sequence[Report]) -> list[Finding]:
    """Return the findings of the rank that differs first, with all ranks that differ in the same tensors."""
    ranks: dict[tuple[int, str, str], set[int]] = {}
    for report in reports:
        for it in report.findings:
            ranks.setdefault((it.step, it.kind, it.shown_in), set()).update(it.ranks)
    return [replace(it, ranks=tuple(sorted(ranks[it.step, it.kind, it.shown_in]))) for it in first.findings]


def _add_statuses(report: Report, reports: Sequence[Report]) -> None:
    for of_rank in reports:
        for step, of_kinds in of_rank.tensors.items():
            for kind, statuses in of_kinds.items():
                found = report.tensors.setdefault(step, {}).setdefault(kind, {})
                for name, status in statuses.items():
                    found[name] = min(status, found.get(name, status), key=SEVERITY.__getitem__)
    for of_kinds in report.tensors.values():
        for kind, statuses in of_kinds.items():
            agree = sum(it == of_faults.AGREES for it in statuses.values())
            if agree:
                report.agree[kind] = report.agree.get(kind, 0) + agree


def _with_sum(finding: Finding, reference: Recording, candidate: Recording) -> Finding:
    """Say that ranks have parts of a sum, if what they have is the reference's when it is added up."""
    if finding.fault != of_faults.DIFFERENT_VALUES or finding.kind not in events.KINDS:
        return finding
    groups = {it.ranks for it in candidate.collectives[finding.ranks[0]] if it.operation not in MESSAGES}
    for ranks in sorted({*groups, tuple(range(candidate.world_size))}):
        if finding.ranks[0] in ranks:
            found = list(_tensors(candidate, finding, ranks))
            wanted = list(_tensors(reference, finding, finding.ranks[:1]))
            is_alike = len(found) == len(ranks) and len({it.shape for it in [*found, *wanted]}) == 1
            if wanted and is_alike and _add_up(torch.stack(found).double().sum(0), wanted[0], len(ranks)):
                what = f"ranks {', '.join(map(str, ranks))} have parts of a sum that were not added up"
                return replace(finding, fault=of_faults.MISSING_SUM, detail=what, axis=f"groups of {len(ranks)} ranks")
    return finding


def _tensors(recording: Recording, finding: Finding, ranks: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the first tensor of each rank that a finding is about."""
    for rank in ranks:
        for event in recording.tensors[rank]:
            if (event.step, event.kind, event.name) == (finding.step, finding.kind, finding.shown_in):
                yield recording.read(rank, event)
                break


def _add_up(total: torch.Tensor, wanted: torch.Tensor, ranks: int) -> bool:
    """Whether a sum over ranks, or their mean, is the wanted tensor; each rank may have added the same bias."""
    bound = TOLERANCES.get(wanted.dtype, 0.0) * float(wanted.abs().max())
    sums = (total, total / ranks, without_repeated_bias(total, wanted))
    return any(distance(wanted.double(), it.double()).largest <= bound for it in sums)
