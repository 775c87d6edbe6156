"""How trainers agree on the next generation and its layout, through the job's store alone.

A trainer announces itself for the generation after the one that ended. The members are fixed at once if everyone from
the previous generation is there. Members whose host is gone are not waited for; members whose process has ended are
waited for during the grace period, since their supervisors start replacements. A member that still sends heartbeats is
never left behind: it will arrive, or kill itself. The first trainer to find this fixes the members, and all others
accept them.

A trainer that arrives while a generation trains asks it to end between two steps. One that replaces a member knows that
this member has ended, and reports it as lost.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nxd_state import ParallelDegrees, PeerError

from nxd_elastic.members import Generation, GenerationEnd, GenerationKeys, Member
from nxd_elastic.watch import Heartbeats

_POLL_SECONDS, _POLL_SECONDS_PER_SLOT = 0.02, 0.002  # the more trainers poll the store, the less often each does
_PATIENCE = 10  # times the grace period: for the first generation, and until there are enough ranks


@dataclass(frozen=True)
class RendezvousSettings:
    """Settings of the rendezvous; the same for all trainers."""

    slots: int  # number of ranks that the launcher started
    grace: float  # seconds to wait for members that a supervisor may replace
    silence: float  # seconds without a heartbeat after which a trainer counts as lost
    # function that returns the layout for a number of ranks; None if they are too few
    choose: Callable[[int], ParallelDegrees | None]


def join(
    keys: GenerationKeys, own: Member, settings: RendezvousSettings, after: int, *, replaces: bool = False
) -> Generation | None:
    """Wait for a generation that includes this trainer.

    Args:
        keys: the keys of the job's generations.
        own: this trainer.
        settings: the settings of the rendezvous.
        after: the last generation that this trainer was in, or 0.
        replaces: whether it replaces a trainer of the same launch that died. Only a trainer of another launch resumes a
            training that was stopped.

    Returns:
        The generation; None if there will be no other, since the training has ended.

    Raises:
        PeerError: there have been too few ranks for too long, or a rank failed with an error of its own.
    """
    number, is_new_launch = max(after, keys.latest()), after == 0 and not replaces
    while True:
        latest = keys.fixed_generation(number)
        if latest is None and number > 0:  # `latest` is set after the members are fixed
            number -= 1
            continue
        if latest is not None and number > after and own.incarnation in latest.incarnations:
            return latest
        end = None if latest is None else keys.end_of(number)
        if latest is not None and end is None and number > after:
            end = _ask_to_end(keys, own, latest)
        if _ends_training(end, is_new_launch=is_new_launch):
            return None
        number += 1
        if not _Attempt(keys, own, settings, number).run(end):
            return None


def _ends_training(end: GenerationEnd | None, *, is_new_launch: bool = False) -> bool:
    """Whether no generation follows one with this end; raises PeerError if a rank failed with an error of its own."""
    if end is None or end.ending in ("lost", "change"):
        return False
    if end.ending == "done":
        return True
    if is_new_launch:
        return False
    if end.ending == "failed":
        raise PeerError(end.reason)
    return True


def _ask_to_end(keys: GenerationKeys, own: Member, latest: Generation) -> GenerationEnd | None:
    """Ask a generation without this trainer to end; if this trainer replaces a member, the generation has ended."""
    replaced = [member for member in latest.members if member.slot == own.slot]
    if replaced:
        reason = f"rank {own.slot} of the launch is lost: its process {replaced[0].process.pid} has been replaced"
        return keys.end(latest.number, GenerationEnd("lost", reason))
    keys.ask_for_change(latest.number)
    return None


class _Attempt:
    """This trainer's part in fixing the members of one generation."""

    def __init__(self, keys: GenerationKeys, own: Member, settings: RendezvousSettings, number: int) -> None:
        self._keys, self._own, self._settings, self._number = keys, own, settings, number
        before = keys.fixed_generation(number - 1)
        self._before = {} if before is None else {member.slot: member for member in before.members}
        self._heartbeats = Heartbeats(keys, own, settings.silence)

    def run(self, before: GenerationEnd | None) -> bool:
        """Return once the members are fixed, with or without this trainer; False if there will be no generation.

        `before` is the end of the previous generation, if it had ended when this trainer arrived.
        """
        self._keys.announce(self._number, self._own)
        began = time.monotonic()
        has_ended = self._number == 1 or before is not None
        while self._keys.fixed_generation(self._number) is None:
            if not has_ended:
                end = self._keys.end_of(self._number - 1)
                if _ends_training(end):
                    return False
                # If all members are lost, none of them could record the end.
                if end is not None or all(self._heartbeats.is_lost(member) for member in self._before.values()):
                    has_ended, began = True, time.monotonic()
            if has_ended:
                self._try(time.monotonic() - began)
            time.sleep(max(_POLL_SECONDS, _POLL_SECONDS_PER_SLOT * self._settings.slots))
        return True

    def _try(self, waited: float) -> None:
        slots = self._settings.slots
        announced = self._keys.announced(self._number, slots)
        ready = {slot: it for slot, it in announced.items() if not self._heartbeats.is_lost(it)}
        grace = self._settings.grace * (1 if self._before else _PATIENCE)
        if any(self._is_expected(slot, waited < grace) for slot in range(slots) if slot not in ready):
            return
        degrees = self._settings.choose(len(ready))
        if degrees is not None and self._own.slot in ready:
            self._keys.fix_members(Generation(self._number, [ready[slot] for slot in sorted(ready)], degrees))
        elif waited > self._settings.grace * _PATIENCE:
            raise PeerError(
                f"{len(ready)} of {slots} ranks are left, too few for the minimum or the layouts of --elastic, and no "
                f"others have joined in {waited:.0f} s; the newest checkpoint is intact"
            )

    def _is_expected(self, slot: int, within_grace: bool) -> bool:
        """Whether to wait for a trainer that has not arrived."""
        if not self._before:
            return within_grace
        member = self._before.get(slot)
        if member is None:  # it was not in the previous generation either; when it arrives, it asks for another one
            return False
        if not self._heartbeats.is_lost(member):
            return True
        return within_grace and not member.launcher.has_ended(self._own.process)  # which would replace it


