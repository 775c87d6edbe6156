import json
import struct
from pathlib import Path

import pytest
import torch
from nxd_ckpt import CheckpointError, open_checkpoint, save
from nxd_ckpt.interop import (
    from_checkpoint,
    open_hugging_face,
    open_torch_dcp,
    read_whole,
    save_source,
    write_hugging_face,
)
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

INDEX = "model.safetensors.index.json"


def write_raw(path: Path, entries: dict | str, payload: bytes = b"") -> None:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)


def write_model(folder: Path, tensors: dict[str, torch.Tensor], **options) -> list[str]:
    save(folder / "ours", "a", tensors)
    return write_hugging_face(from_checkpoint(open_checkpoint(folder / "ours", "a")), folder / "hf", **options)


def test_every_dtype_out_is_what_the_safetensors_library_reads(tmp_path, every_dtype, bits):
    files = write_model(tmp_path, every_dtype)

    read = load_file(tmp_path / "hf" / "model.safetensors")
    assert files == ["model.safetensors"]
    assert {name: bits(tensor) for name, tensor in read.items()} == {n: bits(t) for n, t in every_dtype.items()}
    assert all((read[name].dtype, read[name].shape) == (t.dtype, t.shape) for name, t in every_dtype.items())


def test_every_dtype_comes_in_bit_by_bit(tmp_path, every_dtype, bits):
    save_file({name: tensor.contiguous() for name, tensor in every_dtype.items()}, tmp_path / "model.safetensors")

    save_source(open_hugging_face(tmp_path), tmp_path / "ours", "a")

    checkpoint = open_checkpoint(tmp_path / "ours", "a")
    assert {n: bits(checkpoint.read(n)) for n in checkpoint.tensors} == {n: bits(t) for n, t in every_dtype.items()}


def test_several_files_obey_max_shard_size_and_the_index(tmp_path, every_dtype):
    tensors = {f"layers.{i}.weight": torch.randn(100) for i in range(5)} | {"large": torch.randn(1000)}

    files = write_model(tmp_path, tensors, max_shard_size=1000)

    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    assert files == [*(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)), INDEX]
    assert index["metadata"]["total_size"] == 4 * 1500
    for file in files[:-1]:
        read = load_file(tmp_path / "hf" / file)
        assert sum(tensor.nbytes for tensor in read.values()) <= 1000 or list(read) == ["large"]
        assert all(index["weight_map"][name] == file and torch.equal(read[name], tensors[name]) for name in read)
    assert set(index["weight_map"]) == set(tensors)
    source = open_hugging_face(tmp_path / "hf")
    assert all(torch.equal(read_whole(source, name), tensor) for name, tensor in tensors.items())


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 cannot copy pairs of four bits")
def test_scales_and_pairs_of_four_bits_pass_through_byte_by_byte(tmp_path, bits):
    raw = torch.arange(12, dtype=torch.uint8).reshape(2, 3, 2)
    tensors = {
        "scales": raw.clone().view(torch.float8_e8m0fnu),
        "blocks": raw.view(torch.float4_e2m1fn_x2),
        "w": torch.ones(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")

    save_source(open_hugging_face(tmp_path), tmp_path / "ours", "a", dtype=torch.bfloat16)
    write_hugging_face(from_checkpoint(open_checkpoint(tmp_path / "ours", "a")), tmp_path / "hf", dtype=torch.float16)

    read = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(bits(read[name]) == bits(tensors[name]) for name in ("scales", "blocks"))
    assert read["blocks"].dtype == torch.float4_e2m1fn_x2
    assert read["w"].dtype == torch.float16


def test_types_that_safetensors_or_torch_does_not_have_are_refused_by_name(tmp_path):
    entry = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}
    write_raw(tmp_path / "model.safetensors", {"w": entry}, bytes(3))

    with pytest.raises(CheckpointError, match=r"cannot be read: 'w' has the type 'F6_E2M3', for which torch"):
        open_hugging_face(tmp_path)
    with pytest.raises(ValueError, match="'z' is complex128, which safetensors files do not have; leave it out"):
        write_model(tmp_path, {"z": torch.ones(2, dtype=torch.complex128)})


def test_conversion_leaves_counts_and_masks_alone(tmp_path):
    tensors = {"w": torch.randn(4, 4), "count": torch.tensor(7), "mask": torch.tensor([True, False])}

    write_model(tmp_path, tensors, dtype=torch.bfloat16)
    save_source(open_hugging_face(tmp_path / "hf"), tmp_path / "back", "b", dtype=torch.float64)

    read = load_file(tmp_path / "hf" / "model.safetensors")
    back = open_checkpoint(tmp_path / "back", "b")
    assert torch.equal(read["w"], tensors["w"].to(torch.bfloat16))
    assert torch.equal(back.read("w"), read["w"].to(torch.float64))
    assert torch.equal(back.read("count"), tensors["count"])
    assert torch.equal(back.read("mask"), tensors["mask"])


@pytest.mark.parametrize("conversion", [None, torch.bfloat16])
def test_no_more_than_a_tensor_is_in_memory(tmp_path, own_memory, conversion):
    for part in range(3):
        tensors = {f"{part}.{i}": torch.full((2**20,), float(i)) for i in range(10)}
        save_file(tensors, tmp_path / f"model-{part}.safetensors")
    del tensors
    weight_map = {f"{part}.{i}": f"model-{part}.safetensors" for part in range(3) for i in range(10)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    before, peaks = own_memory(), []

    def watch(name: str, num_bytes: int) -> None:
        peaks.append(own_memory() - before)

    save_source(open_hugging_face(tmp_path), tmp_path / "ours", "a", dtype=conversion, progress=watch)
    write_hugging_face(
        from_checkpoint(open_checkpoint(tmp_path / "ours", "a")), tmp_path / "hf", dtype=conversion, progress=watch
    )

    assert len(peaks) == 60
    assert max(peaks) < 24 * 2**20  # of 120 MiB; a tensor has 4


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/etc/outside.safetensors", "a/b.safetensors", ".safetensors", "model.bin", 7, None],
)
def test_an_index_can_only_name_plain_files(tmp_path, file):
    save_file({"w": torch.ones(1)}, tmp_path / "outside.safetensors")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))

    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_hugging_face(tmp_path / "hf")


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path, index):
    (tmp_path / INDEX).write_text(index)

    with pytest.raises(CheckpointError, match=r"index.json cannot be used"):
        open_hugging_face(tmp_path)


