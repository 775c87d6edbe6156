"""docs/reference/checkpoint-format.md is enough to read a checkpoint: a reader of json and safetensors alone."""

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from nxd_ckpt import Shard, ShardedTensor, save
from nxd_ckpt.testing import run_on_threads
from safetensors import safe_open

_TORCH_NAMES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "C64": torch.complex64}


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    text = (folder / "manifest.json").read_bytes()
    manifest = json.loads(text)
    digest = manifest["digest"].encode()
    assert text.startswith(b'{"digest"')
    assert hashlib.sha256(text.replace(digest, b"0" * 64, 1)).hexdigest().encode() == digest
    assert (manifest["format"], manifest["version"]) == ("nxd-ckpt", 2)
    for file, size in manifest["files"].items():
        assert (folder / file).stat().st_size == size
    return {name: _read_tensor(folder, name, entry) for name, entry in manifest["tensors"].items()}


def _read_tensor(folder: Path, name: str, entry: dict) -> torch.Tensor:
    whole = torch.empty(entry["shape"], dtype=_TORCH_NAMES[entry["dtype"]])
    missing = math.prod(entry["shape"])
    for chunk in entry["chunks"]:
        offsets, shape = chunk["box"]
        ranges = [(begin, begin + size) for begin, size in zip(offsets, shape, strict=True)]
        box = "" if shape == entry["shape"] else "[" + ",".join(f"{begin}:{end}" for begin, end in ranges) + "]"
        with safe_open(folder / chunk["file"], "pt") as file:
            whole[tuple(slice(begin, end) for begin, end in ranges)] = file.get_tensor(name + box)
        missing -= math.prod(shape)
    assert missing == 0  # no boxes overlap here
    return whole


@pytest.fixture
def saved(tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of two ranks: rows, columns, one rank's own, and what both hold alike."""
    rows = torch.randn(5, 6).to(torch.bfloat16)
    columns = torch.randn(4, 8, dtype=torch.complex64)
    whole = {
        "rows": rows,
        "columns": columns,
        "alike": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "own é": torch.randn(8, 3).to(torch.float8_e4m3fn),
    }

    def save_half(ranks) -> None:
        first = ranks.rank == 0
        state = {
            "rows": ShardedTensor((5, 6), [Shard(rows[:3] if first else rows[3:], (0 if first else 3, 0))]),
            "columns": ShardedTensor((4, 8), [Shard(columns[:, 4 * ranks.rank :][:, :4], (0, 4 * ranks.rank))]),
            "alike": whole["alike"],
            "empty": whole["empty"],
        }
        save(tmp_path, "a", state if first else state | {"own é": whole["own é"]}, process_group=ranks)

    run_on_threads(save_half, world_size=2)
    return tmp_path / "a", whole


def test_a_reader_made_from_the_specification_gets_every_bit(saved, bits):
    folder, whole = saved

    found = read_checkpoint(folder)

    assert {name: (t.dtype, t.shape, bits(t)) for name, t in found.items()} == {
        name: (t.dtype, t.shape, bits(t)) for name, t in whole.items()
    }


def test_hashes_and_offsets_are_those_of_the_specification(saved):
    xxhash = pytest.importorskip("xxhash")
    folder, _ = saved

    for entry in json.loads((folder / "manifest.json").read_bytes())["tensors"].values():
        for chunk in entry["chunks"]:
            with (folder / chunk["file"]).open("rb") as file:
                file.seek(chunk["offset"])
                assert [xxhash.xxh3_64_hexdigest(file.read(chunk["bytes"]))] == chunk["xxh3"]
