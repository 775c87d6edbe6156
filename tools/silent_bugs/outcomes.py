"""What nxd-parity says of a program of the corpus, and whether that is where and what the bug is."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_parity import Finding

from silent_bugs.corpus import Bug

OF_THE_WHOLE = ("loss", "gradient norm", "input", "gradient")  # kinds of tensors that the empty name stands for

OF_ALL_PARAMETERS = ("parameter", "optimizer state")  # kinds that have the empty name where all are wrong alike
OF_AN_AXIS = {"scaled", "summed twice"}


@dataclass(frozen=True)
class Outcome:
    """What a comparison says of a program with one fault, or with none.

    Attributes:
        program: the program and its number of ranks.
        bug: the bug; None for the program without faults.
        finding: the first difference; None if there is none, or if the comparison failed.
        error: why the comparison failed; empty if it did not.
        without_fault: the outcome of the same program without faults; None if this is that outcome.
    """

    program: str
    bug: Bug | None = None
    finding: Finding | None = None
    error: str = ""
    without_fault: Outcome | None = None

    @property
    def is_found(self) -> bool:
        """Whether the fault makes a difference that the program does not have without it."""
        if self.finding is None:
            return False
        if self.without_fault is None:
            return True
        return not self.without_fault.error and _what(self.finding) != _what(self.without_fault.finding)

    @property
    def has_name(self) -> bool:
        """Whether the difference is found, and where the bug is."""
        if self.finding is None or self.bug is None or not self.is_found:
            return False
        is_of_all = not self.finding.name and self.finding.kind in OF_ALL_PARAMETERS
        if "" in self.bug.where and (is_of_all or self.finding.kind in OF_THE_WHOLE):
            return True
        # the states of an optimizer are named after their parameter: fc.weight/exp_avg
        name = self.finding.name.partition("/")[0]
        return bool(name) and name in self.bug.where

    @property
    def has_kind(self) -> bool:
        """Whether the difference is found, and called what the bug is."""
        if self.finding is None or self.bug is None or not self.is_found:
            return False
        kinds = {self.bug.fault_kind, *self.bug.other_kinds}
        if self.finding.axis and kinds & OF_AN_AXIS:  # the values are times the size of an axis: one and the same
            kinds |= OF_AN_AXIS
        return self.finding.fault in kinds

    @property
    def is_located(self) -> bool:
        """Whether the difference is where and what the bug is."""
        return self.has_name and self.has_kind

    @property
    def verdict(self) -> str:
        """The outcome in a few words."""
        if self.error:
            return "failed"
        if self.bug is None:
            return "false alarm" if self.finding else "agrees"
        if not self.is_found:
            return "not told from no fault" if self.finding else "missed"
        if self.is_located:
            return "located"
        return "found" + ("" if self.has_name else ", not where") + ("" if self.has_kind else ", not what")

    def __str__(self) -> str:
        title = self.program
        if self.bug is not None:
            title = f"{self.bug.name}  ({self.bug.fault_kind} at {self.bug.where[0] or 'the whole model'})"
        seen = self.error or (str(self.finding) if self.finding else "")
        return f"{self.verdict:22s}  {title}  {seen}".rstrip()


def _what(finding: Finding | None) -> tuple[int, str, str, str] | None:
    """A finding without its numbers: of two that differ in nothing else, one tells no more than the other."""
    return None if finding is None else (finding.step, finding.kind, finding.name, finding.fault)
