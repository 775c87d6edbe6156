"""The forms of a report: on a terminal's screen, as a page, in Markdown, as JSON."""

import io
import json
import re
from html.parser import HTMLParser

import pytest
import torch
from nxd_parity import compare, record
from nxd_parity.command import main
from nxd_parity.html import to_html
from nxd_parity.markdown import to_markdown
from nxd_parity.terminal import show
from rich.console import Console
from torch import nn

HOSTILE = "<script src='//evil'>[red]|`*_\x1b[31m\n"
VOID = {"meta", "rect", "path", "circle", "br"}


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight * self.factor


class Stack(nn.Module):
    """Forty layers, one of which may multiply by a factor, and one with a name."""

    def __init__(self, factor, name):
        super().__init__()
        self.layers = nn.ModuleList(Scaled(factor if at == 20 else 1.0) for at in range(40))
        self.add_module(name, Scaled(1.0))
        self.last = name

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return getattr(self, self.last)(x)


def train(folder, factor=1.0, name="head", steps=2):
    with record(folder):
        model = Stack(factor, name)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(steps):
            model(torch.linspace(1, 2, 8, dtype=torch.float64).sin().view(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def make_report(tmp_path):
    """A function that compares two trainings of a small model; the candidate's may have a fault."""

    def make(factor=3.0, name="head"):
        train(tmp_path / "reference", name=name)
        train(tmp_path / "candidate", factor, name)
        return compare(tmp_path / "reference", tmp_path / "candidate")

    return make


def on_screen(report, *, width=80, height=30):
    console = Console(file=io.StringIO(), width=width, height=height, no_color=True, legacy_windows=False)
    show(report, console)
    return console.file.getvalue()


def test_status_of_each_tensor_is_reported_by_step_kind_and_name(make_report):
    report = make_report()

    activations = report.tensors[1]["activation"]
    assert activations["layers.19"] == "agrees"
    assert activations["layers.20"] == "differs first"
    assert activations["layers.21"] == activations["head"] == activations[""] == "differs later"
    assert report.tensors[0]["parameter"]["layers.20.weight"] == "agrees"


def test_screen_shows_the_first_difference_and_its_neighbours_in_the_height_of_the_terminal(make_report):
    report = make_report()

    for height in (24, 30, 50):
        shown = on_screen(report, height=height).splitlines()
        text = "\n".join(shown)
        assert len(shown) < height
        assert "step 1, activation of layers.20" in text
        assert "scaled; the values are 3 times the expected ones" in text
        assert re.search(r"20  differs first: activation;", text)
        assert re.search(r"\.\.\. \d+ more: \d+ differ later from activation on", text)
    assert "19  differs later from activation gradient on" in text
    assert "21  differs later from activation on" in text
    assert re.search(r"step 1 +2 +20/42 +0/1 +", text)


def test_screen_of_equal_programs_is_a_verdict_with_counts(make_report):
    shown = on_screen(make_report(factor=1.0))

    assert "EQUAL" in shown
    assert re.search(r"all steps +4 +84 +2 +84 +82 +123 +82", shown)
    assert len(shown.splitlines()) < 10


def test_screen_shows_control_characters_and_markup_of_names_as_they_are(make_report):
    shown = on_screen(make_report(name=HOSTILE), width=200, height=80)

    assert "<script src='//evil'>[red]|`*_\\x1b[31m\\n" in shown
    assert "\x1b" not in shown


class Page(HTMLParser):
    """Checks that all elements are closed in order, and collects them."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *it) for it in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *it) for it in attrs]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> without a beginning"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("factor", [1.0, 3.0], ids=["equal", "different"])
def test_page_is_balanced_and_loads_nothing(make_report, factor):
    page = Page(to_html(make_report(factor, HOSTILE)))

    assert not page.open
    assert not set(page.tags) & {"script", "link", "img", "iframe", "object", "form", "base", "a"}
    names = {name for _, name, _ in page.attributes}
    assert not {it for it in names if it.startswith("on")} | (names & {"src", "href", "srcset", "action"})
    assert "url(" not in "".join(page.text)
    assert "@import" not in "".join(page.text)
    policies = [value for _, name, value in page.attributes if name == "content" and value.startswith("default-src")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_page_shows_hostile_names_as_text(make_report):
    written = to_html(make_report(name=HOSTILE))

    assert "<script" not in written
    assert "\x1b" not in written
    assert "<script src='//evil'>[red]|`*_\\x1b[31m\\n" in "".join(Page(written).text)


def test_page_opens_the_tree_at_the_first_difference_and_draws_it(make_report):
    page = Page(to_html(make_report()))

    text = "".join(page.text)
    assert "scaled; the values are 3 times the expected ones" in text
    assert page.tags.count("svg") == page.tags.count("circle") == 1
    assert page.tags.count("details") - sum(it[1] == "open" for it in page.attributes) > 40
    assert sum(it[1] == "open" for it in page.attributes) == 3  # the model, its layers, and one of them
    titles = [value for _, name, value in page.attributes if name == "title"]
    assert titles.count("activation: differs first") == 1
    assert titles.count("activation: agrees") == 20


def test_markdown_has_the_difference_the_counts_and_escaped_names(make_report):
    text = to_markdown(make_report(name=HOSTILE))

    assert text.startswith("### ❌ Different: ")
    assert "| where | step 1, activation of layers.20 |" in text
    assert "| step 1 | " in text
    assert "<script" not in text
    assert "&lt;script src='//evil'&gt;\\[red\\]\\|\\`\\*\\_" in text
    assert len({line.count("|") - line.count("\\|") for line in text.splitlines() if line.startswith("| step")}) == 1


def command(tmp_path, *options):
    return main(["compare", str(tmp_path / "reference"), str(tmp_path / "candidate"), *map(str, options)])


def test_files_are_written_beside_the_plain_text(make_report, tmp_path, capsys):
    report = make_report()

    code = command(tmp_path, "--html", tmp_path / "page.html", "--markdown", tmp_path / "summary.md")

    assert code == 3
    assert capsys.readouterr().out == f"{report}\n"
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == to_html(report)
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == to_markdown(report)


def test_summary_of_a_job_on_github_keeps_what_other_steps_wrote(make_report, tmp_path, monkeypatch):
    make_report(1.0)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    for name in ("summary", "other"):
        (tmp_path / name).write_text("before\n")
        assert command(tmp_path, "--markdown", tmp_path / name) == 0

    assert (tmp_path / "summary").read_text().startswith("before\n### ✅ Equal")
    assert (tmp_path / "other").read_text().startswith("### ✅ Equal")


def test_file_that_cannot_be_written_is_an_error(make_report, tmp_path, capsys):
    make_report()

    assert command(tmp_path, "--html", tmp_path / "nowhere" / "page.html") == 2
    assert "nowhere/page.html" in capsys.readouterr().err


def test_json_has_the_statuses_and_the_location(make_report, tmp_path, capsys):
    make_report()

    assert command(tmp_path, "--json") == 3
    found = json.loads(capsys.readouterr().out)

    assert found["tensors"]["1"]["activation"]["layers.20"] == "differs first"
    assert found["location"]["shape"] == [2, 4]
    assert [len(it) for it in found["location"]["differences"]] == [4, 4]
    assert found["location"]["owners"] == ["0 0 0 0"] * 2


def test_json_of_an_infinite_difference_is_valid(tmp_path, capsys):
    for name, value in (("reference", 1.0), ("candidate", float("nan"))):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 1.0)
        nn.init.constant_(model.bias, value)
        with record(tmp_path / name):
            optimizer = torch.optim.SGD(model.parameters())
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()

    assert command(tmp_path, "--json") == 3
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    assert (found["findings"][0]["largest"], found["findings"][0]["found"]) == ("inf", "nan")


def test_text_counts_all_tensors_that_differ(make_report):
    report = make_report()

    assert len(report.findings) == 50
    assert f"; {report.different - 1} more tensors differ after it" in str(report)
    assert report.different > 50


def test_command_fills_the_screen_of_a_terminal(make_report, tmp_path, monkeypatch, capsys):
    make_report()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    assert command(tmp_path) == 3
    assert " DIFFERENT " in capsys.readouterr().out
