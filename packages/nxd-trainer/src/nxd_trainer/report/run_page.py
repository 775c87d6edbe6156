"""The report of a run: one HTML file with its curves, timeline, checkpoints and recipe, which loads nothing else.

It is made from the run's folder alone, so also while the run continues or after it has failed. All text from the
folder is escaped; the only script zooms the timeline.
"""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from nxd_ckpt import CheckpointError, CheckpointInfo, list_checkpoints
from nxd_cli.overview import ranks_of_last_start
from nxd_pipeline.timeline import bubble_report, read_trace
from nxd_state import is_cpu

from nxd_trainer.recipe import RUN_RECIPE_FILE, Recipe, read_run_recipe
from nxd_trainer.report import run_sections
from nxd_trainer.report.charts import line_chart, smoothed, timeline_chart
from nxd_trainer.report.metrics import StepRecord, read_run
from nxd_trainer.report.progress import summary_rows
from nxd_trainer.report.run_log import describe_status, read_events
from nxd_trainer.report.run_sections import table

REPORT_FILE = "report.html"
MIB = 2**20
WORTH_SMOOTHING = 60  # points of a loss curve

_STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1020px;
padding: 0 1rem } h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem } pre { overflow-x: auto }
figure { display: inline-block; margin: 0 .5rem 1rem 0; width: 480px; max-width: 100% } figcaption { font-weight: 600 }
figcaption .key { margin-left: .4rem }
.key { font-weight: 400; border-left: .8rem solid; padding-left: .35rem; margin-right: .8rem; white-space: nowrap }
svg text { font-size: 11px; fill: currentColor } svg .grid { stroke: currentColor; stroke-opacity: .15 }
svg .mark { stroke: currentColor; stroke-opacity: .5; stroke-dasharray: 4 3 } polyline { stroke-width: 1.5 }
table { border-collapse: collapse } .wide { overflow-x: auto } td { overflow-wrap: break-word }
td, th { padding: .1rem 1rem .1rem 0; text-align: left; vertical-align: top } th, td.number { white-space: nowrap }
@media (max-width: 600px) { th { white-space: normal } td, th { padding-right: .6rem } }
td.load, td.number { font-variant-numeric: tabular-nums } td.load { text-align: right; padding: .1rem .5rem }
.lanes { display: flex; gap: .6rem; line-height: 26px; font-size: 13px; white-space: nowrap }
svg.timeline { flex: 1; min-width: 0; cursor: grab; touch-action: pan-y }
.bar { display: flex; height: 1.6rem; border-radius: 3px; overflow: hidden } .bar span { min-width: 1px }
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


def render_run_page(folder: Path) -> str:
    """Return the report of the run in `folder` as HTML."""
    records, events = read_run(folder), read_events(folder)
    recipe, recipe_text = _recipe(folder)
    name = escape(folder.resolve().name)
    status, _ = describe_status(events)
    sections: list[tuple[str, Callable[[], str]]] = [
        ("Summary", lambda: table((), summary_rows(records))),
        ("Curves", lambda: _curves(records)),
        ("Experts", lambda: _experts(records)),
        ("Pipeline", lambda: _timeline(recipe.pipeline.trace_file)),
        ("Memory", lambda: run_sections.memory_section(events)),
        ("Messages by axis", lambda: run_sections.messages_section(events)),
        ("Slow ranks", lambda: _stragglers(records)),
        ("Data", lambda: run_sections.data_section(events, records)),
        ("Warnings", lambda: run_sections.warnings_section(events)),
        ("Checkpoints", lambda: _checkpoints(recipe.checkpoint_folder)),
        ("Starts and ends", lambda: run_sections.starts_section(events, records)),
        ("Continue", lambda: _next_commands(recipe)),
        ("Environment", lambda: run_sections.environment_section(events)),
        ("Recipe", lambda: f"<pre>{escape(recipe_text)}</pre>" if recipe_text else ""),
    ]
    written = [(title, _section(content)) for title, content in sections]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in written if content)
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{_STYLE}</style></head><body><h1>Run {name}</h1>"
        f"<p>{escape(status[:1].upper() + status[1:])}. Report of {at}.</p>{body}<script>{_ZOOM}</script></body></html>"
    )


def _section(content: Callable[[], str]) -> str:
    """Return a section; one whose file has been damaged or is not ours says so, and the others are shown."""
    try:
        return content()
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        return f"<p>This part cannot be shown: {escape(f'{type(error).__name__}: {error}')}</p>"


