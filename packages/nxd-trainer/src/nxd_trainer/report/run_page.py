"""The report of a run: one HTML file with its curves, timeline, checkpoints and recipe, which loads nothing else.

It is made from the run's folder alone, so also while the run continues or after it has failed. All text from the
folder is escaped; the only script zooms the timeline.
"""

import os
import time
import tomllib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from nxd_ckpt import CheckpointError, CheckpointInfo, list_checkpoints
from nxd_pipeline.timeline import bubble_report, read_trace

from nxd_trainer.report.charts import line_chart, timeline_chart
from nxd_trainer.report.metrics import METRICS_FILE, StepRecord, read_records
from nxd_trainer.report.progress import render_summary

REPORT_FILE = "report.html"
RECIPE_FILE = "recipe.toml"
MIB = 2**20

_STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1020px;
padding: 0 1rem } h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem } pre { overflow-x: auto }
figure { display: inline-block; margin: 0 .5rem 1rem 0; width: 480px; max-width: 100% } figcaption { font-weight: 600 }
figcaption span { font-weight: 400; margin-left: .6rem } svg text { font-size: 11px; fill: currentColor }
svg .grid { stroke: currentColor; stroke-opacity: .15 } svg.timeline { width: 100% } table { border-collapse: collapse }
td, th { padding: .1rem 1rem .1rem 0; text-align: left; vertical-align: top } .zoom { overflow: hidden; cursor: grab }
td.load { text-align: right; font-variant-numeric: tabular-nums }
"""
_ZOOM = """
for (const svg of document.querySelectorAll("svg.timeline")) {
  const view = svg.viewBox.baseVal, whole = { x: view.x, width: view.width };
  svg.addEventListener("wheel", event => {
    event.preventDefault();
    const at = view.x + event.offsetX / svg.clientWidth * view.width;
    const width = Math.min(whole.width, view.width * (event.deltaY > 0 ? 1.25 : 0.8));
    view.x = Math.max(whole.x, Math.min(at - (at - view.x) * width / view.width, whole.x + whole.width - width));
    view.width = width;
  }, { passive: false });
  svg.addEventListener("pointermove", event => {
    if (event.buttons) {
      const x = view.x - event.movementX / svg.clientWidth * view.width;
      view.x = Math.max(whole.x, Math.min(x, whole.x + whole.width - view.width));
    }
  });
}
"""


def write_run_page(folder: Path) -> Path:
    """Write the report of a run into its folder and return its path; an existing one is replaced.

    Args:
        folder: the `output` of the run.

    Raises:
        ValueError: the folder has no metrics.jsonl, or one that is not a run's.
        OSError: the file cannot be written.
    """
    page = folder / REPORT_FILE
    unfinished = page.with_name(f".{page.name}.unfinished")
    unfinished.write_text(render_run_page(folder), encoding="utf-8")
    os.replace(unfinished, page)
    return page


def records_of_run(folder: Path) -> list[StepRecord]:
    """Return the logged steps of a run; raises a ValueError if the folder is not one of a run."""
    file = folder / METRICS_FILE
    if not file.is_file():
        raise ValueError(f"{folder} has no {METRICS_FILE}; pass the output folder of a run of nxd train")
    return read_records(file)


def render_run_page(folder: Path) -> str:
    """Return the report of the run in `folder` as HTML."""
    records = records_of_run(folder)
    recipe_text = _text_of(folder / RECIPE_FILE)
    recipe = tomllib.loads(recipe_text)
    name = escape(folder.resolve().name)
    sections = [
        ("Summary", f"<pre>{escape(render_summary(records, {}))}</pre>"),
        ("Curves", _curves(records)),
        ("Experts", _experts(records)),
        ("Pipeline", _timeline(recipe.get("pipeline", {}).get("trace_file"))),
        ("Slow ranks", _stragglers(records)),
        ("Checkpoints", _checkpoints(_checkpoint_folder(folder, recipe))),
        ("Starts and resumes", _invocations(records)),
        ("Continue", _next_commands(folder, recipe)),
        ("Recipe", f"<pre>{escape(recipe_text)}</pre>" if recipe_text else ""),
    ]
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in sections if content)
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
        f"</head><body><h1>Run {name}</h1><p>Written at {written}.</p>{body}<script>{_ZOOM}</script></body></html>"
    )


def _curves(records: Sequence[StepRecord]) -> str:
    def points(field: str, unit: float = 1.0) -> list[tuple[float, float]]:
        return [(it.step, getattr(it, field) / unit) for it in records if getattr(it, field) is not None]

    losses = {"training": points("loss"), "held-out": points("held_out_loss")}
    routers = {"load balance": points("aux_loss"), "z-loss": points("z_loss")}
    return "".join(
        [
            line_chart("Loss", losses),
            line_chart("Throughput, tokens/s", {"tokens/s": points("tokens_per_second")}),
            line_chart("Gradient norm before clipping", {"gradient norm": points("grad_norm")}, log_scale=True),
            line_chart("Learning rate", {"learning rate": points("learning_rate")}),
            line_chart("Peak memory, MiB", {"memory": points("peak_memory_bytes", MIB)}),
            line_chart("Router losses", routers),
            line_chart("Loss scale", {"loss scale": points("loss_scale")}, log_scale=True),
        ]
    )


def _experts(records: Sequence[StepRecord]) -> str:
    """Return the tokens of each expert in the last step that counted them, darker for more."""
    counted = [it for it in records if it.tokens_per_expert]
    if not counted:
        return ""
    last = counted[-1]
    rows = []
    for layer, loads in enumerate(last.tokens_per_expert or ()):
        most = max(loads) or 1
        cells = "".join(
            f'<td class="load" style="background:rgb(63 111 181 / {load / most * 0.6:.2f})">{load:,}</td>'
            for load in loads
        )
        rows.append(f"<tr><th>layer {layer}</th>{cells}</tr>")
    busiest = [(it.step, it.busiest_expert) for it in counted if it.busiest_expert is not None]
    chart = line_chart("Load of the busiest expert over the mean", {"busiest expert": busiest})
    return f"{chart}<p>Tokens per expert in step {last.step}:</p><table>{''.join(rows)}</table>"


def _timeline(file: str | None) -> str:
    if file is None or not Path(file).is_file():
        return ""
    step = read_trace(file)[-1]
    idle = escape(bubble_report(step.timelines[0]).headline)
    return (
        f'<p>Step {step.number} of the trace: {idle}. Turn the wheel to zoom, drag to move.</p><div class="zoom">'
        f"{timeline_chart(step)}</div>"
    )


def _stragglers(records: Sequence[StepRecord]) -> str:
    slow = [it for it in records if it.straggler is not None]
    if not slow:
        return ""
    last = slow[-1]
    return (
        f"<p>{len(slow)} of {len(records)} logged steps have a slow rank; the last, in step {last.step}: "
        f"{escape(str(last.straggler))} computes {last.slowdown:.1f} times as long as the median.</p>"
    )


def _checkpoint_folder(folder: Path, recipe: dict[str, Any]) -> Path:
    return Path(recipe.get("checkpoint", {}).get("folder") or folder / "checkpoints")


def _checkpoints(folder: Path) -> str:
    try:
        found = list_checkpoints(folder)
    except (CheckpointError, OSError) as error:
        return f"<p>{escape(str(error))}</p>"
    rows = "".join(_checkpoint_row(it) for it in found)
    return (
        f"<p>In {escape(str(folder))}:</p><table><tr><th>checkpoint</th><th>saved</th><th>ranks</th><th>size</th>"
        f"<th>metrics</th></tr>{rows}</table>"
        if found
        else "<p>There is no complete checkpoint.</p>"
    )


def _checkpoint_row(info: CheckpointInfo) -> str:
    saved = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.committed_at))
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in info.metrics.items())
    cells = (
        info.tag + (" (pinned)" if info.pinned else ""),
        saved,
        f"{info.world_size}",
        f"{info.num_bytes / MIB:,.1f} MiB",
        metrics,
    )
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _invocations(records: Sequence[StepRecord]) -> str:
    starts = [it for it in records if it.layout is not None]
    rows = "".join(
        f"<tr><td>{'the beginning' if it.resumed_from is None else f'step {it.resumed_from}'}</td>"
        f"<td>{escape(str(it.layout))}</td></tr>"
        for it in starts
    )
    return f"<table><tr><th>from</th><th>layout</th></tr>{rows}</table>" if starts else ""


def _next_commands(folder: Path, recipe: dict[str, Any]) -> str:
    checkpoints = _checkpoint_folder(folder, recipe)
    recipe_file = folder / RECIPE_FILE
    commands = [
        ("continue for more steps", f"nxd train {recipe_file} train.steps=N"),
        ("generate text", f"nxd generate {checkpoints} --prompt TEXT"),
        ("answer requests", f"nxd serve {checkpoints}"),
        ("write a Hugging Face folder", f"nxd export {checkpoints} exported"),
    ]
    rows = "".join(f"<tr><td>{what}</td><td><code>{escape(command)}</code></td></tr>" for what, command in commands)
    return f"<table>{rows}</table>"


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
