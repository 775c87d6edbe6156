"""Programs of the corpus of silent bugs train like one process; each fault makes them train another model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from silent_bugs.corpus import BUGS, KINDS, Bug
from torch import Tensor

RUNS = sorted({(bug.program, bug.ranks) for bug in BUGS})
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}


def trained(program: str, faults: Iterable[str] = (), dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    module = next(bug.module() for bug in BUGS if bug.program == program)
    return module.trained(frozenset(faults), dtype=dtype)


def largest_difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    return max(float((ours[name].double() - reference[name].double()).abs().max()) for name in ours)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("program", "ranks"), RUNS)
def test_a_program_without_faults_trains_like_one_process(
    run_ranks: Callable[..., list[Any]], program: str, ranks: int, dtype: torch.dtype
) -> None:
    reference = trained(program, dtype=dtype)

    for ours in run_ranks(functools.partial(trained, program, dtype=dtype), ranks):
        assert largest_difference(ours, reference) < TOLERANCES[dtype]


@pytest.mark.sample(2)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_fault_trains_another_model(run_ranks: Callable[..., list[Any]], bug: Bug) -> None:
    reference = trained(bug.program)

    results = run_ranks(functools.partial(trained, bug.program, [bug.fault]), bug.ranks)

    assert max(largest_difference(ours, reference) for ours in results) > 1e-8


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_fault_stays_silent_in_lower_precision(
    run_ranks: Callable[..., list[Any]], bug: Bug, dtype: torch.dtype
) -> None:
    results = run_ranks(functools.partial(trained, bug.program, [bug.fault], dtype), bug.ranks)

    assert all(value.isfinite().all() for ours in results for value in ours.values())


@pytest.mark.parametrize("program", sorted({bug.program for bug in BUGS}))
def test_every_module_and_parameter_that_a_bug_names_is_in_the_program(program: str) -> None:
    model, *_ = next(bug.module() for bug in BUGS if bug.program == program).run(frozenset(), torch.float64, 1)
    names = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}

    named = {name for bug in BUGS if bug.program == program for name in bug.where}
    assert {name for name in named if not name.startswith("optimizer.")} <= names


def test_bugs_are_distinct_and_of_the_kinds_of_the_vocabulary() -> None:
    assert len({bug.name for bug in BUGS}) == len({(bug.program, bug.fault) for bug in BUGS}) == len(BUGS)
    assert {kind for bug in BUGS for kind in (bug.fault_kind, *bug.other_kinds)} <= set(KINDS)
