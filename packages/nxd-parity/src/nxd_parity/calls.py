"""Modules that a rank calls more or less often than the reference does in one call of the model."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.comparison import Comparison
from nxd_parity.events import TensorEvent
from nxd_parity.outcome import Diagnosis, Outcome, Status
from nxd_parity.report import plural
from nxd_parity.sequence import Key, modules_around
from nxd_parity.sides import role_of

OF_FORWARD = (events.INPUT, events.ACTIVATION, events.LOSS)


@dataclass(frozen=True)
class _Deviation:
    """A module that a rank calls another number of times.

    Attributes:
        name: the module.
        rank: the rank.
        calls: how often, in one call of the model.
        expected: how often in the reference.
        is_of_ranks: whether ranks are counted, not calls.
    """

    name: str
    rank: int
    calls: int
    expected: int
    is_of_ranks: bool = False


def other_calls(comparison: Comparison, outcome: Outcome, outcomes: Sequence[Outcome]) -> Diagnosis | None:
    """Explain the first difference of a forward by a module around it, or right before it, that is skipped or repeated.

    Args:
        comparison: reads the tensors.
        outcome: the first difference.
        outcomes: those of all tensors, in the order of execution.
    """
    key = outcome.key
    if key.kind not in OF_FORWARD:
        return None
    deviations = [*_deviations(comparison, key.step), *_repeated(comparison, key.step)]
    found = _at(key, deviations, outcomes)
    if found is None:
        return None
    ranks = sorted({it.rank for it in deviations if it.name == found.name})
    where = f"on {plural('rank', len(ranks))} {', '.join(map(str, ranks))}"
    if not found.calls:
        return Diagnosis(of_faults.NOT_CALLED, f"{found.name} is not called {where}", place=found.name)
    what = f"{found.name} is called {found.calls} times instead of {found.expected} {where}"
    if found.is_of_ranks:
        what = f"{found.name} is called {where}, most modules of its kind on {found.expected}"
    fault = of_faults.CALLED_AGAIN if found.calls > found.expected else of_faults.NOT_CALLED
    return Diagnosis(fault, what, place=found.name)


def _at(key: Key, deviations: Sequence[_Deviation], outcomes: Sequence[Outcome]) -> _Deviation | None:
    """Return the outermost module that deviates, and has the first difference in it or behind it."""
    names = {it.name for it in deviations}
    outermost = [it for it in deviations if not any(_is_in(it.name, other) for other in names)]
    around = next((it for it in outermost if key.name == it.name or _is_in(key.name, it.name)), None)
    if around is not None:
        return around
    of_name = {it.name: it for it in outermost}
    at = next(number for number, it in enumerate(outcomes) if it.key == key)
    for before in reversed(outcomes[:at]):
        if before.key.step != key.step:
            return None
        deviating = of_name.get(before.key.name)
        if deviating is not None:
            return deviating
        if before.key.kind == events.ACTIVATION and before.status is Status.AGREES:
            return None  # what comes after the module is right
    return None


def _is_in(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _deviations(comparison: Comparison, step: int) -> Iterator[_Deviation]:
    """Yield the modules that a rank with their parameters calls another number of times, relative to most modules."""
    of_reference = _counts(comparison.reference.tensors[0], step)
    names = [it.name for it in comparison.reference.tensors[0] if it.kind == events.ACTIVATION and it.step == step]
    expected = {}
    for name in dict.fromkeys(filter(None, names)):
        of_calls = {of_call[name] for of_call in of_reference.values()}
        if len(of_calls) == 1:  # a module that is called by its tokens, such as an expert, says nothing
            expected[name] = of_calls.pop()
    for rank, tensors in enumerate(comparison.candidate.tensors):
        steps = {it.step for it in tensors if it.kind == events.PARAMETER}
        of_step = step if max(steps, default=0) > 0 else 0  # a rank may get another stage in between
        parameters = {it.name for it in tensors if it.kind == events.PARAMETER and it.step == of_step}
        owned = {module for name in parameters for module in modules_around(name)}
        for counts in _counts(tensors, step).values():
            known = {name: count for name, count in expected.items() if name in owned}
            shares = Counter(counts[name] / count for name, count in known.items() if counts[name])
            if not shares:
                continue
            usual = shares.most_common(1)[0][0]
            for name, count in known.items():
                if counts[name] != usual * count:
                    yield _Deviation(name, rank, counts[name], round(usual * count))


def _repeated(comparison: Comparison, step: int) -> Iterator[_Deviation]:
    """Yield the layers that more ranks call than most of their kind, as where two stages of a pipeline have one."""
    ranks: dict[str, set[int]] = defaultdict(set)
    for rank, tensors in enumerate(comparison.candidate.tensors):
        for event in tensors:
            if event.step == step and event.kind == events.ACTIVATION and event.name:
                ranks[event.name].add(rank)
    alike: dict[str, list[str]] = defaultdict(list)
    for name in ranks:
        alike[role_of(name)].append(name)
    for names in alike.values():
        usual = Counter(len(ranks[name]) for name in names).most_common(1)[0][0]
        for name in names:
            if len(ranks[name]) > usual:
                of_name = sorted(ranks[name])
                yield from (_Deviation(name, rank, len(of_name), usual, is_of_ranks=True) for rank in of_name)


def _counts(tensors: Sequence[TensorEvent], step: int) -> Mapping[int, Counter[str]]:
    """Return how often each module is called in a step, by call of the model."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for event in tensors:
        if event.step == step and event.kind == events.ACTIVATION and event.output == 0:
            found[event.model_call][event.name] += 1
    return found