def _recipe(folder: Path) -> tuple[Recipe, str]:
    """Return the recipe of a run and its text; the defaults and no text, or the mistakes, if it cannot be read."""
    file = folder / RUN_RECIPE_FILE
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    try:
        return read_run_recipe(folder), text
    except (ValueError, OSError) as error:
        return Recipe(output=folder), f"{error}\n\n{text}" if text else ""


def _curves(records: Sequence[StepRecord]) -> str:
    def points(field: str, unit: float = 1.0) -> list[tuple[float, float]]:
        return [(it.step, getattr(it, field) / unit) for it in records if getattr(it, field) is not None]

    resumed = [it.resumed_from for it in records if it.resumed_from is not None]
    losses = {"training": points("loss"), "held-out": points("held_out_loss")}
    if len(losses["training"]) >= WORTH_SMOOTHING:
        losses["training, smoothed"] = list(smoothed(losses["training"]))
    routers = {"load balance": points("aux_loss"), "z-loss": points("z_loss")}
    charts = [
        line_chart("Loss", losses, faint=["training"] if len(losses) > 2 else [], marks=resumed),
        line_chart("Throughput, tokens/s", {"tokens/s": points("tokens_per_second")}, marks=resumed),
        line_chart("Gradient norm before clipping", {"gradient norm": points("grad_norm")}, log_scale=True),
        line_chart("Learning rate", {"learning rate": points("learning_rate")}),
        line_chart("Peak memory, MiB", {"memory": points("peak_memory_bytes", MIB)}),
        line_chart("Router losses", routers),
        line_chart("Loss scale", {"loss scale": points("loss_scale")}, log_scale=True),
    ]
    return "".join(charts)


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
    extremes = {
        "busiest": [(it.step, it.busiest_expert) for it in counted if it.busiest_expert is not None],
        "idlest": [(it.step, it.idlest_expert) for it in counted if it.idlest_expert is not None],
    }
    chart = line_chart("Load of experts, relative to their layer's mean", extremes)
    return f'{chart}<p>Tokens per expert in step {last.step}:</p><div class="wide"><table>{"".join(rows)}</table></div>'


def _timeline(file: Path | None) -> str:
    if file is None or not file.is_file():
        return ""
    step = read_trace(file)[-1]
    idle = escape(bubble_report(step.timelines[0]).headline)
    return (
        f"<p>Step {step.number} of the trace: {idle}. Turn the wheel to zoom, drag to move.</p>{timeline_chart(step)}"
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


def _checkpoints(folder: Path) -> str:
    try:
        found = list_checkpoints(folder)
    except (CheckpointError, OSError) as error:
        return f"<p>{escape(str(error))}</p>"
    if not found:
        return "<p>There is no complete checkpoint.</p>"
    head = ("checkpoint", "saved", "ranks", "size", "metrics")
    return f"<p>In {escape(str(folder))}:</p>{table(head, map(_checkpoint_row, found))}"


def _checkpoint_row(info: CheckpointInfo) -> tuple[str, ...]:
    return (
        info.tag + (" (pinned)" if info.pinned else ""),
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.committed_at)),
        f"{info.world_size}",
        f"{info.num_bytes / MIB:,.1f} MiB",
        ", ".join(f"{name} {value:.4g}" for name, value in info.metrics.items()),
    )


def next_commands(recipe: Recipe) -> list[tuple[str, str]]:
    """Return what can be done with a run that has ended, and the command for each."""
    chat = " --chat" if recipe.data.chat else ""
    checkpoints, recipe_file = (
        shlex.quote(str(path)) for path in (recipe.checkpoint_folder, recipe.output / RUN_RECIPE_FILE)
    )
    least = recipe.parallel.degrees.least_ranks
    ranks = ranks_of_last_start(recipe.output) or (f" --nproc {least}" if least > 1 else "")
    soonest = " --compiler export" if is_cpu() else ""  # inductor compiles for minutes before the first answer
    return [
        ("continue for longer", f"nxd train {recipe_file}{ranks} {recipe.last_step_key}=N"),
        ("generate text", f"nxd generate {checkpoints}{chat} --prompt TEXT"),
        ("answer requests", f"nxd serve {checkpoints}{soonest}"),
        ("write a Hugging Face folder", f"nxd export {checkpoints} exported"),
    ]


def _next_commands(recipe: Recipe) -> str:
    rows = "".join(
        f"<tr><td>{what}</td><td><code>{escape(command)}</code></td></tr>" for what, command in next_commands(recipe)
    )
    return f'<div class="wide"><table>{rows}</table></div>'
