"""Injected failures: kills, stops and slows ranks of a run, chosen by a seed, and measures the cost.

`nxd chaos` is its first user. It acts from outside: the run does not know about it.
"""

from nxd_elastic.chaos.disturb import Disturbance, Kind, Plan, disturb
from nxd_elastic.chaos.follow import FollowedRun
from nxd_elastic.chaos.measures import Measures, measure, render

__all__ = ["FollowedRun", "Plan", "Kind", "Disturbance", "disturb", "Measures", "measure", "render"]
