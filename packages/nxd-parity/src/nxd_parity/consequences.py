"""What the tensors that follow say of the first difference, where it says little itself."""

from collections.abc import Sequence
from dataclasses import replace

from nxd_parity import events
from nxd_parity import report as of_faults
from nxd_parity.bounds import distance
from nxd_parity.comparison import Comparison
from nxd_parity.diagnosis import Diagnostician
from nxd_parity.outcome import Diagnosis, Outcome, Status
from nxd_parity.sequence import owner_of

OTHER_COUNTS = "ranks count different numbers of rows"
OF_FACTORS = (of_faults.SCALED, of_faults.SUMMED_TWICE, of_faults.WRONG_AVERAGING)
OF_STEPS = (events.PARAMETER, events.OPTIMIZER_STATE)  # what a step leaves to the next one
OF_PARAMETERS = (events.GRADIENT, *OF_STEPS)
MOST_DIAGNOSED = 4
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
        users = [it for it in comparison.users(key) if it and not key.name.startswith(f"{it}.")]  # and not around it
        return next(iter(users), key.name)
    if key.kind == events.OPTIMIZER_STATE:
        return key.name.rpartition("/")[0]
    return key.name


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
        diagnosis = self._diagnostician.diagnose(outcome)
        if diagnosis.fault in (of_faults.DIFFERENT_VALUES, of_faults.LOWER_PRECISION):
            drift = self._drift(outcome.key.step)
            if drift is not None:
                return drift
        if outcome.key.kind == events.LOSS:
            return self._of_loss(outcome, diagnosis)
        if outcome.key.kind == events.GRADIENT:
            return self._of_gradient(outcome, diagnosis)
        if outcome.key.kind == events.OPTIMIZER_STATE:
            return self._of_state(outcome, diagnosis)
        if outcome.key.kind == events.ACTIVATION_GRADIENT:
            return self._of_backward(outcome, diagnosis)
        return diagnosis

    def is_of_all(self, outcome: Outcome, diagnosis: Diagnosis) -> bool:
        """Whether the tensors of all parameters are wrong in the same way: the fault is in none of them."""
        if diagnosis.fault == of_faults.DRIFT or diagnosis.place:
            return not diagnosis.place
        is_one_fault = diagnosis.fault != of_faults.DIFFERENT_VALUES or diagnosis.factor != 1
        if outcome.key.kind not in OF_PARAMETERS or not is_one_fault:
            return False
        alike = [it for it in self._outcomes if it.key[:2] == outcome.key[:2] and it.status is not Status.UNKNOWN]
        wrong = [it for it in alike if it.status is not Status.AGREES and it.differing]
        if len(alike) <= 2 or 4 * len(wrong) < 3 * len(alike):
            return False
        return len(wrong) == len(alike) or all(
            self._diagnostician.diagnose(it).fault == diagnosis.fault for it in wrong[:MOST_DIAGNOSED]
        )

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
            of_gradient = self._diagnostician.diagnose(it)
            if of_gradient.fault in OF_FACTORS:
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
        if diagnosis.fault == of_faults.WRONG_AVERAGING:
            of_one = self._besides_scaling(outcome, diagnosis.factor)
            if of_one is not None:
                return of_one
            what = f"{diagnosis.detail}, after a right backward: they were clipped by another norm, or scaled"
            return Diagnosis(of_faults.DIFFERENT_VALUES, what, diagnosis.factor)
        has_other_counts = self._are_most_gradients_wrong(outcome) and self._comparison.have_other_counts(
            outcome.key.step
        )
        if diagnosis.fault == of_faults.DIFFERENT_VALUES and has_other_counts:
            return Diagnosis(of_faults.WRONG_AVERAGING, OTHER_COUNTS)
        return diagnosis

    def _besides_scaling(self, outcome: Outcome, factor: float) -> Diagnosis | None:
        """Explain gradients of which most have one factor by the first that differs in another way.

        A program that clips by its own code does so before they are recorded, and the wrong one is part of its norm.
        """
        gradients = self._in_step(outcome, events.GRADIENT)
        scaled = [tuple(replace(piece, scale=factor * piece.scale) for piece in it.pieces) for it in gradients]
        judged = [self._comparison.judged(it.key, pieces) for it, pieces in zip(gradients, scaled, strict=True)]
        unlike = [it for it in judged if it.status is not Status.AGREES and it.differing]
        if not unlike or 2 * len(unlike) >= len(gradients):
            return None
        of_one = self._diagnostician.diagnose(unlike[0])
        others = f"the others are {factor:.6g} times the expected ones, as after clipping"
        detail = f"{of_one.detail}; {others}" if of_one.detail else others
        return replace(of_one, detail=detail, place=unlike[0].key.name)

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
        return diagnosis
