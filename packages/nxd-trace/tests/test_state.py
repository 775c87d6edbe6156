"""Aliased state stays in the workers, is updated in place between calls, and is shared by programs."""

import nxd_trace
import pytest
import torch
import traced_models as models

ROW = torch.arange(8, dtype=torch.float64).unsqueeze(0)
AT = [torch.tensor([position]) for position in range(4)]


def expected_row(degree: int) -> torch.Tensor:
    """Return the output of `Cache`: each rank writes the first part of the new row, plus the degree."""
    return (ROW[0].chunk(degree)[0] + degree).repeat(degree)


@pytest.mark.sample(3)
@pytest.mark.parametrize("func", ["cache", "cache_by_output"])
@pytest.mark.parametrize("degree", [1, 2])
def test_state_is_updated_between_calls_and_reset(trace, func, degree):
    model = trace(getattr(models, func), (torch.zeros_like(ROW), AT[0]), tp_degree=degree)

    once, twice, again = model(ROW, AT[0]), model(ROW, AT[2]), model(ROW, AT[2])
    model.reset_state()
    after_reset = model(ROW, AT[1])

    row = expected_row(degree)
    for found, expected in [(once, row), (twice, 2 * row), (again, 2 * row), (after_reset, row)]:
        torch.testing.assert_close(found, expected)
    assert model.read_state("rows", rank=degree - 1)[0].count_nonzero() == 0


def test_state_that_does_not_begin_as_zeros_is_saved_and_restored(trace, tmp_path):
    model = trace(models.cache_from_seven, (ROW, AT[0]))
    model(ROW, AT[0])
    nxd_trace.parallel_model_save(model, tmp_path / "model")

    with nxd_trace.parallel_model_load(tmp_path / "model") as loaded:
        torch.testing.assert_close(loaded(ROW, AT[1]), 3 * 7.0 + expected_row(1))
    model.reset_state()
    torch.testing.assert_close(model.read_state("rows"), torch.full((4, 8), 7.0, dtype=torch.float64))


def test_state_of_one_rank_is_written(trace):
    model = trace(models.cache, (ROW, AT[0]), tp_degree=2)
    first = model.read_state("rows")

    model.write_state("rows", first + 1, rank=1)

    assert torch.equal(model.read_state("rows"), first)
    assert torch.equal(model.read_state("rows", rank=1), first + 1)
    for wrong, name, rank, text in [
        (first, "columns", 0, "rank 0 has no state 'columns'"),
        (first, "rows", 2, "rank 2 has no state 'rows'"),
        (first[:1], "rows", 0, r"rows is float64\[4, 4\] on rank 0, but the new value is float64\[1, 4\]"),
    ]:
        with pytest.raises(ValueError, match=text):
            model.write_state(name, wrong, rank)
    model.reset_state()
    assert torch.equal(model.read_state("rows", rank=1), first)


def test_state_is_written_in_the_shape_that_this_rank_has(trace):
    model = trace(models.uneven_cache, (ROW, AT[0]), tp_degree=2)

    model.write_state("rows", torch.ones(4, 3, dtype=torch.float64), rank=1)

    assert model(torch.zeros_like(ROW), AT[0]) == 3 * 3
    with pytest.raises(ValueError, match=r"rows is float64\[4, 3\] on rank 1, but the new value is float64\[4, 5\]"):
        model.write_state("rows", torch.ones(4, 5, dtype=torch.float64), rank=1)


def test_programs_of_a_builder_share_weights_and_state_and_are_called_by_name_or_shape():
    builder = nxd_trace.ModelBuilder(models.cache, tp_degree=2)
    rows = ROW.repeat(3, 1)
    builder.trace((rows, torch.arange(3)), tag="prefill").trace((ROW, AT[0]), tag="decode")

    with builder.compile(compiler="export", progress=False) as model:
        after_prefill = model.run("prefill", rows, torch.arange(3))
        after_decode = model(ROW, AT[3])

        torch.testing.assert_close(after_prefill, 3 * expected_row(2))
        torch.testing.assert_close(after_decode, 4 * expected_row(2))
        assert list(model.programs) == ["prefill", "decode"]
        with pytest.raises(ValueError, match="there is no program 'train'; this model has prefill, decode"):
            model.run("train", ROW, AT[0])
        with pytest.raises(ValueError, match="no program was traced with these inputs; there are prefill: float64"):
            model(ROW.repeat(2, 1), torch.arange(2))


def test_two_programs_of_one_name_are_refused():
    builder = nxd_trace.ModelBuilder(models.cache).trace((ROW, AT[0]), tag="a").trace((ROW, AT[0]), tag="a")

    with pytest.raises(ValueError, match="pass at least one, each with a different name"):
        builder.compile()


@pytest.mark.parametrize(
    ("aliases", "error", "text"),
    [
        (["columns"], ValueError, "name 'columns', which is not a parameter or buffer"),
        ([torch.zeros(1)], ValueError, "name a Tensor, which is not a parameter or buffer"),
        ({"rows": "1"}, TypeError, "map to '1'; expected an output's index"),
        (["rows", "rows"], ValueError, "state 'rows' twice"),
        ("rows", TypeError, "aliases of type str"),
    ],
)
def test_aliases_that_name_no_state_are_refused(aliases, error, text):
    from nxd_trace.exporting import read_aliases

    with pytest.raises(error, match=text):
        read_aliases(models.Cache(), aliases)
