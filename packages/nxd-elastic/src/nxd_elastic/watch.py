"""The thread of a trainer that gives signs of life, and sees whether the other members of its generation do.

What it finds breaks what the main thread waits for: the program then raises, and can continue with those that are left.
It looks at all members of its own machine, whose processes it can ask for, and at its neighbor among the others.
"""

import os
import signal
import threading
import time
from collections.abc import Iterable

import torch.distributed as dist
from nxd_state import PeerError, abort_model_parallel

from nxd_elastic.members import Generation, Member, Over, Rendezvous
from nxd_elastic.supervisor import ALIVE, ENDING, SupervisorPipe

_INTERVAL = 0.25  # seconds


class Heartbeats:
    """Which processes still give signs of life, as seen from here.

    Args:
        rendezvous: where they are given.
        own: the process that looks.
        silence: seconds without one after which a process counts as lost.
    """

    def __init__(self, rendezvous: Rendezvous, own: Member, silence: float) -> None:
        self._rendezvous, self._own, self._silence = rendezvous, own, silence
        self._seen: dict[str, tuple[bytes | None, float]] = {}  # the newest sign of each, and since when it is that

    def is_lost(self, member: Member) -> bool:
        """Whether its process has ended, or has been silent for too long since this was first asked."""
        if member.process.host == self._own.process.host:  # its supervisor kills it if it is silent
            return member.process.has_ended(self._own.process)
        now, beat = time.monotonic(), self._rendezvous.last_beat(member.incarnation)
        last, since = self._seen.get(member.incarnation, (beat, now))
        if beat != last:
            since = now
        self._seen[member.incarnation] = (beat, since)
        return now - since > self._silence


class Watch(threading.Thread):
    """Runs from a trainer's first generation to its end.

    Attributes:
        over: why this trainer's generation must be left; None while it need not.
        change_wanted: whether another trainer waits to join it.
    """

    def __init__(self, rendezvous: Rendezvous, own: Member, pipe: SupervisorPipe, *, silence: float) -> None:
        super().__init__(name="nxd elastic watch", daemon=True)
        self.over: Over | None = None
        self.change_wanted = False
        self._rendezvous, self._own, self._pipe, self._silence = rendezvous, own, pipe, silence
        self._generation: Generation | None = None
        self._watched: list[Member] = []
        self._heartbeats = Heartbeats(rendezvous, own, silence)
        self._lock = threading.Lock()  # held while the generation changes, or its communication is broken
        self._has_left, self._ended = threading.Event(), threading.Event()
        self._kill_at = float("inf")

    def run(self) -> None:
        """Beat and look, until `end`."""
        count = 0
        while not self._ended.is_set():
            try:
                if not self._has_left.is_set():
                    self._rendezvous.beat(self._own.incarnation, count)
                    self._look()
            except (dist.DistError, PeerError) as error:
                if self._has_left.is_set():  # the store ended with the run
                    continue
                is_gone = (
                    "" if isinstance(error, PeerError) else "the job's store cannot be reached, its host is gone: "
                )
                self._leave(self._generation, Over("failed", f"{is_gone}{error}"))
                return
            self._pipe.say(ALIVE)
            if time.monotonic() > self._kill_at:  # the main thread is stuck; the supervisor starts another process
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            self._ended.wait(_INTERVAL)

    def enter(self, generation: Generation) -> None:
        """Begin to look after the members of a generation."""
        with self._lock:
            self.over, self.change_wanted, self._kill_at = None, False, float("inf")
            self._generation = generation
            self._watched = list(self._to_watch(generation))
            self._heartbeats = Heartbeats(self._rendezvous, self._own, self._silence)

    def exit(self) -> None:
        """The main thread has left its generation, and begins to clear up; then comes `settle`."""
        with self._lock:
            self._generation = None
            self._kill_at = min(self._kill_at, time.monotonic() + 3 * self._silence)

    def settle(self) -> None:
        """The main thread is ready for another generation."""
        with self._lock:
            self._kill_at = float("inf")

    def find_lost(self, members: Iterable[Member]) -> Member | None:
        """The first of them whose process is known to have ended."""
        return next((member for member in members if self._heartbeats.is_lost(member)), None)

    def leave(self) -> None:
        """The process has trained: it has nothing to do with the others any more, and may work on for any time."""
        with self._lock:
            self._generation, self._kill_at = None, float("inf")
            self._has_left.set()

    def end(self) -> None:
        """End the thread: the process ends."""
        self._ended.set()
        self.join()
        self._pipe.say(ENDING)

    def _look(self) -> None:
        generation = self._generation
        if generation is None or self.over is not None:
            return
        over = self._rendezvous.over(generation.number)
        if over is None and (lost := self.find_lost(self._watched)) is not None:
            reason = f"rank {lost.slot} of the launch is lost: its process {lost.process.pid} has ended or is silent"
            over = self._rendezvous.end(generation.number, Over("lost", reason))
        if over is not None:
            self._leave(generation, over)
        elif not self.change_wanted and self._rendezvous.change_is_wanted(generation.number):
            with self._lock:
                self.change_wanted = generation is self._generation

    def _leave(self, generation: Generation | None, over: Over) -> None:
        """A generation is over: break what the main thread waits for, or will; nothing if that has left it meanwhile.

        It has three times as long to leave and to clear up as a process may be silent, and is killed after that.
        """
        with self._lock:
            if generation is None or generation is not self._generation or self.over is not None:
                return
            self.over = over
            if over.ending in ("done", "stopped"):  # others have left before this one: it may take its time
                return
            self._kill_at = time.monotonic() + 3 * self._silence
            if over.ending in ("lost", "failed"):
                abort_model_parallel(over.reason)

    def _to_watch(self, generation: Generation) -> Iterable[Member]:
        others = [member for member in generation.members if member.incarnation != self._own.incarnation]
        yield from (member for member in others if member.process.host == self._own.process.host)
        following = [member for member in others if member.slot > self._own.slot] or others
        yield from following[:1]
