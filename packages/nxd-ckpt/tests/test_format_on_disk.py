"""What others rely on: folders and names, the manifest's fields, and data files that stock safetensors opens."""

import hashlib
import json
import math
import os
import re
import stat

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from nxd_ckpt import open_checkpoint, save
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE
from nxd_ckpt.testing import run_on_threads


def manifest_of(root, tag):
    return json.loads((root / tag / "manifest.json").read_bytes())


def test_save_leaves_exactly_one_manifest_and_the_data_files(tmp_path):
    run_on_threads(
        lambda ranks: save(tmp_path, "step-1", {f"w{ranks.rank}": torch.ones(2)}, process_group=ranks), world_size=2
    )

    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    save_id = manifest_of(tmp_path, "step-1")["save_id"]
    assert re.fullmatch("[0-9a-f]{32}", save_id)
    assert found == [
        ".staging/lock",
        "LATEST",
        f"step-1/data/{save_id}-00000-0.safetensors",
        f"step-1/data/{save_id}-00001-0.safetensors",
        "step-1/manifest.json",
    ]
    assert os.listdir(tmp_path / ".staging") == ["lock"]


def test_data_file_opens_with_stock_safetensors(tmp_path, bits, columns_of, random_tensor):
    whole = {str(dtype): random_tensor((2, 4), dtype) for dtype in CODE_OF_DTYPE}
    extra = {"scalar": torch.tensor(3.5, dtype=torch.float64), "bool": torch.tensor([True, False, True])}
    matrix = torch.randn(4, 6)

    def save_one(ranks):
        own = whole | extra if ranks.rank == 0 else {}
        save(tmp_path, "a", own | {"matrix": columns_of(matrix, ranks.rank, 2)}, process_group=ranks)

    run_on_threads(save_one, world_size=2)

    files = sorted((tmp_path / "a" / "data").iterdir())
    first, second = (safetensors.torch.load_file(path) for path in files)
    for name, tensor in (whole | extra).items():
        is_pairs = tensor.dtype is torch.complex128  # that safetensors has no name for
        assert first[name].dtype is (torch.float64 if is_pairs else tensor.dtype)
        assert first[name].shape == ((*tensor.shape, 2) if is_pairs else tensor.shape)
        assert bits(first[name]) == bits(tensor)
    assert torch.equal(first["matrix[0:4,0:3]"], matrix[:, :3])
    assert torch.equal(second["matrix[0:4,3:6]"], matrix[:, 3:])


def test_data_file_chunks_are_aligned_to_their_element_size(tmp_path):
    sizes = {torch.int8: 101, torch.bfloat16: 33, torch.float64: 1, torch.float32: 3}
    state = {str(dtype): torch.ones(size).to(dtype) for dtype, size in sizes.items()}

    save(tmp_path, "a", state)

    for name, entry in manifest_of(tmp_path, "a")["tensors"].items():
        assert entry["chunks"][0]["offset"] % state[name].element_size() == 0


def test_manifest_gives_each_chunk_place_in_its_file(tmp_path, rows_of):
    whole = torch.randn(4, 3)

    run_on_threads(
        lambda ranks: save(tmp_path, "a", {"w": rows_of(whole, ranks.rank, 2)}, step=5, process_group=ranks),
        world_size=2,
    )

    manifest = manifest_of(tmp_path, "a")
    entry = manifest["tensors"]["w"]
    assert (manifest["format"], manifest["version"], manifest["step"]) == ("nxd-ckpt", 2, 5)
    assert (manifest["world_size"], entry["dtype"], entry["shape"]) == (2, "F32", [4, 3])
    for index, chunk in enumerate(entry["chunks"]):
        content = (tmp_path / "a" / chunk["file"]).read_bytes()
        assert chunk["box"] == [[2 * index, 0], [2, 3]]
        assert chunk["bytes"] == 4 * math.prod(chunk["box"][1])
        assert manifest["files"][chunk["file"]] == len(content)
        stored = torch.frombuffer(bytearray(content), dtype=torch.float32, count=6, offset=chunk["offset"]).reshape(
            2, 3
        )
        assert torch.equal(stored, whole[2 * index : 2 * index + 2])
        payload = content[chunk["offset"] : chunk["offset"] + chunk["bytes"]]
        assert chunk["xxh3"] == [xxhash.xxh3_64_hexdigest(payload)]
        rows = f"w[{2 * index}:{2 * index + 2},0:3]"
        assert rows in safetensors.safe_open(tmp_path / "a" / chunk["file"], "pt").keys()  # noqa: SIM118


def test_manifest_digest_is_the_sha256_with_its_own_digits_zero(tmp_path):
    save(tmp_path, "a", {"w": torch.ones(1)}, objects={"digest": "0" * 64})

    text = (tmp_path / "a" / "manifest.json").read_text()
    digest = json.loads(text)["digest"]
    assert hashlib.sha256(text.replace(digest, "0" * 64, 1).encode()).hexdigest() == digest


def test_files_and_folders_honour_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save(tmp_path / "root", "a", {"w": torch.ones(1)})
    finally:
        os.umask(before)

    for path in [tmp_path / "root", *(tmp_path / "root").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640)


def test_checkpoint_folder_copied_under_another_tag_is_that_checkpoint(tmp_path):
    save(tmp_path, "a", {"w": torch.arange(3)})

    (tmp_path / "a").rename(tmp_path / "b")

    assert torch.equal(open_checkpoint(tmp_path, "b").read("w"), torch.arange(3))


@pytest.mark.parametrize("name", ["", "__metadata__", "w[0:4]", "w\n[0:4,2:3]", "\ud83d\ude00"])
def test_save_name_that_files_cannot_hold_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="is not allowed: empty, '__metadata__', ending in a box"):
        save(tmp_path, "a", {name: torch.ones(1)})


@pytest.mark.parametrize("name", ["layers[0]", "optimizer.state[exp_avg]", "a/b", "gewicht.é", "x[0:4].y"])
def test_save_unusual_name_comes_back(tmp_path, name):
    save(tmp_path, "a", {name: torch.arange(2)})

    assert torch.equal(open_checkpoint(tmp_path).read(name), torch.arange(2))
