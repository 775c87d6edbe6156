"""What the tensors that follow say of the first difference, where it says little itself."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.bounds import distance
from nxd_parity.calls import other_calls
from nxd_parity.comparison import Comparison
from nxd_parity.contributions import other_rows
from nxd_parity.diagnosis import Diagnostician
from nxd_parity.faults import is_large
from nxd_parity.order import gathered_without_sum
from nxd_parity.outcome import Diagnosis, Outcome, Status
from nxd_parity.sequence import modules_around, owner_of
from nxd_parity.updates import other_clipping

OTHER_COUNTS = "ranks count different numbers of rows"
OF_FACTORS = (of_faults.SCALED, of_faults.SUMMED_TWICE, of_faults.WRONG_AVERAGING)
OF_STEPS = (events.PARAMETER, events.OPTIMIZER_STATE)  # what a step leaves to the next one
OF_PARAMETERS = (events.GRADIENT, *OF_STEPS)
UNSURE = (of_faults.DIFFERENT_VALUES, of_faults.MISSING_SUM)  # what the rows of a gradient may tell better
MOST_DIAGNOSED = 4
NEAR = 0.01  # of factors
LEAST_STEPS, LEAST_SHARE, GROWN = 2, 0.05, 2.0  # of parameters that drift: steps before, share of the bound, growth


def place_of_fault(outcome: Outcome, comparison: Comparison) -> str:
    """Return the module or parameter where the fault is.

    The input of a module inside another was made by the other's own code. The gradient of a module's output was made by
    the backward of the module that got the output.
    """
    key = outcome.key
    if key.kind == events.INPUT and key.name:
        return owner_of(key.name)
    if key.kind == events.ACTIVATION_GRADIENT:
        called = {it.name for it in comparison.candidate.tensors[outcome.differing[0].rank] if it.step == key.step}
        users = [it for it in comparison.users(key) if it in called and not key.name.startswith(f"{it}.")]
        return next(filter(None, users), key.name)  # of a stage's last module, another rank has the user
    if key.kind == events.OPTIMIZER_STATE:
        return key.name.rpartition("/")[0]
    return key.name


def _common_module(names: Sequence[str]) -> str:
    """Return the innermost module that has all of some parameters; empty if it is the whole model."""
    paths = zip(*(owner_of(it).split(".") for it in names), strict=False)
    return ".".join(of_all[0] for of_all in takewhile(lambda it: len(set(it)) == 1, paths))


class Consequences:
    """The tensors that differ in the step of the first one that does."""

    def __init__(
        self,
        comparison: Comparison,
        diagnostician: Diagnostician,
        wrong: Sequence[Outcome],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Take all that differs, the first difference first, and all that was compared."""
        self._comparison, self._diagnostician, self._wrong, self._outcomes = comparison, diagnostician, wrong, outcomes

    def diagnose(self, outcome: Outcome) -> Diagnosis:
        """Return what is wrong with the first tensor that differs."""
        of_calls = other_calls(self._comparison, outcome, self._outcomes)
        if of_calls is not None:
            return of_calls
        diagnosis = self._diagnostician.diagnose(outcome)
        if diagnosis.fault in (of_faults.DIFFERENT_VALUES, of_faults.LOWER_PRECISION):
            drift = self._drift(outcome.key.step)
            if drift is not None:
                return drift
        explain = {
            events.ACTIVATION: self._of_forward,
            events.LOSS: self._of_loss,
            events.GRADIENT: self._of_gradient,
            events.OPTIMIZER_STATE: self._of_state,
            events.ACTIVATION_GRADIENT: self._of_backward,
        }.get(outcome.key.kind)
        return diagnosis if explain is None else explain(outcome, diagnosis)

    def place_of_all(self, outcome: Outcome, diagnosis: Diagnosis) -> str | None:
        """Return the module around all tensors that are wrong in the same way; None if the fault is in one of them.

        The whole model, if the tensors of all parameters are, or if they have no other module in common.
        """
        if diagnosis.fault == of_faults.DRIFT or diagnosis.place:
            return None if diagnosis.place else ""
        is_one_fault = diagnosis.fault != of_faults.DIFFERENT_VALUES or diagnosis.factor != 1
        if outcome.key.kind not in OF_PARAMETERS or not is_one_fault:
            return None
        alike = [it for it in self._outcomes if it.key[:2] == outcome.key[:2] and it.status is not Status.UNKNOWN]
        wrong = [it for it in alike if it.status is not Status.AGREES and it.differing]
        if len(alike) <= 2 or 4 * len(wrong) < 3 * len(alike):
            return None
        others = [self._of_rows(it, self._diagnostician.diagnose(it)) for it in wrong[:MOST_DIAGNOSED]]
        if diagnosis.factor != 1:
            is_of_all = all(math.isclose(it.factor, diagnosis.factor, rel_tol=NEAR) for it in others)
        else:
            is_of_all = all(it.fault in (diagnosis.fault, of_faults.DIFFERENT_VALUES) for it in others)
        if not is_of_all:
            return None
        return _common_module([it.key.name for it in wrong]) if len(wrong) < len(alike) else ""

    def _of_rows(self, outcome: Outcome, diagnosis: Diagnosis) -> Diagnosis:
        """Explain a gradient by the rows in it, where its values tell less."""
        if outcome.key.kind != events.GRADIENT or outcome.summed_over or diagnosis.fault not in UNSURE:
            return diagnosis
        return other_rows(self._comparison, outcome) or diagnosis

    def _in_step(self, outcome: Outcome, kind: str) -> list[Outcome]:
        return [it for it in self._wrong if it.differing and it.key.kind == kind and it.key.step == outcome.key.step]

    def _of_loss(self, outcome: Outcome, diagnosis: Diagnosis) -> Diagnosis:
        backward = self._in_step(outcome, events.ACTIVATION_GRADIENT)
        gradients = self._in_step(outcome, events.GRADIENT)
        if backward:
            of_output = self._diagnostician.diagnose(backward[0])
            if self._is_after_a_right_one(backward[0]):  # the loss is a sum, and only one term is wrong
                return replace(of_output, place=of_output.place or place_of_fault(backward[0], self._comparison))
            if of_output.fault in (of_faults.DIFFERENT_DATA, of_faults.WRONG_AVERAGING, of_faults.DROPPED_TOKENS):
                return of_output
        for it in gradients[:MOST_DIAGNOSED]:
            of_values = self._diagnostician.diagnose(it)
            of_gradient = self._of_rows(it, of_values)
            if of_gradient.fault in OF_FACTORS or of_gradient is not of_values:
                return of_gradient
        if diagnosis.fault == of_faults.DIFFERENT_VALUES and self._comparison.have_other_counts(outcome.key.step):
            return Diagnosis(of_faults.WRONG_AVERAGING, OTHER_COUNTS)
        if diagnosis.fault == of_faults.DIFFERENT_VALUES and self._are_most_gradients_wrong(outcome):
            return Diagnosis(of_faults.DIFFERENT_VALUES, "outputs are right, the loss and most gradients are not")
        return diagnosis

    def _is_after_a_right_one(self, outcome: Outcome) -> bool:
        """Whether another module's output, no part of which is of this one, has a right gradient before it."""
        for it in self._outcomes:
            if it is outcome:
                return False
            is_alike = it.key[:2] == outcome.key[:2] and it.status is Status.AGREES
            if is_alike and it.key.name and self._comparison.has_right_gradients(it.key):
                return True
        return False

    def _drift(self, step: int) -> Diagnosis | None:
        """Explain a difference inside a step by parameters that parted in the steps before it, within their bounds."""
        shares = [self._largest_share(it) for it in range(1, step)]
        if len(shares) < LEAST_STEPS or shares[-1] < LEAST_SHARE or shares[-1] < GROWN * shares[0]:
            return None
        what = (
            f"parameters and states part more with each step: {shares[0]:.0%} of what rounding explains after step 1, "
            f"{shares[-1]:.0%} after step {step - 1}"
        )
        return Diagnosis(of_faults.DRIFT, what)

    def _largest_share(self, step: int) -> float:
        """Return how far parameters and states are from the reference's after a step, in shares of their bounds."""
        shares = [0.0]
        for outcome in self._outcomes:
            if outcome.key.step == step and outcome.key.kind in OF_STEPS and outcome.pieces:
                piece = outcome.pieces[0]
                if piece.place is not None:
                    bound = self._comparison.bound(outcome.key, piece)
                    apart = distance(self._comparison.expected(piece, outcome.key), self._comparison.read(piece))
                    shares.append(apart.mean_square / bound.mean_square if bound.mean_square else 0.0)
        return max(shares)

    def _of_gradient(self, outcome: Outcome, diagnosis: Diagnosis) -> Diagnosis:
        if self._in_step(outcome, events.ACTIVATION_GRADIENT):
            return diagnosis
        of_rows = self._of_rows(outcome, diagnosis)
        if of_rows is not diagnosis:
            return of_rows
        if diagnosis.fault == of_faults.WRONG_AVERAGING:
            cause = other_clipping(self._comparison, outcome.key.step, diagnosis.factor)
            what = f"{diagnosis.detail}, after a right backward: {cause or 'clipped by another norm, or scaled'}"
            return Diagnosis(of_faults.SCALED, what, diagnosis.factor)
        if diagnosis.fault == of_faults.DIFFERENT_VALUES and self._are_most_gradients_wrong(outcome):
            return self._of_other_gradients(outcome, diagnosis)
        return diagnosis

    def _of_other_gradients(self, outcome: Outcome, diagnosis: Diagnosis) -> Diagnosis:
        """Explain a gradient that says little, such as that of a single number, by others of its step."""
        for it in self._in_step(outcome, events.GRADIENT)[:MOST_DIAGNOSED]:
            of_other = self._of_rows(it, diagnosis if is_large(outcome) else self._diagnostician.diagnose(it))
            if of_other.fault != diagnosis.fault:
                return of_other
        if self._comparison.have_other_counts(outcome.key.step):
            return Diagnosis(of_faults.WRONG_AVERAGING, OTHER_COUNTS)
        return diagnosis

    def _are_most_gradients_wrong(self, outcome: Outcome) -> bool:
        of_step = [it for it in self._comparison.order if it.kind == events.GRADIENT and it.step == outcome.key.step]
        return 2 * len(self._in_step(outcome, events.GRADIENT)) > len(of_step)

    def _of_state(self, outcome: Outcome, diagnosis: Diagnosis) -> Diagnosis:
        is_changed = diagnosis.fault == of_faults.DIFFERENT_VALUES and not self._in_step(outcome, events.GRADIENT)
        if is_changed and outcome.key.step > 1:
            return Diagnosis(of_faults.OTHER_STATE, "gradients and earlier states are right: it was changed in between")
        return diagnosis

    def _of_backward(self, outcome: Outcome, diagnosis: Diagnosis) -> Diagnosis:
        if diagnosis.fault != of_faults.DIFFERENT_VALUES:
            return diagnosis
        users = self._comparison.users(outcome.key)
        split = [it for it in users if self._comparison.parameters.is_split(it)]
        if split:
            return Diagnosis(
                of_faults.MISSING_SUM, f"ranks have parts of {split[0]}; what they give back was not added up, it seems"
            )
        back = self._in_step(outcome, events.ACTIVATION_GRADIENT)
        parts = [it for it in back if it.status is Status.SUM and it.key.name in users]
        if parts:
            return Diagnosis(of_faults.MISSING_SUM, f"ranks have parts of a sum behind {parts[0].key.name}")
        around = [outcome.key.name, *users]
        around += [module for name in around for module in modules_around(name)]
        calls = self._comparison.candidate.collectives[outcome.differing[0].rank]
        gathered = gathered_without_sum(calls, outcome.key.step, around)
        if gathered is not None:
            return Diagnosis(of_faults.MISSING_SUM, f"no sum in backward belongs to {gathered}, it seems")
        return diagnosis

    def _of_forward(self, outcome: Outcome, diagnosis: Diagnosis) -> Diagnosis:
        """Explain an output by the parts of a sum that the module before it has, inside of the same one."""
        if diagnosis.fault != of_faults.DIFFERENT_VALUES:
            return diagnosis
        at = self._outcomes.index(outcome)
        before = next((it for it in reversed(self._outcomes[:at]) if it.key.kind == events.ACTIVATION), None)
        if before is None or before.status is not Status.SUM or before.key.step != outcome.key.step:
            return diagnosis
        if outcome.key.name not in (owner_of(before.key.name), *self._comparison.users(before.key)):
            return diagnosis
        return Diagnosis(
            of_faults.MISSING_SUM, f"the output of {before.key.name} is parts of a sum that was not added up"
        )
