"""Two recordings side by side: what a rank's tensor is, what it should be, and how far apart they may be."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from nxd_parity import events
from nxd_parity.activations import groups_of, in_order_of, joined
from nxd_parity.bounds import (
    FEW_ELEMENTS,
    PRECISE,
    SHARE_OF_PARAMETERS,
    SMALL_SHARE,
    TIMES_SPREAD,
    Bound,
    Distance,
    bound_of,
    distance,
    is_all_noise,
)
from nxd_parity.collectives import MESSAGES
from nxd_parity.events import TensorEvent
from nxd_parity.inferred_names import Names, infer_names, rename
from nxd_parity.outcome import Piece
from nxd_parity.places import Place
from nxd_parity.recording import Recording
from nxd_parity.sequence import Key, by_key, execution_order

CACHED = 8  # whole tensors of the reference
OF_CALLS = (events.INPUT, events.ACTIVATION, events.ACTIVATION_GRADIENT)  # of which a step has one for each call


class Sides:
    """A reference and a candidate."""

    def __init__(
        self, reference: Recording, candidate: Recording, spread: Sequence[Recording], rtol: float | None
    ) -> None:
        """Index both recordings, and those of the reference with noise; see `compare`."""
        self.reference, self.candidate, self.spread, self.rtol = reference, candidate, spread, rtol
        self.names: dict[tuple[int, int], Names] = infer_names(reference, candidate)
        rename(candidate, self.names)
        self.of_reference = by_key(reference.tensors[0])
        self.of_spread = [by_key(it.tensors[0]) for it in spread]
        self.of_candidate = _by_key_and_rank(reference, candidate)
        self.steps = min(steps_of(reference), steps_of(candidate))
        order = execution_order(reference.tensors[0])
        self.order = [it for it in order if it.step <= self.steps and self._says_much(it)]
        self._peers: dict[tuple[int, str], float] = defaultdict(float)
        for event in reference.tensors[0]:
            size = event.largest if event.largest == event.largest else 0.0
            self._peers[event.step, event.kind] = max(self._peers[event.step, event.kind], size)
        self._users: dict[tuple[int, str], set[str]] = defaultdict(set)
        for tensors in (reference.tensors[0], *candidate.tensors):
            for event in tensors:
                for source in event.inputs:
                    self._users[event.step, source].add(event.name)
        self.noisy: dict[int, bool] = {}  # by step in which gradients differ
        self._differences: dict[tuple[int, str, int, int, float], tuple[Place | None, Distance | None]] = {}
        self._of_differences: Key | None = None
        self._read_joined = lru_cache(maxsize=CACHED)(_read_joined)
        self._with_noise = lru_cache(maxsize=1)(self._read_with_noise)  # for all ranks of a tensor
        self._largest_update = lru_cache(self._find_largest_update)
        of_all = [it for of_rank in candidate.collectives for it in of_rank]
        known = {it.ranks for it in of_all if it.operation not in MESSAGES}
        self.groups = list(groups_of(candidate.world_size, sorted(known)))

    @cached_property
    def unknown_parameters(self) -> list[str]:
        """The candidate's parameters that the reference does not have, by name."""
        known = {key.name for key in self.of_reference if key.kind == events.PARAMETER}
        return list(
            dict.fromkeys(it.name for it in self.of_candidate if it.kind == events.PARAMETER and it.name not in known)
        )

    @cached_property
    def lost_parameters(self) -> list[str]:
        """The reference's parameters that no rank has."""
        found = {key.name for key in self.of_candidate if key.kind == events.PARAMETER}
        return [
            key.name for key in self.order if key.kind == events.PARAMETER and key.step == 0 and key.name not in found
        ]

    def users(self, key: Key) -> list[str]:
        """Return the modules that got the output of a module as it is, by name."""
        return sorted(self._users.get((key.step, key.name), ()))

    def input_of(self, step: int, module: str) -> Key | None:
        """Return the reference's tensor that a module gets: its recorded input, or another module's output."""
        given = Key(step, events.INPUT, module, 0)
        if given in self.of_reference:
            return given
        sources = [it.inputs for it in self.of_reference.get(Key(step, events.ACTIVATION, module, 0), ())]
        key = Key(step, events.ACTIVATION, sources[0][0], 0) if sources and sources[0] else None
        return key if key in self.of_reference else None

    def _says_much(self, key: Key) -> bool:
        """Whether a tensor is more than a number that only shows how a loss is scaled."""
        return key.kind != events.ACTIVATION_GRADIENT or self.of_reference[key][0].shape.count(1) < len(
            self.of_reference[key][0].shape
        )

    def whole(self, key: Key) -> Tensor:
        """Return the reference's tensor; several calls of a module in a step are joined."""
        return self._whole(self.reference, self.of_reference, key)

    def _whole(self, recording: Recording, of_key: Mapping[Key, Sequence[TensorEvent]], key: Key) -> Tensor:
        calls = of_key[key]
        return self._read_joined(recording, tuple(calls if key.kind in OF_CALLS else calls[-1:]))

    def read(self, piece: Piece) -> Tensor:
        """Return a rank's tensor, without padding."""
        value = self.candidate.read(piece.rank, piece.event)
        return value if piece.place is None else piece.place.without_padding(value)

    def expected(self, piece: Piece, key: Key) -> Tensor:
        """Return what a rank's tensor should be."""
        assert piece.place is not None
        part = piece.place.of(self.whole(key))
        return part if piece.scale == 1 else part * piece.scale

    def bound(self, key: Key, piece: Piece) -> Bound:
        """Return how far a rank's tensor may be from what it should be."""
        assert piece.place is not None
        part = piece.place.of(self.whole(key))
        spread = [piece.place.of(it) for it in self._with_noise(key)]
        share = SHARE_OF_PARAMETERS if key.kind == events.PARAMETER and key.step > 0 else SMALL_SHARE
        bound = bound_of(part, spread, peers=self._peers[key.step, key.kind], rtol=self.rtol, share=share)
        if spread and part.numel() <= FEW_ELEMENTS:
            least = TIMES_SPREAD * self._spread_of_alike.get(_role(key), 0.0)
            bound = Bound(max(bound.largest, least), max(bound.mean_square, least))
        return Bound(bound.largest * abs(piece.scale), bound.mean_square * abs(piece.scale))

    @cached_property
    def _spread_of_alike(self) -> Mapping[tuple[int, str, str], float]:
        """The largest spread of tensors of few elements that have one role in different layers, and of all losses.

        A few runs with noise may all round one number alike, but not those of all layers.
        """
        found: dict[tuple[int, str, str], float] = defaultdict(float)
        for key in self.order:
            if math.prod(self.of_reference[key][0].shape) <= FEW_ELEMENTS:
                whole = self.whole(key)
                if whole.is_floating_point():
                    apart = [distance(whole, it).largest for it in self._with_noise(key)]
                    found[_role(key)] = max([found[_role(key)], *filter(math.isfinite, apart)])
        return found

    def _read_with_noise(self, key: Key) -> list[Tensor]:
        """Return the tensor in the recordings with noise; rows that it brought into another order are put back."""
        whole, found = self.whole(key), []
        for recording, of_key in zip(self.spread, self.of_spread, strict=True):
            if key in of_key:
                noisy = self._whole(recording, of_key, key)
                if noisy.shape == whole.shape:
                    found.append(in_order_of(whole, noisy) if key.kind in OF_CALLS else noisy)
        return found

    def difference(self, key: Key, piece: Piece) -> Distance | None:
        """Return how far a rank's tensor is from what it should be; None if that is rounding."""
        same = self.of_reference[key]
        if (len(same) == 1 or key.kind not in OF_CALLS) and same[-1].digest == piece.event.digest and piece.scale == 1:
            return None
        if key != self._of_differences:
            self._of_differences = key
            self._differences.clear()
        event = piece.event
        known = (piece.rank, event.name, event.call, id(piece.place), piece.scale)
        if known not in self._differences:  # with the place, so that its id is not used again
            self._differences[known] = piece.place, self._difference(key, piece)
        return self._differences[known][1]

    def _difference(self, key: Key, piece: Piece) -> Distance | None:
        expected, found = self.expected(piece, key), self.read(piece)
        if expected.shape != found.shape:
            return Distance(float("inf"), float("inf"), float("inf"), (), 0.0, 0.0)
        if expected.dtype == found.dtype and torch.equal(expected, found):
            return None
        apart, bound = distance(expected, found), self.bound(key, piece)
        if bound.holds(apart):
            return None
        if key.kind == events.PARAMETER and key.step > 0 and self.is_of_adam:
            wanted, more = expected.double(), found.double() - expected.double()
            rest = more.sign() * (more.abs() - self._moved_by_rounding(key, piece)).clamp_min(0)
            if bound.holds(distance(wanted, wanted + rest)):
                return None
        is_of_gradients = key.kind in (events.GRADIENT, events.ACTIVATION_GRADIENT)
        return None if is_of_gradients and math.isfinite(apart.largest) and self._is_noisy(key.step) else apart

    def _is_noisy(self, step: int) -> bool:
        """Whether noise changes most gradients of a step by as much as they are large, so that they say nothing."""
        if step not in self.noisy:
            gradients = [it for it in self.order if it.step == step and it.kind == events.GRADIENT]
            noisy = 0
            for key in gradients if self.spread else []:
                whole = self.whole(key)
                apart = [distance(whole, it).mean_square for it in self._with_noise(key)]
                noisy += whole.dtype not in PRECISE and bool(apart) and is_all_noise(whole, max(apart))
            self.noisy[step] = 2 * noisy > len(gradients)
        return self.noisy[step]

    @cached_property
    def is_of_adam(self) -> bool:
        """Whether the reference's optimizer divides by the size of gradients, as Adam does, by its states."""
        return any(it.kind == events.OPTIMIZER_STATE and it.name.endswith("/exp_avg_sq") for it in self.of_reference)

    def _moved_by_rounding(self, key: Key, piece: Piece) -> Tensor:
        """Return how far rounding of gradients may have moved each element of a parameter until the end of a step.

        Adam moves an element by the sign of its gradient, however small that is. Where a gradient is so small that
        rounding may change its sign, the element may go the other way, as far as other such elements go. Where a
        gradient is not far above Adam's `eps`, the step is shorter than others, and grows with the gradient.
        """
        assert piece.place is not None
        allowed = torch.zeros_like(self.expected(piece, key), dtype=torch.float64)
        for step in range(1, key.step + 1):
            of_gradient = key._replace(step=step, kind=events.GRADIENT)
            before, after = (key._replace(step=it) for it in (step - 1, step))
            if not {of_gradient, before, after} <= self.of_reference.keys():
                continue
            gradient = piece.place.of(self.whole(of_gradient)).double().abs()
            update = piece.place.of(self.whole(after)).double() - piece.place.of(self.whole(before)).double()
            if gradient.shape != allowed.shape:
                continue
            rounding = self.bound(of_gradient, piece).mean_square
            is_small = (gradient > 0) & (gradient <= rounding)
            if bool(is_small.any()):
                allowed += 2 * float(update[is_small].abs().max()) * is_small
            if self.of_reference[after][-1].dtype in PRECISE:  # below them the spread is wide enough
                share = (1 - update.abs() / self._largest_update(step)) * rounding / gradient
                allowed += torch.where(gradient > rounding, update.abs() * share, 0.0)
        return allowed

    def _find_largest_update(self, step: int) -> float:
        """Return how far a step moves the element of all parameters that it moves most."""
        keys = [it for it in self.of_reference if it.kind == events.PARAMETER and it.step == step]
        pairs = [(it, it._replace(step=step - 1)) for it in keys]
        return max(
            distance(self.whole(before), self.whole(after)).largest
            for after, before in pairs
            if before in self.of_reference
        )


