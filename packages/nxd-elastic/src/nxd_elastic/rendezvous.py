"""How trainers agree on the next generation, through the job's store alone.

A trainer announces itself for the generation after the one that is over. It is made up at once when everybody is there
who was in the one before; those whose host is gone are not waited for, and those whose process is gone for some
seconds, since their supervisors start others. Nobody is left behind who still gives signs of life: it will come, or
kill itself. Whoever finds this first makes up the generation, and all take what was made up first.

A trainer that comes while a generation is at work asks its members to end it between two steps. One that takes the
place of a member knows that this one has ended, and says so.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from nxd_state import ParallelDegrees, PeerError

from nxd_elastic.members import Generation, Member, Over, Rendezvous
from nxd_elastic.watch import Heartbeats

_PAUSE, _PAUSE_PER_SLOT = 0.02, 0.002  # seconds; the more trainers ask the store, the less often each does
_PATIENCE = 10  # times the grace: for the first generation, and for enough ranks


@dataclass(frozen=True)
class Terms:
    """What generations are made up by; the same for all trainers.

    Attributes:
        slots: ranks that the launcher has started.
        grace: seconds to wait for those that a supervisor may replace.
        silence: seconds without a sign of life after which a trainer counts as lost.
        choose: the layout for so many ranks; None where they are too few.
    """

    slots: int
    grace: float
    silence: float
    choose: Callable[[int], ParallelDegrees | None]


def join(rendezvous: Rendezvous, own: Member, terms: Terms, after: int, *, replaces: bool = False) -> Generation | None:
    """Wait for a generation with this trainer in it.

    Args:
        rendezvous: where trainers meet.
        own: this trainer.
        terms: how to agree.
        after: the last generation that it has been in, or 0.
        replaces: whether it takes the place of a trainer of the same start that has died. Only a trainer of another
            start goes on with a training that was stopped.

    Returns:
        The generation; None where there will be no other, since the training has ended.

    Raises:
        PeerError: there are too few ranks, for too long; or a rank has failed by an error of its own.
    """
    number, is_another_start = max(after, rendezvous.latest()), after == 0 and not replaces
    while True:
        closed = rendezvous.closed(number)
        if closed is None and number > 0:  # `latest` is set after a generation is closed
            number -= 1
            continue
        if closed is not None and number > after and own.incarnation in closed.incarnations:
            return closed
        over = None if closed is None else rendezvous.over(number)
        if closed is not None and over is None and number > after:
            over = _ask_to_end(rendezvous, own, closed)
        if _is_the_end(over, but_may_go_on=is_another_start):
            return None
        number += 1
        if not _Attempt(rendezvous, own, terms, number).run(over):
            return None


def _is_the_end(over: Over | None, *, but_may_go_on: bool = False) -> bool:
    """Whether no generation follows one that is over so; raises PeerError where that is by an error of a rank."""
    if over is None or over.ending in ("lost", "change"):
        return False
    if over.ending == "done":
        return True
    if but_may_go_on:
        return False
    if over.ending == "failed":
        raise PeerError(over.reason)
    return True


def _ask_to_end(rendezvous: Rendezvous, own: Member, closed: Generation) -> Over | None:
    """Ask a generation that was made up without this trainer to end; it has, if this one takes a member's place."""
    replaced = [member for member in closed.members if member.slot == own.slot]
    if replaced:
        reason = f"rank {own.slot} of the launch is lost: its process {replaced[0].process.pid} has been replaced"
        return rendezvous.end(closed.number, Over("lost", reason))
    rendezvous.ask_for_change(closed.number)
    return None


class _Attempt:
    """This trainer's part in making up one generation."""

    def __init__(self, rendezvous: Rendezvous, own: Member, terms: Terms, number: int) -> None:
        self._rendezvous, self._own, self._terms, self._number = rendezvous, own, terms, number
        before = rendezvous.closed(number - 1)
        self._before = {} if before is None else {member.slot: member for member in before.members}
        self._heartbeats = Heartbeats(rendezvous, own, terms.silence)

    def run(self, before: Over | None) -> bool:
        """Return once the generation is made up, with this trainer or without; False if there will be none.

        Args:
            before: how the generation before was over when this trainer came.

        Raises:
            PeerError: see `join`.
        """
        self._rendezvous.announce(self._number, self._own)
        began = time.monotonic()
        is_over = self._number == 1 or before is not None
        while self._rendezvous.closed(self._number) is None:
            if not is_over:
                over = self._rendezvous.over(self._number - 1)
                if _is_the_end(over):
                    return False
                if over is not None or all(self._heartbeats.is_lost(member) for member in self._before.values()):
                    is_over, began = True, time.monotonic()  # or all are lost, and nobody could say so
            if is_over:
                self._try(time.monotonic() - began)
            time.sleep(max(_PAUSE, _PAUSE_PER_SLOT * self._terms.slots))
        return True

    def _try(self, waited: float) -> None:
        announced = self._rendezvous.announced(self._number, self._terms.slots)
        ready = {slot: it for slot, it in announced.items() if not self._heartbeats.is_lost(it)}
        grace = self._terms.grace * (1 if self._before else _PATIENCE)
        if any(self._is_expected(slot, waited < grace) for slot in range(self._terms.slots) if slot not in ready):
            return
        degrees = self._terms.choose(len(ready))
        if degrees is not None and self._own.slot in ready:
            self._rendezvous.close(Generation(self._number, [ready[slot] for slot in sorted(ready)], degrees))
        elif waited > self._terms.grace * _PATIENCE:
            raise PeerError(
                f"{len(ready)} of {self._terms.slots} ranks are left, too few for the minimum or the layouts of "
                f"--elastic, and no others have joined in {waited:.0f} s; the newest checkpoint is intact"
            )

    def _is_expected(self, slot: int, within_grace: bool) -> bool:
        """Whether to wait for a trainer that is not there."""
        if not self._before:
            return within_grace
        member = self._before.get(slot)
        if member is None:  # it was not there before either; when it comes, it asks for another generation
            return False
        if not self._heartbeats.is_lost(member):
            return True
        return within_grace and not self._is_abandoned(member)

    def _is_abandoned(self, member: Member) -> bool:
        """Whether nobody is there who could replace it."""
        return member.launcher.has_ended(self._own.process)
