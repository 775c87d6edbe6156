"""Failures on purpose: ranks of a run are killed, stopped and slowed by a seed, and what it cost is measured.

`nxd chaos` is its first user. It acts from outside: nothing of the run knows of it.
"""

from nxd_elastic.chaos.disturb import Disturbance, Kind, Plan, disturb
from nxd_elastic.chaos.follow import FollowedRun
from nxd_elastic.chaos.measures import Measures, measure, render

__all__ = ["FollowedRun", "Plan", "Kind", "Disturbance", "disturb", "Measures", "measure", "render"]