def role_of(name: str) -> str:
    """Return what modules or parameters that differ by numbers in their names, such as a layer's, have in common."""
    return re.sub(r"\b\d+\b", "#", name)


def _role(key: Key) -> tuple[int, str, str]:
    """Return the role of a tensor in a step; losses of all steps have one."""
    return 0 if key.kind == events.LOSS else key.step, key.kind, role_of(key.name)


def steps_of(recording: Recording) -> int:
    """Return the number of steps that a recording has on its first rank that has tensors."""
    return max((it.step for it in next(filter(None, recording.tensors), ())), default=0)


def _by_key_and_rank(reference: Recording, candidate: Recording) -> dict[Key, list[tuple[int, TensorEvent]]]:
    """Return the candidate's tensors by what they are.

    A stage of a pipeline is no whole model: its outputs are not the model's, and the inputs are those of the first.
    """
    found: dict[Key, list[tuple[int, TensorEvent]]] = defaultdict(list)
    names = _parameters_by_step(reference.tensors[0])
    first = next((it.name for it in reference.tensors[0] if it.kind == events.ACTIVATION), "")
    for rank, tensors in enumerate(candidate.tensors):
        own = _parameters_by_step(tensors)
        has_first = {it.model for it in tensors if it.kind == events.ACTIVATION and it.name == first}
        for key, of_rank in by_key(tensors).items():
            is_of_stage = not key.name and key.kind in OF_CALLS and not names[key.step] <= own[key.step]
            kept = [
                (rank, it) for it in of_rank if not is_of_stage or (key.kind == events.INPUT and it.model in has_first)
            ]
            if kept:
                found[key] += kept
    return found


def _parameters_by_step(tensors: Sequence[TensorEvent]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for event in tensors:
        if event.kind == events.PARAMETER:
            found[event.step].add(event.name)
    return found


def _read_joined(recording: Recording, calls: tuple[TensorEvent, ...]) -> Tensor:
    return joined([recording.read(0, it) for it in calls])
