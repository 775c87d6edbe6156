"""The thread of a trainer that sends heartbeats and checks those of the other members of its generation.

When a member is lost, it interrupts what the main thread waits for: the program then raises, and can continue with the
remaining members. It checks all members on its own host, by their processes, and its neighbor among the others.
"""

import os
import signal
import threading
import time
from collections.abc import Iterable

import torch.distributed as dist
from nxd_state import PeerError, abort_model_parallel

from nxd_elastic.members import Generation, GenerationEnd, GenerationKeys, Member
from nxd_elastic.supervisor import ALIVE, ENDING, SupervisorPipe

_INTERVAL = 0.25  # seconds


class Heartbeats:
    """Tells which processes are still alive, as seen from `own`, by the heartbeats in the store."""

    def __init__(self, keys: GenerationKeys, own: Member, silence: float) -> None:
        self._keys, self._own, self._silence = keys, own, silence
        self._seen: dict[str, tuple[bytes | None, float]] = {}  # each latest heartbeat, and when it was first seen

    def is_lost(self, member: Member) -> bool:
        """Whether its process has ended, or has been silent for too long since the first call."""
        if member.process.host == self._own.process.host:  # its supervisor kills it if it is silent
            return member.process.has_ended(self._own.process)
        now, beat = time.monotonic(), self._keys.last_beat(member.incarnation)
        last, since = self._seen.get(member.incarnation, (beat, now))
        if beat != last:
            since = now
        self._seen[member.incarnation] = (beat, since)
        return now - since > self._silence


class Watch(threading.Thread):
    """Runs from a trainer's first generation to its end.

    Attributes:
        end_of_generation: why this trainer must leave its generation; None while it need not.
        change_wanted: whether another trainer waits to join the generation.
    """

    def __init__(self, keys: GenerationKeys, own: Member, pipe: SupervisorPipe, *, silence: float) -> None:
        super().__init__(name="nxd elastic watch", daemon=True)
        self.end_of_generation: GenerationEnd | None = None
        self.change_wanted = False
        self._keys, self._own, self._pipe, self._silence = keys, own, pipe, silence
        self._generation: Generation | None = None
        self._watched: list[Member] = []
        self._heartbeats = Heartbeats(keys, own, silence)
        self._lock = threading.Lock()  # held while the generation changes, or its communication is aborted
        self._has_finished, self._must_stop = threading.Event(), threading.Event()
        self._kill_at = float("inf")

    def run(self) -> None:
        """Send and check heartbeats until `stop_thread`."""
        count = 0
        while not self._must_stop.is_set():
            try:
                if not self._has_finished.is_set():
                    self._keys.beat(self._own.incarnation, count)
                    self._look()
            except (dist.DistError, PeerError) as error:
                if self._has_finished.is_set():  # the store ended with the run
                    continue
                prefix = "" if isinstance(error, PeerError) else "the job's store cannot be reached, its host is gone: "
                self._abort(self._generation, GenerationEnd("failed", f"{prefix}{error}"))
                return
            self._pipe.send(ALIVE)
            if time.monotonic() > self._kill_at:  # the main thread is stuck; the supervisor starts another process
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            self._must_stop.wait(_INTERVAL)

    def enter(self, generation: Generation) -> None:
        """Start to watch the members of a generation."""
        with self._lock:
            self.end_of_generation, self.change_wanted, self._kill_at = None, False, float("inf")
            self._generation = generation
            self._watched = list(self._to_watch(generation))
            self._heartbeats = Heartbeats(self._keys, self._own, self._silence)

    def pause(self) -> None:
        """Stop watching: the main thread has left its generation, and cleans up until it calls `settle`."""
        with self._lock:
            self._generation = None
            self._kill_at = min(self._kill_at, time.monotonic() + 3 * self._silence)

    def settle(self) -> None:
        """Lift the deadline: the main thread is ready for another generation."""
        with self._lock:
            self._kill_at = float("inf")

    def find_lost(self, members: Iterable[Member]) -> Member | None:
        """Return the first of these members that is lost; None if none is."""
        return next((member for member in members if self._heartbeats.is_lost(member)), None)

    def finish(self) -> None:
        """Stop watching for good: training has ended, and the process may continue for any time without the others."""
        with self._lock:
            self._generation, self._kill_at = None, float("inf")
            self._has_finished.set()

    def stop_thread(self) -> None:
        """Stop the thread, as the process ends."""
        self._must_stop.set()
        self.join()
        self._pipe.send(ENDING)

    def _look(self) -> None:
        generation = self._generation
        if generation is None or self.end_of_generation is not None:
            return
        end = self._keys.end_of(generation.number)
        if end is None and (lost := self.find_lost(self._watched)) is not None:
            reason = f"rank {lost.slot} of the launch is lost: its process {lost.process.pid} has ended or is silent"
            end = self._keys.end(generation.number, GenerationEnd("lost", reason))
        if end is not None:
            self._abort(generation, end)
        elif not self.change_wanted and self._keys.change_is_wanted(generation.number):
            with self._lock:
                self.change_wanted = generation is self._generation

    def _abort(self, generation: Generation | None, end: GenerationEnd) -> None:
        """Interrupt the main thread's communication, unless it has already left this generation.

        The main thread has three times the allowed silence to leave and clean up; then the process is killed.
        """
        with self._lock:
            if generation is None or generation is not self._generation or self.end_of_generation is not None:
                return
            self.end_of_generation = end
            if end.ending in ("done", "stopped"):  # others have finished before this one, which may take its time
                return
            self._kill_at = time.monotonic() + 3 * self._silence
            if end.ending in ("lost", "failed"):
                abort_model_parallel(end.reason)

    def _to_watch(self, generation: Generation) -> Iterable[Member]:
        others = [member for member in generation.members if member.incarnation != self._own.incarnation]
        yield from (member for member in others if member.process.host == self._own.process.host)
        following = [member for member in others if member.slot > self._own.slot] or others
        yield from following[:1]