def parse_layouts(text: str) -> list[ParallelDegrees]:
    """Parse layouts in order of preference, such as `tp=2,pp=2;tp=2`; omitted degrees are 1.

    Raises:
        ValueError: the text has another form.
    """
    return [ParallelDegrees.parse(part) for part in text.split(";") if part.strip()]


def parse_range(text: str) -> tuple[int, int]:
    """Parse a minimum and a maximum number of ranks, such as `2:8`; `8` means `8:8`.

    Raises:
        ValueError: the text has another form.
    """
    least, colon, most = text.partition(":")
    numbers = [least, most if colon else least]
    if not all(number.isdecimal() for number in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
        raise ValueError(f"{text!r} is not a range of ranks; write MIN:MAX, such as 2:8")
    return int(numbers[0]), int(numbers[1])


def choose_layout(
    layouts: Sequence[ParallelDegrees],
    num_ranks: int,
    *,
    least: int,
    most: int,
    accepts: Callable[[ParallelDegrees], bool],
) -> ParallelDegrees | None:
    """Return the first layout that fits, with as many replicas as possible; None if none fits.

    Args:
        layouts: layouts in order of preference.
        num_ranks: number of available ranks; some may remain unused.
        least: minimum number of ranks in a layout.
        most: maximum number of ranks in a layout.
        accepts: function that returns whether a layout suits the run, such as its global batch.
    """
    for layout in layouts:
        for dp in range(min(num_ranks, most) // layout.model_ranks, 0, -1):
            found = replace(layout, dp=dp)
            if found.world_size >= least and accepts(found):
                return found
    return None
