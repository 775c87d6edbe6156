"""The memory that a copy may take when the caller does not say: a share of half of what is free."""

import pytest
from nxd_ckpt.asynchronous import staging


@pytest.mark.parametrize(
    ("local_world_size", "buffer_bytes", "expected"),
    [("2", 0, 250), ("4", 0, 125), ("4", 300, 300), (None, 0, 500)],
    ids=["two ranks", "four ranks", "no less than there is already", "a world of one"],
)
def test_default_limit_is_a_share_of_half_the_free_memory(monkeypatch, local_world_size, buffer_bytes, expected):
    monkeypatch.setattr(staging, "free_memory", lambda: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local_world_size is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)

    assert staging.default_limit(1, buffer_bytes) == expected


def test_free_memory_is_some():
    assert 0 < staging.free_memory() < 2**50


def test_free_in_control_group_counts_what_it_could_give_back(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")

    assert staging.free_in_control_group(str(tmp_path)) == 450


def test_free_in_control_group_without_a_limit_is_no_limit(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")

    assert staging.free_in_control_group(str(tmp_path)) == 2**63
