"""Which of the tensors that differ are wrong: those whose difference lasts, the cause first."""

import math
from collections import defaultdict
from collections.abc import Sequence, Set

import torch

from nxd_parity import events
from nxd_parity.comparison import Comparison
from nxd_parity.model_names import is_model, model_of
from nxd_parity.order import added_up_after_backward
from nxd_parity.outcome import Outcome, Status
from nxd_parity.sequence import Key, modules_around, owner_of

EFFECTS = (events.PARAMETER, events.OPTIMIZER_STATE)  # what a step leaves behind
LASTING = (*EFFECTS, events.GRADIENT, events.GRADIENT_NORM, events.LOSS)


def faults_in(outcomes: Sequence[Outcome], comparison: Comparison) -> list[Outcome]:
    """Return what differs, the cause first.

    If nothing that a step leaves behind differs, and no gradient and no loss, then nothing does: an activation may be
    computed in another way. So are those that differ, or are parts of a sum, where what is made of them is right.
    Where nothing is trained, outputs of whole models are what lasts.
    """
    evaluated = _evaluated(outcomes, comparison)
    lasting = _lasting(outcomes, evaluated)
    if not lasting:
        has_effects = {it.key.kind for it in outcomes} & set(EFFECTS)
        return [] if has_effects else [it for it in outcomes if it.status is Status.SUM and it.key.kind in LASTING]
    first = _FirstStep(outcomes, lasting, evaluated, comparison)
    summed_in_buckets = _summed_in_buckets(outcomes, comparison)
    gradients_in = {it.key.step for it in lasting if it.key.kind == events.GRADIENT}
    wrong = []
    for outcome in outcomes:
        key = outcome.key
        is_different = outcome.status in (Status.DIFFERS, Status.SUM) and key.step >= first.step
        is_of_gradients = key.kind == events.GRADIENT_NORM and key.step in gradients_in
        is_harmless = (
            key in summed_in_buckets or is_of_gradients or (key.step == first.step and first.is_right(outcome))
        )
        if key in first.lost or (is_different and not is_harmless):
            wrong.append(outcome)
    return wrong


def recorded_after_clipping(outcomes: Sequence[Outcome], comparison: Comparison) -> Set[Key]:
    """Return the gradients that differ because only one of the programs clips by its own code.

    Gradients are recorded before `clip_grad_norm_` changes them, but after a program's own code did. What the optimizer
    made of them tells that they are right.
    """
    agree = {it.key for it in outcomes if it.status is Status.AGREES}
    has_right_state = {
        (it.step, it.name.rpartition("/")[0])
        for it in agree
        if it.kind == events.OPTIMIZER_STATE and comparison.of_reference[it][-1].shape  # no count of steps
    }
    in_reference, in_candidate = (
        {it.step for it in keys if it.kind == events.GRADIENT_NORM}
        for keys in (comparison.of_reference, comparison.of_candidate)
    )
    return {
        it.key
        for it in outcomes
        if it.key.kind == events.GRADIENT
        and it.status is Status.DIFFERS
        and it.key.step in in_reference ^ in_candidate
        and ((it.key.step, it.key.name) in has_right_state or it.key._replace(kind=events.PARAMETER) in agree)
    }


def _lasting(outcomes: Sequence[Outcome], evaluated: Set[Key]) -> list[Outcome]:
    """Return the differences that last beyond their step, or that are all that a program computes."""
    lasting = [it for it in outcomes if it.status is Status.DIFFERS and it.key.kind in LASTING]
    lasting += [it for it in outcomes if it.key in evaluated and is_model(it.key.name)]
    if not any(it.key.kind in LASTING and it.key.step > 0 for it in outcomes):
        returned = [it for it in outcomes if it.key.kind == events.ACTIVATION and is_model(it.key.name)]
        lasting += [it for it in returned if it.status in (Status.DIFFERS, Status.SUM)]
    return lasting


