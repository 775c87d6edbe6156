"""Traced models compute what the plain model computes, at any degree; wrong arguments are named."""

import json
import os
import sys
import threading
from pathlib import Path

import nxd_trace
import pytest
import torch
import traced_models as models


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_traced_model_equals_the_plain_one_at_any_degree(trace, degree):
    weights = models.logical_weights()
    x = torch.randn(3, models.IN, dtype=torch.float64)

    model = trace(models.mlp, torch.zeros_like(x), tp_degree=degree, weights=weights)

    torch.testing.assert_close(model(x), models.plain_mlp(weights, x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(x + 1), models.plain_mlp(weights, x + 1), rtol=1e-12, atol=1e-12)


def test_bfloat16_model_equals_the_plain_one_within_its_precision(trace):
    weights = models.logical_weights(dtype=torch.bfloat16)
    x = torch.randn(3, models.IN, generator=torch.Generator().manual_seed(0)).bfloat16()

    model = trace(models.bfloat16_mlp, x, tp_degree=2, weights=weights)

    assert model(x).dtype == torch.bfloat16
    torch.testing.assert_close(model(x), models.plain_mlp(weights, x), rtol=2e-2, atol=2e-2)


def test_shorter_documented_signature_and_nested_outputs_and_keywords(trace):
    weights = models.logical_weights()
    x, scale = torch.randn(2, models.IN, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    example = {"x": x, "scale": scale}

    model = nxd_trace.parallel_model_trace(
        models.gathered, example, 2, weights=weights, compiler="export", progress=False
    )

    with model:
        found = model(x=x, scale=scale)
        hidden = torch.relu(x @ weights["up.weight"].T + weights["up.bias"])
        torch.testing.assert_close(found["output"], 2 * models.plain_mlp(weights, x))
        torch.testing.assert_close(found["hidden"][0], hidden)
        torch.testing.assert_close(found["hidden"][1][0], hidden + 1)
        assert found["hidden"][1][1] is None
        with pytest.raises(ValueError, match=r"keywords \['x', 'scale'\]; this call has 1 positional"):
            model(x)
        with pytest.raises(ValueError, match=r"is float64\[3, 6\]; it was traced with float64\[2, 6\]"):
            model(x=torch.zeros(3, models.IN, dtype=torch.float64), scale=scale)
        with pytest.raises(TypeError, match=r"inputs\[1\]\['scale'\] is a float; expected tensors"):
            model(x=x, scale=2.0)
    assert isinstance(model, torch.nn.Module)


def test_ranks_with_equal_graphs_compile_once_and_later_traces_not_at_all(trace, tmp_path, capfd):
    x = torch.zeros(2, models.IN, dtype=torch.float64)
    weights = models.logical_weights()
    settings = {"tp_degree": 2, "progress": True, "cache_dir": tmp_path, "max_parallel_compilations": 1}

    trace(models.mlp, x, weights=weights, **settings)
    first = capfd.readouterr().err
    trace(models.mlp, x, weights=models.logical_weights(seed=1), **settings)
    second = capfd.readouterr().err
    (entry,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    (entry / "program.json").write_bytes(b"damaged")
    trace(models.mlp, x, weights=weights, **settings)
    third = capfd.readouterr().err

    assert "compiling 1 of 1 distinct programs with export" in first
    assert "compiling 0 of 1 distinct programs" in second
    assert "compiling 1 of 1 distinct programs" in third


def test_cache_entry_that_lists_files_elsewhere_is_compiled_again(trace, tmp_path, capfd):
    x = torch.zeros(2, models.IN, dtype=torch.float64)
    settings = {"weights": models.logical_weights(), "progress": True, "cache_dir": tmp_path / "cache"}
    trace(models.mlp, x, **settings)
    (entry,) = (tmp_path / "cache").iterdir()
    (tmp_path / "cache" / "other").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (entry / "hashes.json").write_text(json.dumps({"key": entry.name, "files": {"../other": empty}}))
    capfd.readouterr()

    trace(models.mlp, x, **settings)

    assert "compiling 1 of 1 distinct programs" in capfd.readouterr().err


def test_workers_meet_where_no_other_user_of_the_host_can_write(trace):
    def listening() -> set[str]:
        """Return the sockets of this process that others can connect to."""
        own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()}
        rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()]
        return own & {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}

    before = listening()
    trace(models.mlp, torch.zeros(3, models.IN, dtype=torch.float64), tp_degree=2, weights=models.logical_weights())

    assert listening() == before


@pytest.mark.parametrize(
    ("func", "settings", "error", "text"),
    [
        ("raises_on_rank_1", {"tp_degree": 2}, nxd_trace.WorkerError, "rank 1 of 2.*no weights for the second rank"),
        ("dies_on_rank_1", {"tp_degree": 2}, nxd_trace.WorkerError, "rank 1 of 2.*SIGSEGV(.|\n)*in dies_on_rank_1"),
        ("mlp", {"tp_degree": 3, "weights": {}}, nxd_trace.WorkerError, "3 ranks do not divide 8"),
        ("mlp", {}, nxd_trace.WorkerError, "is on the meta device and has no values; pass .* weights="),
        ("mlp", {"weights": {}}, nxd_trace.WorkerError, "do not fit the model:\n  up.weight is missing"),
        ("no_model", {}, nxd_trace.WorkerError, r"func returned a str; expected a torch.nn.Module"),
        ("unnamed_state", {}, nxd_trace.WorkerError, "updates weight 'rows' in place.*name it in the aliases"),
    ],
)
def test_what_fails_in_a_worker_is_raised_with_its_traceback_and_leaves_no_process(
    trace, running_workers, func, settings, error, text
):
    inputs = torch.zeros(2, models.IN, dtype=torch.float64)
    if func == "unnamed_state":
        inputs = (torch.zeros(1, 8, dtype=torch.float64), torch.zeros(1, dtype=torch.long))

    with pytest.raises(error, match=text):
        trace(getattr(models, func), inputs, **settings)

    assert running_workers() == []


@pytest.mark.parametrize(
    ("func", "inputs", "settings", "error", "text"),
    [
        (models.mlp, "x", {}, TypeError, "are a str; expected a tensor, a tuple"),
        (models.mlp, (torch.zeros(1), 3), {}, TypeError, "is a int; expected tensors, None"),
        (models.mlp, None, {}, ValueError, "pass the example inputs once"),
        (models.mlp, torch.zeros(1), {"tp_degree": 0}, ValueError, "tp_degree=0 must be a positive integer"),
        (models.mlp, torch.zeros(1), {"compiler": "gcc"}, ValueError, "unknown compiler='gcc'; use one of export"),
        ("mlp", torch.zeros(1), {}, TypeError, "func is a str; expected a function"),
        (models.mlp, torch.zeros(1), {"weights": 3}, TypeError, "weights cannot be read from a int"),
    ],
)
def test_wrong_arguments_are_refused_before_a_process_starts(trace, func, inputs, settings, error, text):
    with pytest.raises(error, match=text):
        trace(func, inputs, **settings)


def test_a_function_that_workers_cannot_import_is_refused_without_cloudpickle(trace, monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    with pytest.raises(TypeError, match=r"func cannot be sent to the worker processes.*no lambda.*cloudpickle"):
        trace(lambda: None, torch.zeros(1))


def test_what_even_cloudpickle_cannot_send_is_refused(trace):
    lock = threading.Lock()

    with pytest.raises(TypeError, match=r"func cannot be sent to the worker processes.*inside the function"):
        trace(lambda: lock, torch.zeros(1))
