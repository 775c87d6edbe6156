"""What to say where no layout fits: by how much the nearest one misses, and what would help."""

import math

from nxd_trainer.plan.layout import Degrees
from nxd_trainer.plan.planner import Misfit, Plan
from nxd_trainer.plan.units import gib


def describe_misfit(plan: Plan, fixed: Degrees) -> str:
    """For a plan in which nothing fits, a few lines: the layout that misses by least, and ways out."""
    if not plan.misfits:
        reasons = [f"  {rejected.what}: {rejected.reason}" for rejected in plan.rejected]
        return "\n".join(["no layout is possible:", *reasons])
    nearest = min(plan.misfits, key=lambda misfit: misfit.memory.peak)
    missing = nearest.memory.peak - plan.usable_bytes
    lines = [
        f"no layout fits on {plan.job.num_devices} x {plan.job.device.name}. The nearest is {nearest.layout}:",
        f"  it needs {gib(nearest.memory.peak)} of each device, {gib(missing)} more than the {gib(plan.usable_bytes)} "
        "that can be used",
        "What would help:",
        *(f"  - {way}" for way in _ways_out(plan, fixed, nearest)),
    ]
    return "\n".join(lines)


def _ways_out(plan: Plan, fixed: Degrees, nearest: Misfit) -> list[str]:
    memory, layout, ways = nearest.memory, nearest.layout, []
    held = [f"--{name.replace('_', '-')}" for name, value in vars(fixed).items() if value is not None]
    if held:
        ways.append(f"leave {', '.join(held)} open")
    if memory.states > plan.usable_bytes:
        factor = math.ceil(memory.states / plan.usable_bytes)
        ways.append(
            f"more devices: parameters, gradients and optimizer state alone are {gib(memory.states)} on a rank, so at "
            f"least {factor} times as many"
        )
    else:
        ways.append(
            f"more devices, or devices with {gib(memory.peak / plan.usable_bytes * plan.job.device.memory_bytes)}"
        )
    if memory.activations + memory.logits + memory.temporaries > memory.states:
        ways.append(
            f"shorter sequences: activations, logits and temporaries are {gib(memory.peak - memory.states)} for "
            f"sequences of {plan.job.sequence_length} tokens"
        )
    if layout.data_parallel_size > 1 and not layout.zero1:
        ways.append("--zero1 yes: shares the optimizer's state out over the replicas")
    return ways