class _FirstStep:
    """The first step with a lasting difference: earlier ones had no effect, such as a norm without a limit."""

    def __init__(
        self, outcomes: Sequence[Outcome], lasting: Sequence[Outcome], evaluated: Set[Key], comparison: Comparison
    ) -> None:
        """Collect what is right in the step."""
        self.step = min(it.key.step for it in lasting)
        self._comparison, self._evaluated = comparison, evaluated
        self._outcomes = [it for it in outcomes if it.key.step == self.step]
        self.lost = _lost_gradients(self._outcomes)
        self._is_exact = _is_exact(self._outcomes)
        agree = [it for it in self._outcomes if it.status is Status.AGREES]
        partly = {
            it.key[1:3] for it in self._outcomes if it.status is Status.DIFFERS
        }  # of several outputs, one is wrong
        self._right = {(it.key.kind, it.key.name) for it in agree if self._is_exact or is_large(it)} - partly
        self._is_loss_right = any(it.key.kind == events.LOSS for it in agree)
        self._has_loss = any(it.key.kind == events.LOSS for it in self._outcomes)
        self._is_wrong = _is_step_wrong(self._outcomes)
        gradients = [it.key.name for it in lasting if it.key.kind == events.GRADIENT and it.key.step == self.step]
        self._with_wrong_gradients = {owner_of(it) for it in gradients}

    def is_right(self, outcome: Outcome) -> bool:
        """Whether a tensor of the step that differs, or is a part of a sum, is right, as what follows shows."""
        if outcome.key.kind in (events.ACTIVATION, events.INPUT):
            return self._is_right_forward(outcome)
        if outcome.key.kind != events.ACTIVATION_GRADIENT:
            return False
        if self._is_shared(outcome) or (outcome.status is Status.SUM and self._is_summed_later(outcome)):
            return True
        is_before_right = outcome.key.name not in self._with_wrong_gradients
        return is_before_right and _is_right_before(outcome, self._outcomes, self._right)

    def _is_shared(self, outcome: Outcome) -> bool:
        """Whether ranks with other rows of the inputs have the same output of a module with parameters.

        Such as position embeddings: each rank has its rows' part of the gradient, and the parameter's gradient tells
        whether they are added up.
        """
        inputs = [it for it in self._outcomes if it.key.kind == events.INPUT and is_model(it.key.name)]
        rows = {piece.rank: str(piece.place) for it in inputs[:1] for piece in it.pieces}
        own = any(it.key.kind == events.GRADIENT and owner_of(it.key.name) == outcome.key.name for it in self._outcomes)
        of_calls: dict[int, set[str]] = defaultdict(set)
        for piece in outcome.pieces:
            of_calls[piece.event.call].add(str(piece.place))
        has_other_rows = len({rows[it.rank] for it in outcome.pieces if it.rank in rows}) > 1
        return own and has_other_rows and all(len(places) == 1 for places in of_calls.values())

    def _is_summed_later(self, outcome: Outcome) -> bool:
        """Whether the gradient of a module's parameter is the sum of what ranks have parts of, as with all parameters.

        So it is of position embeddings, which the rows of all ranks share.
        """
        gradients = [it for it in self._outcomes if it.key.kind == events.GRADIENT and it.pieces]
        own = [it for it in gradients if owner_of(it.key.name) == outcome.key.name]
        is_in_parts = any(it.status is Status.SUM and it.summed_over == outcome.summed_over for it in own)
        are_all_wrong = not any(it.status is Status.AGREES for it in gradients)
        return bool(own) and (are_all_wrong or not is_in_parts)

    def _is_right_forward(self, outcome: Outcome) -> bool:
        is_mean = self._has_loss and not is_large(outcome)  # of a rank's own rows, perhaps; the loss is that of all
        if (is_mean or (self._is_loss_right and self._is_exact)) and outcome.key not in self._evaluated:
            return True
        is_of_data = bool(outcome.reason) and self._is_wrong  # though what is computed from the rows is right
        return not is_of_data and _is_right_afterwards(outcome.key, self._right, self._comparison)


def _is_step_wrong(outcomes: Sequence[Outcome]) -> bool:
    """Whether the loss of a step differs, or most of its gradients do, as they do with other data."""
    gradients = [it.status is Status.DIFFERS for it in outcomes if it.key.kind == events.GRADIENT]
    is_loss_wrong = any(it.key.kind == events.LOSS and it.status is Status.DIFFERS for it in outcomes)
    return is_loss_wrong or 2 * sum(gradients) > len(gradients)


