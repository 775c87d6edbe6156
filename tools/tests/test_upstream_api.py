"""The table of NeuronX Distributed's names is what the tool writes today, and the tool sees what differs."""

from pathlib import Path

import pytest
import upstream_api

LINEAR = [["input_size", "positional", None], ["output_size", "positional", None], ["bias", "positional", "True"]]


def test_table_in_the_documents_is_current() -> None:
    assert upstream_api.TABLE.read_text() == upstream_api.table(), "run: python tools/upstream_api.py write"


@pytest.mark.parametrize(
    ("arguments", "state", "detail"),
    [
        (LINEAR, "same", ""),
        ([*LINEAR, ["gather_output", "positional", "True"], ["dtype", "positional", "..."]], "same", ""),
        ([*LINEAR, ["colour", "keyword", "None"]], "different", "no `colour`"),
        ([*LINEAR[:2], ["bias", "positional", "False"]], "different", "`bias=True`, there `False`"),
        ([LINEAR[1], LINEAR[0]], "different", "by position: `input_size, output_size, bias, gather_output"),
        ([["input_size", "positional", "1"]], "different", "`input_size` must be given"),
    ],
)
def test_difference_of_arguments_is_seen(arguments: list[list[str | None]], state: str, detail: str) -> None:
    comparison = upstream_api.compare("parallel_layers.layers", "ColumnParallelLinear", arguments)

    assert comparison.state == state
    assert comparison.detail.startswith(detail)
    assert bool(comparison.detail) == bool(detail)


def test_other_name_of_an_argument_is_the_same() -> None:
    arguments = [["n_head", "positional", None], ["tp_degree", "positional", None]]

    assert upstream_api.compare("parallel_layers.pad", "get_number_of_extra_heads", arguments).state == "same"


@pytest.mark.parametrize(
    ("module", "name", "state", "detail"),
    [
        ("trace.hlo_utils", "read_hlo", "explains", "works on HLO programs"),
        ("parallel_layers.parallel_state", "PP_GROUP_PG_GLOO", "not here", "a variable; `nxd_state.all_gather_object`"),
    ],
)
def test_name_that_does_nothing_here_has_a_reason(module: str, name: str, state: str, detail: str) -> None:
    comparison = upstream_api.compare(module, name, [])

    assert comparison.state == state
    assert comparison.detail.startswith(detail)


def test_public_names_are_read_from_sources_that_are_not_run(tmp_path: Path) -> None:
    package = tmp_path / "src/neuronx_distributed/parts"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\nLIMIT = 3\nT = TypeVar('T')\n_OWN = 1\n")
    (package / "layer.py").write_text(
        "class Layer:\n    def __init__(self, size, *, init=torch.zeros): ...\n"
        "def run(layer, times=2, *rest): ...\ndef _helper(): ...\n"
    )

    assert list(upstream_api.read_facts(tmp_path)) == [
        ("parts", "LIMIT", "value"),
        ("parts.layer", "Layer", [["size", "positional", None], ["init", "keyword", "..."]]),
        ("parts.layer", "run", [["layer", "positional", None], ["times", "positional", "2"], ["rest", "rest", None]]),
    ]
