"""What the device's compiler gets from a training step: recorded in processes of their own, counted, shown.

`record` starts what is looked at, `analysis` counts, `render` shows. The counting itself is nxd_state.xla_inspect.
"""

from nxd_trainer.doctor.graph.analysis import GraphReport, analyse
from nxd_trainer.doctor.graph.record import RecordedRank, record_recipe, record_script
from nxd_trainer.doctor.graph.render import render_report

__all__ = ["record_recipe", "record_script", "RecordedRank", "analyse", "GraphReport", "render_report"]
