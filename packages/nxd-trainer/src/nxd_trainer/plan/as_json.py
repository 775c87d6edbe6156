"""A plan for other programs: JSON with what the table shows, and all that is behind it."""

import json
from dataclasses import asdict
from typing import Any

from nxd_trainer.plan.memory import RankMemory
from nxd_trainer.plan.planner import Plan, PlannedLayout


def plan_as_json(plan: Plan) -> str:
    """The quickest layouts, the quickest first, and why the others are not among them.

    Memory and messages are in bytes, `memory` of each pipeline rank; times are in seconds.
    """
    job = plan.job
    content = {
        "device": job.device.name,
        "num_devices": job.num_devices,
        "sequence_length": job.sequence_length,
        "global_batch_size": job.global_batch_size,
        "dtype": job.dtype_name,
        "schedule": job.schedule,
        "usable_bytes": int(plan.usable_bytes),
        "num_fitting": plan.num_fitting,
        "best": [_planned(it) for it in plan.best],
        "too_large": [{"layout": asdict(it.layout), "memory": _memory(it.memory)} for it in plan.misfits],
        "not_possible": [asdict(it) for it in plan.rejected],
    }
    return json.dumps(content, indent=2)


def _planned(planned: PlannedLayout) -> dict[str, Any]:
    return {
        "layout": asdict(planned.layout),
        "memory": [_memory(memory) for memory in planned.memories],
        "sent_bytes": asdict(planned.communication),
        "time": {"step": planned.time.seconds, **asdict(planned.time)},
    }


def _memory(memory: RankMemory) -> dict[str, int]:
    return asdict(memory)
