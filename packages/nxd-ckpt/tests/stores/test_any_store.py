"""What holds wherever checkpoints are stored."""

import fsspec
import pytest
import torch
from nxd_ckpt import CheckpointError, open_checkpoint, save
from nxd_ckpt.testing import StoreTests


class TestAnyStore(StoreTests):
    """In a folder, in the memory of this process, and in S3."""


def test_load_data_file_that_is_missing_says_so(root):
    save(root, "t", {"w": torch.ones(4, 6)})
    checkpoint = open_checkpoint(root, "t")
    fs, path = fsspec.core.url_to_fs(f"{root}/t/data")
    fs.rm(path, recursive=True)

    with pytest.raises(CheckpointError, match=r"data/.*\.safetensors.* is missing"):
        checkpoint.read("w")
