"""A trace with `content` is cached: an equal one reads only its weights."""

import re

import pytest
import torch
import traced_models as models
from nxd_trace import TraceContent, source_digest

X = torch.linspace(-1, 1, 2 * models.IN, dtype=torch.float64).view(2, models.IN)


@pytest.fixture
def start(trace, tmp_path, capfd):
    """`start(seed=1)`: returns an output of the traced model, and the progress messages."""

    def run(seed=0, made_of="this model", x=X, **settings):
        weights = models.logical_weights(seed)
        settings = {"tp_degree": 2, "cache_dir": tmp_path / "cache", "progress": True, "weights": weights} | settings
        capfd.readouterr()
        model = trace(models.scaled, x, content=TraceContent({"model": made_of}), **settings)
        found = model(x)
        model.close()
        said = capfd.readouterr().err
        assert torch.allclose(found, 3 * models.plain_mlp(weights, x), rtol=1e-12)
        return said

    return run


def kept_traces(folder):
    return [path.parent for path in folder.glob("cache/*/programs.json")]


def test_equal_trace_is_reused_with_the_current_weights(start, tmp_path):
    first = start(seed=0)
    again = start(seed=1)

    assert "recording 1 programs" in first
    assert re.search(
        r"s: this model was traced before with export: reading its weights\n.*s: loading 1 programs", again
    )
    assert "recording" not in again
    kept = [path for entry in kept_traces(tmp_path) for path in entry.rglob("*.safetensors")]
    assert {path.name for path in kept} == {"kept.safetensors"}  # the weights themselves are not there


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"made_of": "another model"}, {"x": X[:1]}, {"tp_degree": 1}], ids=["content", "shape", "degree"]
)
def test_a_different_trace_is_not_reused(start, change):
    start()

    assert "recording 1 programs" in start(**change)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["damaged", "cut", "another's", "moved"])
def test_cached_trace_that_cannot_be_trusted_is_rebuilt(start, tmp_path, what):
    start()
    (entry,) = kept_traces(tmp_path)
    match what:
        case "damaged":
            (entry / "tp_rank_01/rank.json").write_bytes(b"{}")
        case "cut":
            (entry / "programs.json").unlink()
        case "another's":  # as good as: others may write there
            entry.chmod(0o777)
        case "moved":
            other = next(path for path in entry.parent.iterdir() if path != entry)
            entry.rename(tmp_path / "aside")
            other.rename(entry)

    said = start()

    assert "its cache entry is damaged or not private to you: tracing again" in said
    assert "recording 1 programs" in said
    assert "reading its weights" in start()


@pytest.mark.slow
def test_cache_that_others_can_write_to_is_neither_read_nor_written(start, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)

    for _ in range(2):
        with pytest.warns(UserWarning, match=r"cannot store compiled programs.*other users can write to .*cache"):
            assert "recording 1 programs" in start()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.slow
def test_cache_that_cannot_be_written_is_a_warning(start, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.warns(
        UserWarning, match=r"file/cache cannot store compiled programs.*Not a directory; make room there"
    ):
        said = start(cache_dir=tmp_path / "file/cache")

    assert "recording 1 programs" in said


@pytest.mark.slow
def test_check_is_called_only_where_a_trace_is_made(trace, tmp_path):
    calls = []
    settings = {"weights": models.logical_weights(), "cache_dir": tmp_path / "cache"}
    for _ in range(2):
        trace(models.mlp, X, content=TraceContent({}, check=lambda: calls.append("made")), **settings)

    def refuse():
        raise ValueError("these sizes cannot be")

    with pytest.raises(ValueError, match="these sizes cannot be"):
        trace(models.mlp, X, content=TraceContent({"of": "others"}, check=refuse), **settings)
    assert calls == ["made"]


def test_digest_of_sources_changes_with_the_code_alone(tmp_path, monkeypatch):
    def digest_of(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        return source_digest(name)

    monkeypatch.syspath_prepend(tmp_path)

    assert digest_of("first_package", "a = 1\n") == digest_of("second_package", "a = 1\n")
    assert digest_of("third_package", "a = 2\n") != source_digest("first_package")
    with pytest.raises(ValueError, match="package 'no_such_package' not found; install it"):
        source_digest("no_such_package")