def test_an_index_and_files_that_contradict_one_another_are_refused(tmp_path):
    save_file({"w": torch.ones(1), "secret": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}))

    with pytest.raises(CheckpointError, match=r"(?s)'v' should be in a.safetensors.*'secret' is in a.safetensors"):
        open_hugging_face(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entries", "payload", "message"),
    [
        ({"w": ENTRY}, bytes(7), "the file at"),
        ({"w": ENTRY}, bytes(9), "the file at"),
        ({"w": ENTRY, "v": ENTRY}, bytes(8), "overlap or have holes"),
        ({"w": ENTRY | {"data_offsets": [4, 12]}}, bytes(12), "overlap or have holes"),
        ({"w": ENTRY | {"shape": [3]}}, bytes(8), "cannot be the bytes"),
        ({"w": ENTRY | {"shape": [-2]}}, bytes(8), "has the shape"),
        ({"w": ENTRY | {"shape": [2**40]}}, bytes(8), "cannot be the bytes"),
        ({"w": ENTRY | {"shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}}, b"", "has the shape"),
        ({"w": ENTRY | {"dtype": "F7"}}, bytes(8), "type 'F7'"),
        ({"w": 3}, b"", "not a whole safetensors file"),
        ('{"w": 1, "w": 2}', b"", "a key more than once: 'w'"),
        ("[]", b"", "not a whole safetensors file"),
        ("[" * 100_000, b"", "not a whole safetensors file"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, entries, payload, message):
    write_raw(tmp_path / "model.safetensors", entries, payload)

    with pytest.raises(CheckpointError, match=message):
        open_hugging_face(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<Q", 2**60) + b"{}", "claims 1152921504606846976 bytes"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
            "a pointer of Git LFS, .* fetch them by `git lfs pull`",
        ),
    ],
)
def test_a_header_that_is_longer_than_its_file_is_refused(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(CheckpointError, match=message):
        open_hugging_face(tmp_path)


def test_tensors_at_odd_bytes_are_read(tmp_path):
    entries = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "w": ENTRY | {"data_offsets": [3, 11]}}
    write_raw(tmp_path / "model.safetensors", entries, b"\1\2\3" + struct.pack("<2f", 1.5, -2.0))

    assert read_whole(open_hugging_face(tmp_path), "w").tolist() == [1.5, -2.0]


def write_sharded(folder: Path, value: float) -> None:
    save_file({"w": torch.full((2,), value)}, folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))


@pytest.mark.parametrize("stale", ["shards", "index", "pickle", "variant"])
def test_of_several_models_in_a_folder_the_one_counts_that_transformers_takes(tmp_path, stale):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    for seed, folder in enumerate(("other", "saved")):
        torch.manual_seed(seed)
        sharded = "1KB" if folder == "other" and stale in ("shards", "index") else "5GB"
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / folder, max_shard_size=sharded)
    for path in (tmp_path / "other").glob("model*"):
        if stale == "pickle":
            torch.save(load_file(path), tmp_path / "saved" / "pytorch_model.bin")
        elif stale == "variant":
            path.rename(tmp_path / "saved" / "model.fp16.safetensors")
        elif stale == "shards" or path.suffix == ".json":
            path.rename(tmp_path / "saved" / path.name)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    source = open_hugging_face(tmp_path / "saved")

    assert all(torch.equal(read_whole(source, name), theirs[name]) for name in source.tensors)
    assert len(source.tensors) == len(theirs)


def test_weights_that_the_config_names_count_alone(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "named.safetensors")
    (tmp_path / "config.json").write_text('{"transformers_weights": "named.safetensors"}')
    assert read_whole(open_hugging_face(tmp_path), "w").tolist() == [0.0, 0.0]

    (tmp_path / "config.json").write_text('{"transformers_weights": "../named.safetensors"}')
    with pytest.raises(CheckpointError, match=r"'\.\./named.safetensors', which is not the plain name"):
        open_hugging_face(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "a pickle, which is not read; convert it with transformers"),
        ("pytorch_model.bin.index.json", "a pickle, which is not read; convert it with transformers"),
        ("adapter_config.json", "an adapter of PEFT"),
        ("model_index.json", "a diffusers pipeline"),
        ("model.fp16.safetensors", "the variants fp16"),
        ("model.safetensors.index.bf16.json", "the variants bf16"),
        ("consolidated.safetensors", "consolidated.safetensors; pass the file itself"),
        ("llama.gguf", "llama.gguf, which is not read"),
    ],
)
def test_a_folder_of_another_kind_is_refused_with_what_it_holds(tmp_path, file, message):
    (tmp_path / file).write_text("{}")

    with pytest.raises(CheckpointError, match=rf"holds neither {INDEX} nor model.safetensors, but .*{message}"):
        open_hugging_face(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04\x00\x00\x08\x08", "a zip archive, as torch.save writes"),
        (b"\x80\x02}q\x00.", "a pickle, as torch.save writes"),
        (b"GGUF\x03\x00\x00\x00", "a GGUF file"),
    ],
)
def test_a_file_of_another_kind_is_refused_as_what_it_is(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content + bytes(100))

    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(
            CheckpointError, match=rf"model.safetensors is not a whole safetensors file: it is {message}"
        ):
            open_hugging_face(path)


