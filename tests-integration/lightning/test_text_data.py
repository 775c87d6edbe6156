"""`TextDataModule` in one process, without a Trainer."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def text_data(tmp_path):
    """`text_data(global_batch_size)`: the module for a short text, on the only replica."""
    from nxd_lightning import TextDataModule

    (tmp_path / "text.txt").write_text("To be, or not to be. " * 20)

    def make(global_batch_size):
        options = {"sequence_length": 16, "cache_folder": tmp_path / "tokens"}
        data = TextDataModule(tmp_path / "text.txt", global_batch_size=global_batch_size, **options)
        data.trainer = SimpleNamespace(strategy=SimpleNamespace(data_parallel_rank=0, data_parallel_size=1))
        return data

    return make


def batches(data):
    data.setup("fit")
    return data.train_dataloader()


def test_text_must_have_the_sequences_of_one_step(text_data):
    num_sequences = len(batches(text_data(1)))

    assert len(batches(text_data(num_sequences))) == 1
    with pytest.raises(ValueError, match=f"only {num_sequences} training sequences, fewer than global_batch_size="):
        batches(text_data(num_sequences + 1))


def test_text_that_is_not_open_is_an_error_that_says_so(text_data):
    with pytest.raises(RuntimeError, match="the text is not open; call setup, as a Trainer does"):
        text_data(1).train_dataloader()
