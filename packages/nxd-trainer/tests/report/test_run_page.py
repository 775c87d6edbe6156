import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from nxd_ckpt import pin, save
from nxd_cli.dispatch import main
from nxd_trainer.report import MetricsLog, RunLog
from nxd_trainer.report.run_page import render_run_page, write_run_page


def write_run(folder, records, recipe='output = "run"\n'):
    with MetricsLog(folder, layout="TP 2 x DP 2") as metrics:
        for record in records:
            metrics.log(record)
    (folder / "recipe.toml").write_text(recipe)


class Links(HTMLParser):
    """Collects what a page would load."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    def handle_starttag(self, tag, attributes):
        self.loaded += [value for name, value in attributes if name in ("src", "href")]


def test_page_has_curves_starts_and_recipe_and_loads_nothing(tmp_path, record):
    write_run(tmp_path / "run", [replace(record(step), held_out_loss=2.5 if step == 3 else None) for step in (1, 2, 3)])

    page = write_run_page(tmp_path / "run")

    text, links = page.read_text(), Links()
    links.feed(text)
    assert page.name == "report.html"
    assert links.loaded == []
    assert "held-out, step 3: 2.5" in text
    assert "TP 2 x DP 2" in text
    assert "There is no complete checkpoint." in text
    for chart in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(chart)


@pytest.mark.parametrize(
    ("launcher", "recipe", "train", "generate"),
    [
        ("nxd --nproc", "", "recipe.toml --nproc 2 train.steps=N", "checkpoints --prompt"),
        ("torchrun", "[train]\nstop_after = 2\n", "recipe.toml train.stop_after=N", "checkpoints --prompt"),
        (
            "torchrun",
            "[parallel]\ntensor_parallel_size = 4\n",
            "recipe.toml --nproc 4 train.steps=N",
            "checkpoints --prompt",
        ),
        (
            "none",
            '[data]\nchat = true\npath = "c.jsonl"\ntokenizer = "t"\n',
            "recipe.toml train.steps=N",
            "checkpoints --chat --prompt",
        ),
    ],
)
def test_commands_to_continue_fit_the_run(tmp_path, record, launcher, recipe, train, generate):
    write_run(tmp_path, [record(1)], recipe=f'output = "run"\n{recipe}')
    with RunLog(tmp_path, 0) as log:
        log.write("start", environment={"ranks": 2, "launcher": launcher})

    text = render_run_page(tmp_path)

    assert f"/{train}<" in text
    assert f"/{generate} TEXT<" in text


def test_checkpoints_without_metrics_have_no_column_for_them(tmp_path, record):
    write_run(tmp_path, [record(1)])
    save(tmp_path / "checkpoints", "step-1", {"weight": torch.ones(2)})
    pin(tmp_path / "checkpoints", "step-1")

    text = render_run_page(tmp_path)

    assert "step-1 (pinned)" in text
    assert "<th>size</th>" in text
    assert "<th>metrics</th>" not in text


def test_text_of_the_folder_is_escaped(tmp_path, record):
    write_run(tmp_path, [record(1)], recipe='output = "<script>alert(1)</script>"\n')

    assert "<script>alert" not in render_run_page(tmp_path)


def test_loads_of_experts_are_a_table_of_the_last_step(tmp_path, record):
    write_run(tmp_path, [replace(record(1), tokens_per_expert=[[10, 30], [20, 20]])])

    text = render_run_page(tmp_path)

    assert "Tokens per expert in step 1" in text
    assert text.count('class="load"') == 4


START = {
    "step": 0,
    "environment": {"host": "<b>vm</b>", "python": "3.11", "nxd-ckpt": "0.1.0", "nxd-state": "0.1.0"},
    "data": {
        "sources": [{"name": "chats", "kind": "conversations", "documents": 900, "tokens": 123_456}],
        "sequence_length": 64,
        "global_batch_size": 16,
        "held_out_samples": 42,
        "packed": "several conversations a sequence",
        "notes": ["3 conversations are <cut> off"],
        "samples": 160,
        "counted_samples": 100,
        "masked": 0.25,
        "padding": 0.125,
        "truncated": 12_345,
    },
}
MEMORY = {
    "step": 2,
    "fullest_rank": 1,
    "bytes": {"parameters": 1 << 30, "gradients": 1 << 29, "peak": 1 << 31},
    "least": {"parameters": 1 << 29, "gradients": 0, "peak": 1 << 30},
    "most": {"parameters": 1 << 30, "gradients": 1 << 29, "peak": 1 << 31},
    "peak_is_of_process": False,
}


def test_page_has_what_the_log_of_the_run_says(tmp_path, record):
    write_run(tmp_path, [record(step) for step in range(1, 21)])
    with RunLog(tmp_path, 0) as log:
        log.write("start", **START)
        log.write("memory", **MEMORY)
        log.write("messages", step=2, axes={"dp+cp": {"calls": 7, "bytes": 5 << 20}})
        log.add_warning("warning", "library", "<i>strange</i>")
    for rank in range(1, 10):
        with RunLog(tmp_path, rank) as log:
            log.add_warning("warning", "library", "<i>strange</i>")
    with RunLog(tmp_path, 0) as log:
        log.write("end", how="finished", step=20)

    text = render_run_page(tmp_path)

    assert "Finished at step 20." in text
    for shown in (
        "12.5% of the positions, counted on 100 samples",
        "25.0% of the tokens",
        "12,345 tokens beyond data.sequence_length (10.0%)",
        "320 samples, 81.9k tokens, 2.00 epochs",
        "3 conversations are &lt;cut&gt; off",
        "activations and temporaries 512 MiB",
        "The peak is tensors on the device.",
        "data parallel x context parallel (dp+cp)",
        "5.0 MiB",
        "0, 1, 2, 3, 4, 5, 6, 7 and 2 more",
        "library: &lt;i&gt;strange&lt;/i&gt;",
        "&lt;b&gt;vm&lt;/b&gt;",
        "0.1.0: nxd-ckpt, nxd-state",
    ):
        assert shown in text, shown


def test_parts_whose_log_is_damaged_say_so_and_the_others_are_shown(tmp_path, record):
    write_run(tmp_path, [record(1)])
    with RunLog(tmp_path, 0) as log:
        log.write("start", environment=7, data={"sources": 3})
        log.write("memory", bytes="<much>")
        log.write("messages")

    text = render_run_page(tmp_path)

    assert text.count("This part cannot be shown") == 4
    assert "<much>" not in text
    assert "Loss" in text


def test_run_killed_before_its_first_step_has_a_page(tmp_path):
    write_run(tmp_path, [])

    text = render_run_page(tmp_path)

    assert "none logged" in text
    assert "nxd train" in text


def test_name_of_the_run_is_escaped_and_half_a_line_of_metrics_is_left_out(tmp_path, record):
    folder = tmp_path / "<script>alert(1)<"
    write_run(folder, [record(1)])
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 2, "lo')

    text = render_run_page(folder)

    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;" in text


def test_recipe_that_cannot_be_read_is_shown_with_its_mistakes(tmp_path, record):
    write_run(tmp_path, [record(1)], recipe="[train]\nstepz = 3\n")

    text = render_run_page(tmp_path)

    assert "stepz = 3" in text
    assert "train.stepz" in text


def test_long_loss_curve_is_smoothed_and_marks_where_the_run_resumed(tmp_path, record):
    records = [record(step, loss=2.0 + step % 2, resumed_from=50 if step == 51 else None) for step in range(1, 101)]
    write_run(tmp_path, records)

    text = render_run_page(tmp_path)

    assert "training, smoothed, step 50: 2.57143" in text  # the mean of seven values
    assert "resumed at step 50" in text


def test_folder_that_is_not_a_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "has no metrics.jsonl; pass the output folder of a run of nxd train" in capsys.readouterr().err


def test_command_writes_the_page_and_prints_its_path(tmp_path, record, capsys):
    write_run(tmp_path, [record(1)])

    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
