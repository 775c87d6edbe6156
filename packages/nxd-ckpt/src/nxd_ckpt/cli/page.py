"""`nxd-ckpt page` writes one HTML file to view in a browser or send: the tree, sizes, histograms and files.

The file is self-contained and has no scripts; all text from the checkpoint is escaped.
"""

import html
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nxd_ckpt.cli.formats import Opened, Place, boxes_to_read, opened
from nxd_ckpt.cli.inspection import as_tree, describe_checkpoint, describe_tensors, is_tensor, shown, sum_up
from nxd_ckpt.cli.report import Report, human_size, progress_bar
from nxd_ckpt.errors import printable
from nxd_ckpt.interop.source import TensorSource, read_box

_BINS = 24
_OPEN_LEVELS = 2

_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: 0 .8rem .1rem 0; text-align: left; vertical-align: top }
details { margin-left: 1.2rem } summary { cursor: pointer } .tensor { margin-left: 2.2rem }
.name { font-family: ui-monospace, monospace } .note { color: #666 } svg { vertical-align: middle; margin-left: .6rem }
rect { fill: #4a7ab5 }
"""


def write_page(place: Place, output: str) -> Report:
    """Write the page of a checkpoint of any format; an existing file is replaced once the page is complete.

    Every element is read once, in parts of 16 MiB; if a format cannot be read in parts, tensors are read whole.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        OSError: the page cannot be written.
    """
    with opened(place) as found:
        tensors = describe_tensors(found)
        with progress_bar("page", sum(entry["bytes"] for entry in tensors.values())) as advance:
            for name, entry in tensors.items():
                entry["values"] = _values(found.source, name, whole=not found.reads_parts)
                advance(name, entry["bytes"])
        text = "".join(_page(place, found, tensors))
    _replace(output, text)
    return Report({"page": output, "num_tensors": len(tensors)}, [f"wrote {output}: {len(tensors)} tensors"])


def _replace(output: str, text: str) -> None:
    folder = os.path.dirname(os.path.abspath(output))
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, suffix=".html", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, output)
        except BaseException:
            os.unlink(file.name)
            raise


def _values(source: TensorSource, name: str, *, whole: bool) -> dict[str, Any]:
    """Return the smallest and largest finite values, a histogram between them, and the non-finite and zero counts."""
    info = source.tensors[name]
    least, largest, odd, zeros = math.inf, -math.inf, 0, 0
    for part in _parts(source, name, whole=whole):
        finite = part[part.isfinite()]
        odd += part.numel() - finite.numel()
        zeros += int((finite == 0).sum())
        if finite.numel():
            least, largest = min(least, float(finite.min())), max(largest, float(finite.max()))
    counts = torch.zeros(_BINS, dtype=torch.int64)
    if least < largest and math.isfinite(largest - least):
        for part in _parts(source, name, whole=whole):
            finite = part[part.isfinite()]
            places = ((finite - least) * (_BINS / (largest - least))).long().clamp(0, _BINS - 1)
            counts += torch.bincount(places, minlength=_BINS)
    any_finite = least <= largest
    return {
        "least": least if any_finite else None,
        "largest": largest if any_finite else None,
        "not_finite": odd,
        "zeros": zeros,
        "histogram": counts.tolist() if int(counts.sum()) else [],
        "of": math.prod(info.global_shape),
    }


def _parts(source: TensorSource, name: str, *, whole: bool) -> Iterator[torch.Tensor]:
    """Yield all elements, flat and as float64; complex elements as their magnitudes."""
    for box in boxes_to_read(source.tensors[name], whole=whole):
        part = read_box(source, name, box)
        yield (part.abs() if part.is_complex() else part).to(torch.float64).reshape(-1)


def _page(place: Place, found: Opened, tensors: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    title = f"{os.path.basename(place.path.rstrip('/')) or place.path}"
    about = {"kind": found.kind, **(describe_checkpoint(found.checkpoint) if found.checkpoint else {})}
    files = about.pop("files", {})
    about["tensors"] = len(tensors)
    about["size"] = human_size(sum(entry["bytes"] for entry in tensors.values()))
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{_escaped(title)}</h1>\n<table>"
    for key, value in about.items():
        yield f"<tr><th>{_escaped(key)}</th><td>{_escaped(shown(value))}</td></tr>\n"
    yield "</table>\n<h2>Tensors</h2>\n"
    yield from _tree(as_tree(tensors), level=0)
    if found.checkpoint is not None:
        yield "<h2>Files</h2>\n<table><tr><th>file</th><th>size</th><th>stored in</th></tr>\n"
        for file, size in files.items():
            lies_with = found.checkpoint.manifest.references.get(file, found.checkpoint.tag)
            yield f'<tr><td class="name">{_escaped(file)}</td><td>{human_size(size)}</td>'
            yield f"<td>{_escaped(lies_with)}</td></tr>\n"
        yield "</table>\n"
    yield "</body></html>\n"


def _tree(node: Mapping[str, Any], *, level: int) -> Iterator[str]:
    for name, child in node.items():
        label = _escaped(name)
        if is_tensor(child):
            yield f'<div class="tensor"><span class="name">{label}</span> {_tensor(child)}</div>\n'
            continue
        count, size = sum_up(child)
        yield f'<details{" open" if level < _OPEN_LEVELS else ""}><summary><span class="name">{label}</span> '
        yield f'<span class="note">{count} tensors, {human_size(size)}</span></summary>\n'
        yield from _tree(child, level=level + 1)
        yield "</details>\n"


def _tensor(entry: Mapping[str, Any]) -> str:
    values = entry["values"]
    parts = [f"{entry['dtype']} {entry['shape']}, {human_size(entry['bytes'])}"]
    if "written_by" in entry:
        parts.append(f"rank {', '.join(map(str, entry['written_by']))}" if entry["written_by"] else "no data")
    if values["least"] is not None:
        parts.append(f"{values['least']:.4g} to {values['largest']:.4g}")
    parts += [
        f"{values[key]} {word}" for key, word in (("zeros", "zeros"), ("not_finite", "not finite")) if values[key]
    ]
    return f'<span class="note">{_escaped("; ".join(parts))}</span>{_histogram(values["histogram"])}'


def _histogram(counts: list[int]) -> str:
    if not counts:
        return ""
    bars = "".join(
        f'<rect x="{4 * number}" y="{20 - height}" width="3" height="{height}"/>'
        for number, count in enumerate(counts)
        if (height := math.ceil(20 * count / max(counts)))
    )
    return f'<svg width="{4 * len(counts)}" height="20">{bars}</svg>'


def _escaped(text: object) -> str:
    return html.escape(printable(str(text)))
