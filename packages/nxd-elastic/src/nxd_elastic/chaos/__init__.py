"""Injected failures: kills, stops and slows ranks of a run, chosen by a seed, and measures the cost.

`nxd chaos` is its first user. It acts from outside: the run does not know about it.
"""

from nxd_elastic.chaos.disturb import Disturbance, DisturbancePlan, Kind, Measures, disturb, measure, render
from nxd_elastic.chaos.follow import FollowedRun

__all__ = ["FollowedRun", "DisturbancePlan", "Kind", "Disturbance", "disturb", "Measures", "measure", "render"]
