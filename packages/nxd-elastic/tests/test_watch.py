"""What the watch of a trainer finds is about the generation that it has looked at."""

import os
import sys
import threading

import pytest
from nxd_elastic.members import Generation, GenerationEnd, Member
from nxd_elastic.watch import Watch
from nxd_state import ParallelDegrees
from nxd_state.processes import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class NextGenerationBegins:
    """Keys in which the first generation is over, and a trainer that has gone on while its watch reads that."""

    def __init__(self, following):
        self._following = following
        self.watch = None
        self.has_looked_at_following = threading.Event()

    def beat(self, incarnation, count):
        pass

    def end_of(self, number):
        if number == self._following.number:
            return None
        self.watch.pause()
        self.watch.settle()
        self.watch.enter(self._following)
        return GenerationEnd("lost", "a rank of the first generation is lost")

    def change_is_wanted(self, number):
        self.has_looked_at_following.set()
        return False


class Supervisor:
    def send(self, message):
        pass


class EndsAt:
    """Keys in which the generation is over after some looks."""

    def __init__(self, ending, looks):
        self._over, self._looks = GenerationEnd(ending, "the training has ended"), looks
        self.has_been_looked_at_long_after = threading.Event()

    def beat(self, incarnation, count):
        if count > self._looks + 6:
            self.has_been_looked_at_long_after.set()

    def end_of(self, number):
        self._looks -= 1
        return self._over if self._looks < 0 else None

    def change_is_wanted(self, number):
        return False


def test_trainer_that_works_on_after_the_others_are_done_is_not_killed(deadline):
    process = Process.of(os.getpid())
    own = Member(0, "0-own", process, process)
    keys = EndsAt("done", looks=2)
    watch = Watch(keys, own, Supervisor(), silence=0.1)  # three times that is less than the looks take
    watch.enter(Generation(1, [own], ParallelDegrees(dp=1)))

    watch.start()
    assert keys.has_been_looked_at_long_after.wait(deadline(60))  # this process would have been killed
    watch.finish()
    watch.stop_thread()

    assert watch.end_of_generation.ending == "done"


def test_end_of_a_generation_that_the_trainer_has_left_meanwhile_does_not_end_the_next(deadline):
    process = Process.of(os.getpid())
    own = Member(0, "0-own", process, process)
    first, second = (Generation(number, [own], ParallelDegrees(dp=1)) for number in (1, 2))
    keys = NextGenerationBegins(second)
    keys.watch = Watch(keys, own, Supervisor(), silence=deadline(30))
    keys.watch.enter(first)

    keys.watch.start()
    assert keys.has_looked_at_following.wait(deadline(30))
    keys.watch.stop_thread()

    assert keys.watch.end_of_generation is None
