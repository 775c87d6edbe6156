import pytest
from nxd_trainer.report import draw_expert_loads

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_picture_of_loads_is_a_png(tmp_path, record):
    pytest.importorskip("matplotlib")
    records = [record(step, tokens_per_expert=[[4, 4 * step], [0, 8]] if step > 1 else None) for step in range(1, 4)]

    file = draw_expert_loads(records, tmp_path / "new" / "experts.png")

    assert file == tmp_path / "new" / "experts.png"
    assert file.read_bytes().startswith(PNG_SIGNATURE)


def test_busiest_expert_is_a_multiple_of_the_mean_of_its_layer(record):
    assert record(1, tokens_per_expert=[[2, 2, 2, 2], [1, 5, 1, 1]]).busiest_expert == 2.5
    assert record(1).busiest_expert is None


def test_run_without_counts_or_matplotlib_has_no_picture_and_says_so(tmp_path, record, without):
    said = []

    assert draw_expert_loads([record(1)], tmp_path / "experts.png", say=said.append) is None
    without("matplotlib")
    assert draw_expert_loads([record(1, tokens_per_expert=[[1, 2]])], tmp_path / "experts.png", say=said.append) is None

    assert said[0] == "load of experts skipped: no step counted their tokens"
    assert "matplotlib is not installed" in said[1]