def test_a_folder_without_a_model_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds neither model.safetensors.index.json nor model.safetensors"):
        open_hugging_face(tmp_path)


def test_a_model_that_is_there_is_never_overwritten(tmp_path):
    write_model(tmp_path, {"w": torch.ones(2)})

    with pytest.raises(ValueError, match=r"already holds a model.safetensors"):
        write_hugging_face(open_hugging_face(tmp_path / "hf"), tmp_path / "hf")


@pytest.mark.parametrize("size", ["5 parsecs", "", "0GB", 0, -1])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match=r"is not a size|too small"):
        write_hugging_face(open_hugging_face(tmp_path), tmp_path / "hf", max_shard_size=size)


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_no_safetensors_file_can_have_is_refused_before_anything_is_written(tmp_path, name):
    dcp.save({name: torch.ones(1)}, checkpoint_id=tmp_path / "torchs", no_dist=True)

    with pytest.raises(ValueError, match="cannot be a name in a safetensors file"):
        write_hugging_face(open_torch_dcp(tmp_path / "torchs"), tmp_path / "hf")

    assert not (tmp_path / "hf").exists()


def test_names_that_share_memory_are_all_written_and_read_by_the_safetensors_library(tmp_path):
    weight = torch.randn(4, 4)

    write_model(tmp_path, {"embed": weight, "head": weight, "rows": weight[1:3], "turned": weight.T})

    read = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(read[name], weight) for name in ("embed", "head"))
    assert torch.equal(read["rows"], weight[1:3])
    assert torch.equal(read["turned"], weight.T)


def test_a_part_of_a_model_that_is_there_is_never_overwritten(tmp_path):
    part = tmp_path / "hf" / "model-00002-of-00002.safetensors"
    part.parent.mkdir()
    part.write_bytes(b"mine")

    with pytest.raises(ValueError, match=r"already holds a model-00002-of-00002.safetensors"):
        write_model(tmp_path, {"w": torch.ones(2), "v": torch.ones(2)}, max_shard_size=8)

    assert [path.name for path in part.parent.iterdir()] == [part.name]
    assert part.read_bytes() == b"mine"


@pytest.mark.parametrize("max_shard_size", [8, "5GB"])
def test_a_read_that_fails_leaves_the_folder_as_it_was(tmp_path, max_shard_size):
    save(tmp_path / "ours", "a", {"v": torch.ones(2), "w": torch.ones(2)})
    checkpoint = open_checkpoint(tmp_path / "ours", "a")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")

    def cut_off(name: str, num_bytes: int) -> None:  # when the first tensor has been written
        for file in (tmp_path / "ours").rglob("*.safetensors"):
            file.write_bytes(b"")

    with pytest.raises(CheckpointError):
        write_hugging_face(
            from_checkpoint(checkpoint), tmp_path / "hf", max_shard_size=max_shard_size, progress=cut_off
        )

    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["config.json"]


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(tmp_path):
    left = ["model.safetensors.unfinished", "model-00001-of-00009.safetensors.unfinished", f"{INDEX}.unfinished"]
    (tmp_path / "hf").mkdir()
    for name in [*left, "thesis.unfinished"]:
        (tmp_path / "hf" / name).write_bytes(b"half")

    write_model(tmp_path, {"w": torch.ones(2)})

    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["model.safetensors", "thesis.unfinished"]
