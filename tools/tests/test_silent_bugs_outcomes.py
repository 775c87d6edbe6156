"""A bug of the corpus is found or located only by a difference that is its own."""

from __future__ import annotations

from dataclasses import replace

from nxd_parity import Finding
from silent_bugs.corpus import Bug
from silent_bugs.outcomes import Outcome

AGREES = Outcome("program")
HEAD = Finding(step=1, kind="activation", name="head", fault="missing sum")


def bug(*where: str) -> Bug:
    return Bug("bug", "owner/name", 1, "About.", "program", "fault", 2, "missing sum", where)


def test_a_difference_with_the_name_and_the_kind_locates_the_bug() -> None:
    assert Outcome("program", bug("head"), HEAD, "", AGREES).verdict == "located"
    state = Finding(step=1, kind="optimizer state", name="fc.weight/exp_avg", fault="missing sum")
    assert Outcome("program", bug("fc.weight"), state, "", AGREES).verdict == "located"


def test_another_name_or_kind_finds_the_bug_and_does_not_locate_it() -> None:
    assert Outcome("program", bug("norm"), HEAD, "", AGREES).verdict == "found, not where"
    scaled = Finding(step=1, kind="activation", name="norm", fault="scaled")
    assert Outcome("program", bug("head"), scaled, "", AGREES).verdict == "found, not where, not what"


def test_the_whole_model_is_its_loss_and_its_gradients_and_no_activation() -> None:
    loss = Finding(step=1, kind="loss", name="", fault="missing sum")
    gradient = Finding(step=1, kind="gradient", name="fc.weight", fault="missing sum")
    output = Finding(step=1, kind="activation", name="", fault="missing sum")
    assert Outcome("program", bug(""), loss, "", AGREES).is_located
    assert Outcome("program", bug(""), gradient, "", AGREES).is_located
    for activation in (HEAD, output):
        assert Outcome("program", bug(""), activation, "", AGREES).verdict == "found, not where"


def test_what_the_program_says_without_the_fault_finds_nothing() -> None:
    alarm = Outcome("program", None, HEAD)
    assert alarm.verdict == "false alarm"
    assert Outcome("program", bug("head"), HEAD, "", alarm).verdict == "not told from no fault"
    assert not Outcome("program", bug("head"), replace(HEAD, largest=0.5), "", alarm).is_located
    assert Outcome("program", bug("head"), replace(HEAD, step=0), "", alarm).is_located


def test_a_comparison_that_fails_neither_agrees_nor_misses_the_bug() -> None:
    failed = Outcome("program", None, None, "IndexError: index 3")
    assert failed.verdict == "failed"
    assert Outcome("program", bug("head"), None, "IndexError: index 3", failed).verdict == "failed"
    assert not Outcome("program", bug("head"), HEAD, "", failed).is_found


def test_a_difference_that_is_not_seen_is_missed() -> None:
    assert Outcome("program", bug("head"), None, "", AGREES).verdict == "missed"