def _lost_gradients(outcomes: Sequence[Outcome]) -> Set[Key]:
    """Return a step's gradients that no rank has: most others are there, and the parameters or the norm are wrong."""
    gradients = [it for it in outcomes if it.key.kind == events.GRADIENT]
    lost = [it.key for it in gradients if not it.pieces]
    differing = {it.key[1:3] for it in outcomes if it.status is Status.DIFFERS}
    has_other_norm = (events.GRADIENT_NORM, "") in differing
    if len(lost) == len(gradients) or not (has_other_norm or 2 * len(lost) < len(gradients)):
        return set()
    return {it for it in lost if has_other_norm or (events.PARAMETER, it.name) in differing}


def _evaluated(outcomes: Sequence[Outcome], comparison: Comparison) -> Set[Key]:
    """Return the outputs that differ in calls of models that have no backward: what they return is what lasts."""
    trained = {
        (rank, it.step, it.model_call)
        for rank, tensors in enumerate(comparison.candidate.tensors)
        for it in tensors
        if it.kind == events.ACTIVATION_GRADIENT
    }
    return {
        it.key
        for it in outcomes
        if it.key.kind == events.ACTIVATION
        and it.status is Status.DIFFERS
        and not any((piece.rank, it.key.step, piece.event.model_call) in trained for piece in it.differing)
    }


def _summed_in_buckets(outcomes: Sequence[Outcome], comparison: Comparison) -> Set[Key]:
    """Return the gradients that are parts of sums, in steps in which ranks add up as many elements after backward.

    A program that copies its gradients into buckets adds them up there, and not where they are recorded: most of them
    are parts of sums then, and what the optimizer made of them is not.
    """
    without = {
        (it.key.step, it.summed_over) for it in outcomes if it.key.kind in EFFECTS and it.status is Status.DIFFERS
    }
    of_steps: dict[int, list[Outcome]] = defaultdict(list)
    for it in outcomes:
        if it.key.kind == events.GRADIENT and it.pieces:
            of_steps[it.key.step].append(it)
    found: set[Key] = set()
    for step, gradients in of_steps.items():
        parts = [it for it in gradients if it.status is Status.SUM and it.summed_over]
        for ranks in {it.summed_over for it in parts}:
            of_rank = {it.key: piece for it in gradients for piece in it.pieces if piece.rank == ranks[0]}
            elements = sum(math.prod(it.event.shape) for it in of_rank.values())
            is_of_most = 4 * sum(it.summed_over == ranks for it in parts) >= 3 * len(of_rank)
            if not is_of_most or (step, ranks) in without:
                continue
            if added_up_after_backward(comparison.candidate.collectives[ranks[0]], step, ranks) >= elements:
                found.update(it.key for it in parts if it.summed_over == ranks)
    return found


def _is_exact(outcomes: Sequence[Outcome]) -> bool:
    """Whether values are so precise that a right loss means that all activations are right."""
    dtypes = {it.pieces[0].event.dtype for it in outcomes if it.key.kind == events.LOSS and it.pieces}
    return dtypes == {torch.float64}


def is_large(outcome: Outcome) -> bool:
    """Whether a tensor has so many elements that rounding cannot hide that one is wrong, as it can in a mean."""
    return any(it.event.shape and max(it.event.shape) > 1 for it in outcome.pieces)


def _is_right_afterwards(key: Key, right: Set[tuple[str, str]], comparison: Comparison) -> bool:
    """Whether a module that has a tensor's module in it, or that got the tensor, has a right output."""
    name = key.name
    around = {*modules_around(name)} | ({model_of(name)} - {name})
    later = {*around, *comparison.users(key), *([name] if key.kind == events.INPUT else [])}
    return any((events.ACTIVATION, it) in right for it in later)


def _is_right_before(outcome: Outcome, outcomes: Sequence[Outcome], right: Set[tuple[str, str]]) -> bool:
    """Whether backward is right for the modules whose outputs a module got."""
    name, step = outcome.key.name, outcome.key.step
    around = {name, *modules_around(name)}
    sources = {
        source
        for it in outcomes
        if it.key.step == step and it.key.kind == events.ACTIVATION and it.key.name in around
        for piece in it.pieces
        for source in piece.event.inputs
    }
    return any((events.ACTIVATION_GRADIENT, it) in right for it in sources)
