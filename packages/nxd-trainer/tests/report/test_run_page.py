import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from nxd_cli.dispatch import main
from nxd_trainer.report import MetricsLog
from nxd_trainer.report.charts import line_chart
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


def test_text_of_the_folder_is_escaped(tmp_path, record):
    write_run(tmp_path, [record(1)], recipe='output = "<script>alert(1)</script>"\n')

    assert "<script>alert" not in render_run_page(tmp_path)


def test_loads_of_experts_are_a_table_of_the_last_step(tmp_path, record):
    write_run(tmp_path, [replace(record(1), tokens_per_expert=[[10, 30], [20, 20]])])

    text = render_run_page(tmp_path)

    assert "Tokens per expert in step 1" in text
    assert text.count('class="load"') == 4


def test_folder_that_is_not_a_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "has no metrics.jsonl; pass the output folder of a run of nxd train" in capsys.readouterr().err


def test_command_writes_the_page_and_prints_its_path(tmp_path, record, capsys):
    write_run(tmp_path, [record(1)])

    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_chart_leaves_out_values_that_are_not_finite(value):
    chart = line_chart("Loss", {"training": [(1, 2.0), (2, value), (3, 1.0)]})

    assert "step 2" not in chart
    assert "step 3: 1" in chart


def test_chart_of_a_long_run_stays_small_and_keeps_the_last_step():
    chart = line_chart("Loss", {"training": [(step, 1 / step) for step in range(1, 100_001)]})

    assert chart.count("<circle") <= 1000
    assert "step 100000: 1e-05" in chart


def test_chart_without_values_is_empty():
    assert line_chart("Loss", {"training": []}) == ""
