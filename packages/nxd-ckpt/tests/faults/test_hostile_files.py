"""A corpus of hostile checkpoints of each format: each is one line of error, runs nothing and leaves its folder alone.

Where a reader has no use for what was changed, and no checksum, the tensors are as they were saved.
"""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from .formats_to_break import KINDS, TENSORS, Bomb, bomb, convert, make, mistakes_in


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A sound checkpoint of each format."""
    return {kind: make(kind, tmp_path_factory.mktemp("sound")) for kind in KINDS}


@pytest.fixture
def broken(originals, tmp_path, deadline):
    """`broken(kind, change)` changes a copy of a checkpoint, reads it, and returns exit code and stderr."""

    def check(kind, change):
        folder = tmp_path / "inside" / kind
        shutil.copytree(originals[kind], folder)
        change(folder)
        before = sorted(os.listdir(tmp_path))
        target = tmp_path / "inside" / "target"
        code, stderr = convert(kind, folder, target, deadline(60))
        assert mistakes_in(kind, code, stderr, target) == []
        assert sorted(os.listdir(tmp_path)) == before
        return code, stderr

    return check


def replaced_by(make_it):
    def change(file):
        file.unlink()
        make_it(file)

    return change


def rewritten(content_of):
    return lambda file: file.write_bytes(content_of(file.read_bytes()))


def zip_of(content_of_pickle):
    """A file as torch saves it, with another pickle in it."""

    def make_it(file):
        stream = io.BytesIO()
        torch.save({"w": torch.ones(1)}, stream)
        with zipfile.ZipFile(stream) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in entries.items():
                archive.writestr(name, content_of_pickle(file) if name.endswith("data.pkl") else content)

    return make_it


def zip_with_a_name_outside(file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("../../../exploded/data.pkl", b"\x80\x02}.")


def place_of_bomb(file):
    """Outside of the checkpoint, where `broken` sees it."""
    return Path(str(file).partition("/inside/")[0]) / "exploded"


def torch_bomb(file, **options):
    stream = io.BytesIO()
    torch.save(Bomb(place_of_bomb(file)), stream, **options)
    return stream.getvalue()


# What can be done to any file.
TO_ANY_FILE = {
    "missing": lambda file: file.unlink(),
    "empty": rewritten(lambda content: b""),
    "one byte": rewritten(lambda content: content[:1]),
    "half": rewritten(lambda content: content[: len(content) // 2]),
    "last byte missing": rewritten(lambda content: content[:-1]),
    "zeros": rewritten(lambda content: bytes(len(content))),
    "ones": rewritten(lambda content: b"\xff" * len(content)),
    "one byte more at its front": rewritten(lambda content: b"\0" + content),
    "twice": rewritten(lambda content: content * 2),
    "first bit flipped": rewritten(lambda content: bytes([content[0] ^ 1]) + content[1:]),
    "named pipe": replaced_by(os.mkfifo),
    "folder": replaced_by(lambda file: file.mkdir()),
    "link to itself": replaced_by(lambda file: file.symlink_to(file.name)),
    "link to a device": replaced_by(lambda file: file.symlink_to("/dev/zero")),
    "link to nothing": replaced_by(lambda file: file.symlink_to("../../../../nothing")),
    "pickle that runs code": lambda file: file.write_bytes(bomb(place_of_bomb(file))),
    "torch file that runs code": lambda file: file.write_bytes(torch_bomb(file)),
    "old torch file that runs code": lambda file: file.write_bytes(
        torch_bomb(file, _use_new_zipfile_serialization=False)
    ),
    "pickle in itself": zip_of(lambda file: b"\x80\x02]q\x00h\x00a."),
    "pickle of very many lists": zip_of(lambda file: b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."),
    "pickle that asks for getattr": zip_of(lambda file: b"cbuiltins\ngetattr\n(cos\nsystem\nS'name'\ntR."),
    "pickle with a long that is not there": zip_of(lambda file: b"\x80\x02\x8b\xff\xff\xff\x7f."),
    "pickle with text that is not there": zip_of(lambda file: b"\x80\x04\x8d" + b"\xff" * 7 + b"\x0f."),
    "archive with a name outside": zip_with_a_name_outside,
    "JSON that is very deep": lambda file: file.write_bytes(b"[" * 200_000),
    "JSON with a number that is very long": lambda file: file.write_bytes(b'{"w": ' + b"9" * 10_000 + b"}"),
    "no Unicode": lambda file: file.write_bytes(b'{"\xff\xfe": 1}'),
}

FILES = {
    "nxd": ["t/manifest.json", "t/data/*"],
    "hf": ["*.index.json", "model-00001*"],
    "dcp": [".metadata", "__0_0.distcp"],
    "neuronx": ["t/model/*tp_rank_01*.pt", "t/done"],
    "neuronx-xser": [
        "t/model/*tp_rank_01*00.pt",
        "t/model/*tp_rank_01*.info.pt",
        "t/model/*tp_rank_01*.tensors/tensor_0.pt",
    ],
    "neuronx-v1": ["tp_rank_01*/checkpoint.pt"],
}


# A named pipe of each file quickly; all of the others take a minute or two.
@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] * (what != "named pipe")) for what in TO_ANY_FILE]
)
@pytest.mark.parametrize(("kind", "pattern"), [(kind, pattern) for kind in FILES for pattern in FILES[kind]])
def test_checkpoint_with_a_hostile_file_is_one_line_of_error_or_unharmed(broken, kind, pattern, what):
    def change(folder):
        (file, *_) = sorted(folder.glob(pattern))
        TO_ANY_FILE[what](file)

    broken(kind, change)


def header(**changes):
    """Changes the entry of the first tensor in the header of a safetensors file, or the length of it."""

    def change(folder):
        file = sorted(folder.glob("*.safetensors"))[0]
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + length])
        name = next(name for name in entries if name != "__metadata__")
        entries[name].update(changes)
        text = json.dumps(entries).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return change


def index(change_map):
    def change(folder):
        (file,) = folder.glob("*.index.json")
        content = json.loads(file.read_bytes())
        content["weight_map"] = change_map(content["weight_map"])
        file.write_text(json.dumps(content))

    return change


def metadata(change_it):
    def change(folder):
        content = pickle.loads((folder / ".metadata").read_bytes())
        change_it(content)
        (folder / ".metadata").write_bytes(pickle.dumps(content))

    return change


def chunk_of_a(**changes):
    return metadata(lambda content: vars(content.state_dict_metadata["a.weight"].chunks[0]).update(changes))


def place_of_a(**changes):
    return metadata(lambda content: vars(content.storage_data[MetadataIndex("a.weight", (0, 0))]).update(changes))


def rank_file(content):
    def change(folder):
        file = sorted(folder.glob("t/model/*.pt"))[0]
        torch.save(content, file)

    return change


def named(name):
    def change(folder):
        file = sorted(folder.glob("t/model/*.pt"))[0]
        file.rename(file.with_name(name))

    return change


SPECIAL = [
    ("hf", "shape of 2**40", header(shape=[2**40])),
    ("hf", "shape that overflows", header(shape=[2**33, 2**33])),
    ("hf", "shape below zero", header(shape=[-8, -6])),
    ("hf", "shape of truth", header(shape=[True])),
    ("hf", "shape of very many dimensions", header(shape=[1] * 100_000)),
    ("hf", "offsets backwards", header(data_offsets=[192, 0])),
    ("hf", "offsets beyond the file", header(data_offsets=[0, 2**60])),
    ("hf", "offsets that are three", header(data_offsets=[0, 1, 2])),
    ("hf", "type that is a list", header(dtype=["F32"])),
    ("hf", "index that names a path", index(lambda names: dict.fromkeys(names, "../secret.safetensors"))),
    ("hf", "index that names a file of the system", index(lambda names: dict.fromkeys(names, "/etc/passwd"))),
    ("hf", "index that is a list", index(list)),
    ("hf", "index with a tensor more", index(lambda names: names | {"x": next(iter(names.values()))})),
    ("dcp", "chunk of 2**40", chunk_of_a(sizes=torch.Size([2**40, 2**20]))),
    ("dcp", "chunk at a place below zero", chunk_of_a(offsets=torch.Size([-1, 0]))),
    ("dcp", "chunk at a text", chunk_of_a(offsets="ab")),
    ("dcp", "chunk without sizes", chunk_of_a(sizes=None)),
    ("dcp", "file outside", place_of_a(relative_path="../x.distcp")),
    ("dcp", "file of the system", place_of_a(relative_path="/etc/passwd")),
    ("dcp", "offset beyond the file", place_of_a(offset=2**62)),
    ("dcp", "offset that no file can have", place_of_a(offset=2**70)),
    ("dcp", "length of 2**60", place_of_a(length=2**60)),
    ("dcp", "size of 2**60", metadata(lambda m: vars(m.state_dict_metadata["a.weight"]).update(size=[2**60] * 2))),
    ("dcp", "no tensors", metadata(lambda m: vars(m).update(state_dict_metadata=None))),
    ("dcp", "no places", metadata(lambda m: vars(m).update(storage_data={}))),
    ("dcp", "type that is none", metadata(lambda m: vars(m.state_dict_metadata["count"]).update(properties=None))),
    ("neuronx", "model that is a list", rank_file([1, 2])),
    ("neuronx", "model that is a number", rank_file(7)),
    ("neuronx", "model without tensors", rank_file({})),
    ("neuronx", "tensor that is sparse", rank_file({"a.weight": TENSORS["a.weight"].to_sparse()})),
    ("neuronx", "tensor without data", rank_file({"a.weight": torch.empty(4, 6, device="meta")})),
    ("neuronx", "tensor of another shape", rank_file(TENSORS)),
    ("neuronx", "tensor that is expanded to 2**40", rank_file({"a.weight": torch.zeros(1).expand(2**40)})),
    ("neuronx", "name of a tensor that is a number", rank_file({7: torch.ones(1)})),
    ("neuronx", "rank of a million", named("dp_rank_00_tp_rank_1000000_pp_rank_00.pt")),
    ("neuronx", "rank of very many digits", named(f"dp_rank_00_tp_rank_{'9' * 200}_pp_rank_00.pt")),
]


@pytest.mark.parametrize(("kind", "change"), [(k, c) for k, _, c in SPECIAL], ids=[f"{k}-{n}" for k, n, _ in SPECIAL])
def test_checkpoint_that_says_what_cannot_be_is_one_line_of_error(broken, kind, change):
    code, _ = broken(kind, change)

    assert code == 2


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_as_it_was_written_is_read(broken, kind):
    assert broken(kind, lambda folder: None)[0] == 0
