"""Whatever happens to the files of a checkpoint: loading gives what was saved, or an error that names the file."""

import errno
import hashlib
import json
import os

import pytest
import torch
from nxd_ckpt import CheckpointError, Shard, ShardedTensor, delete, latest, load, open_checkpoint, save
from nxd_ckpt.testing import run_on_threads

WHOLE = torch.arange(24.0).reshape(4, 6)


@pytest.fixture
def root(tmp_path):
    """A checkpoint "t" in two data files, two rows of `w` in each."""

    def save_rows(ranks):
        rows = slice(2 * ranks.rank, 2 * ranks.rank + 2)
        save(tmp_path, "t", {"w": ShardedTensor((4, 6), [Shard(WHOLE[rows], (rows.start, 0))])}, process_group=ranks)

    run_on_threads(save_rows, 2)
    return tmp_path


def data_files(root):
    return sorted((root / "t" / "data").iterdir())


def loaded(root, **options):
    wanted = torch.full((4, 6), -1.0)
    load(root, "t", into={"w": wanted}, **options)
    return wanted


def sign(content):
    """The manifest with a right digest, as a hostile writer would make it."""
    text = json.dumps(content | {"digest": "0" * 64}, separators=(",", ":")).encode()
    return text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1)


def rewrite_manifest(root, change):
    path = root / "t" / "manifest.json"
    content = json.loads(path.read_bytes())
    change(content)
    path.write_bytes(sign(content))


def test_load_every_flipped_bit_of_a_data_file_and_its_header_is_noticed(root):
    for path in data_files(root):
        original = path.read_bytes()
        for position in range(len(original)):
            path.write_bytes(original[:position] + bytes([original[position] ^ 16]) + original[position + 1 :])

            with pytest.raises(CheckpointError, match=rf"{path.name} cannot be read: .* do not match their checksum"):
                loaded(root)
        path.write_bytes(original)


@pytest.mark.parametrize("position", [0, 10, 60])
def test_damage_names_the_file_whose_header_has_a_flipped_bit(root, position):
    path = data_files(root)[1]
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)

    (problem,) = open_checkpoint(root, "t").damage()

    assert f"{path.name} cannot be read: 128 bytes from byte 0 on do not match their checksum" in problem


def test_load_checkpoint_without_checksums_of_headers_is_that_of_an_earlier_version(root):
    rewrite_manifest(root, lambda content: content.pop("headers"))

    assert torch.equal(loaded(root), WHOLE)
    assert open_checkpoint(root, "t").damage() == []


@pytest.mark.parametrize("call", [open_checkpoint, latest, lambda root: load(root, into={"w": torch.zeros(4, 6)})])
@pytest.mark.parametrize("damage", ["flipped bit", "future version", "named pipe", "folder", "dangling link"])
def test_newest_checkpoint_that_is_damaged_is_never_silently_the_older_one(root, damage, call):
    save(root, "newer", {"w": WHOLE + 1}, step=1)
    path = root / "newer" / "manifest.json"
    if damage == "flipped bit":
        path.write_bytes(path.read_bytes()[:-1] + b" ")
    elif damage == "future version":
        path.write_bytes(sign(json.loads(path.read_bytes()) | {"version": 99}))
    else:
        path.unlink()
        {"named pipe": os.mkfifo, "folder": os.mkdir, "dangling link": lambda at: at.symlink_to("gone")}[damage](path)

    with pytest.raises(CheckpointError, match=rf"cannot determine the newest checkpoint in .*: {path} .*fallback=True"):
        call(root)

    wanted = torch.zeros(4, 6)
    with pytest.warns(UserWarning, match=f"skipping an unusable checkpoint: {path}"):
        assert load(root, into={"w": wanted}, fallback=True).tag == "t"
    assert torch.equal(wanted, WHOLE)

    if damage == "flipped bit":
        delete(root, "newer")
        assert latest(root).tag == "t"
    else:  # another process or a newer version may be able to read it
        with pytest.raises(CheckpointError, match=r"cannot be read|upgrade nxd-ckpt"):
            delete(root, "newer")
        assert os.path.lexists(path)


def test_newest_checkpoint_of_a_folder_that_may_not_be_looked_into_is_an_error(root, monkeypatch):
    save(root, "newer", {"w": WHOLE + 1}, step=1)

    def stale(call):
        def refuse(path, *args, **options):
            if "newer" in str(path):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return call(path, *args, **options)

        return refuse

    monkeypatch.setattr(os, "lstat", stale(os.lstat))
    monkeypatch.setattr(os, "open", stale(os.open))

    with pytest.raises(CheckpointError, match=r"newer/manifest.json cannot be read: \[Errno 116\] Stale file handle"):
        open_checkpoint(root)


@pytest.mark.parametrize("shape", [[2**40], [2**50, 4], [2**62, 2**62, 0], [0, 2**62, 2**62]])
def test_open_manifest_that_promises_more_than_its_files_hold_is_refused(root, shape):
    rewrite_manifest(root, lambda content: content["tensors"]["w"].update(shape=shape, chunks=[]))

    with pytest.raises(CheckpointError, match=r"manifest.json cannot be used: ValueError: it has shape"):
        open_checkpoint(root, "t")


def test_read_tensor_whose_files_are_smaller_than_promised_takes_no_memory(root, monkeypatch):
    size = 2**40

    def promise(content):
        file = next(iter(content["files"]))
        content["files"][file] = size
        chunk = {"file": file, "offset": 0, "bytes": size, "box": [[0], [size]], "xxh3": ["0" * 16] * (size >> 24)}
        content["tensors"]["w"] = {"dtype": "U8", "shape": [size], "chunks": [chunk]}

    rewrite_manifest(root, promise)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: pytest.fail(f"took memory for {shape}"))

    with pytest.raises(CheckpointError, match=rf"has \d+ bytes, expected {size}"):
        open_checkpoint(root, "t").read("w")


def test_load_without_verification_takes_a_flipped_bit_for_data(root):
    """So it is the checksum that notices."""
    path = data_files(root)[0]
    content = bytearray(path.read_bytes())
    content[-2] ^= 16
    path.write_bytes(content)

    assert not torch.equal(loaded(root, verify=False), WHOLE)
    with pytest.raises(CheckpointError, match=path.name):
        loaded(root)


def test_load_every_flipped_bit_of_the_manifest_is_refused(root):
    path = root / "t" / "manifest.json"
    original = path.read_bytes()
    for position in range(len(original)):
        path.write_bytes(original[:position] + bytes([original[position] ^ 1]) + original[position + 1 :])

        with pytest.raises(CheckpointError, match=r"manifest.json (is damaged|is not an nxd-ckpt manifest)"):
            open_checkpoint(root, "t")


def test_load_swapped_data_files_are_noticed(root):
    first, second = data_files(root)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])

    with pytest.raises(CheckpointError, match=first.name):
        loaded(root)


def test_load_data_file_of_another_save_of_the_same_size_is_noticed(root):
    (path, _), stale = data_files(root), WHOLE[:2] + 1
    content = path.read_bytes()
    path.write_bytes(content[: -stale.nbytes] + stale.numpy().tobytes())

    with pytest.raises(CheckpointError, match=path.name):
        loaded(root)


@pytest.mark.parametrize("size", [0, 1, 7, 100])
def test_load_truncated_data_file_is_refused_before_the_destination_changes(root, size):
    path = data_files(root)[1]
    original = path.read_bytes()
    path.write_bytes(original[:size])
    wanted = torch.full((4, 6), -1.0)

    with pytest.raises(CheckpointError, match=rf"{path.name} has {size} bytes, expected {len(original)}"):
        load(root, "t", into={"w": wanted})

    assert (wanted == -1).all()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_load_link_in_place_of_data_is_not_followed(root, tmp_path_factory, kind):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "moved"
    path = data_files(root)[0] if kind == "file" else root / "t" / "data"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)

    with pytest.raises(CheckpointError, match=r"link|Not a directory"):
        loaded(root)


def test_load_named_pipe_in_place_of_data_does_not_hang(root):
    path = data_files(root)[0]
    path.unlink()
    os.mkfifo(path)

    with pytest.raises(CheckpointError, match=rf"{path.name} cannot be read: .* is not a regular file"):
        loaded(root)


def test_load_manifest_that_is_a_named_pipe_does_not_hang(root):
    path = root / "t" / "manifest.json"
    path.unlink()
    os.mkfifo(path)

    with pytest.raises(CheckpointError, match=r"there is no checkpoint 't'|is not a file|cannot be read"):
        loaded(root)


@pytest.mark.parametrize(
    "name",
    [
        "../../../etc/passwd",
        "/etc/passwd",
        "data/../../x.safetensors",
        "data/" + "a" * 32 + "-00000-0.safetensors/../x",
        "data//" + "a" * 32 + "-00000-0.safetensors",
        "data/" + "a" * 32 + "-00000-0.safetensors\x00",
        "data/" + "a" * 32 + "-00000-0.safetensors\n",
        ".staging/" + "a" * 32 + "-00000-0.safetensors",
        "data/" + "A" * 32 + "-00000-0.safetensors",
        "data/" + "a" * 32 + "-\u0660\u0660\u0660\u0660\u0660-0.safetensors",
    ],
)
def test_open_manifest_that_names_a_file_elsewhere_is_refused(root, name):
    rewrite_manifest(root, lambda content: content["files"].update({name: 3}))

    with pytest.raises(CheckpointError, match=r"manifest.json cannot be used: .*name"):
        open_checkpoint(root, "t")


def first_chunk(**fields):
    return lambda content: content["tensors"]["w"]["chunks"][0].update(fields)


def tensor(**fields):
    return lambda content: content["tensors"]["w"].update(fields)


@pytest.mark.parametrize(
    "change",
    [
        first_chunk(offset=2**63),
        first_chunk(offset=10**400),
        first_chunk(offset=1e3),
        first_chunk(offset=True),
        first_chunk(bytes=2**64),
        first_chunk(box=[[0, 0], [2**40, 2**40]]),
        first_chunk(box=[[-1, 0], [2, 6]]),
        first_chunk(box=[[0] * 1000, [1] * 1000]),
        tensor(shape=[2**62, 2**62]),
        tensor(shape=[4, 6.0]),
        tensor(shape=[1] * 1000),
        tensor(chunks={}),
        tensor(chunks=[None]),
        lambda content: content.update(committed_at="now"),
        lambda content: content.update(world_size=10**400),
        lambda content: content.update(world_size=-1),
        lambda content: content.update(step=10**400),
        lambda content: content.update(rank_objects={"x": 1}),
        lambda content: content.update(tensors=[1]),
        lambda content: content["files"].update(dict.fromkeys(content["files"], 10**400)),
    ],
)
def test_load_manifest_with_impossible_numbers_is_refused(root, change):
    rewrite_manifest(root, change)

    with pytest.raises(CheckpointError):
        loaded(root)


def test_load_overlapping_chunks_that_are_sound_give_the_same_data(root):
    """Replicas may be stored twice; of chunks that overlap each element is read from one."""

    def repeat(content):
        content["tensors"]["w"]["chunks"] *= 2

    rewrite_manifest(root, repeat)

    assert torch.equal(loaded(root), WHOLE)


def test_load_many_chunks_that_overlap_are_planned_quickly(root):
    def repeat(content):
        content["tensors"]["w"]["chunks"] = content["tensors"]["w"]["chunks"][:1] * 20_000

    rewrite_manifest(root, repeat)

    with pytest.raises(CheckpointError, match="lacks elements"):
        loaded(root)


def test_open_manifest_with_a_key_twice_is_refused(root):
    path = root / "t" / "manifest.json"
    content = json.loads(path.read_bytes())
    text = json.dumps(content | {"digest": "0" * 64}, separators=(",", ":"))
    text = (text[:-1] + ',"step":7}').encode()
    path.write_bytes(text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1))

    with pytest.raises(CheckpointError, match="cannot be used: ValueError: it has a key more than once: 'step'"):
        open_checkpoint(root, "t")


@pytest.mark.parametrize("depth", [1_000, 200_000])
def test_open_manifest_nested_deeply_is_refused(root, depth):
    path = root / "t" / "manifest.json"
    content = json.loads(path.read_bytes())
    text = json.dumps(content | {"digest": "0" * 64, "objects": None}, separators=(",", ":"))
    text = text.replace('"objects":null', '"objects":' + "[" * depth + "]" * depth).encode()
    path.write_bytes(text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1))

    with pytest.raises(CheckpointError, match="cannot be used: "):
        open_checkpoint(root, "t")


def test_load_data_that_would_run_if_unpickled_does_not(root, tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    path = data_files(root)[0]
    size = path.stat().st_size
    path.write_bytes(pickle.dumps(Bomb()).ljust(size, b"\0")[:size])
    with pytest.raises(CheckpointError, match=path.name):
        loaded(root)
    (root / "t" / "manifest.json").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="is not an nxd-ckpt manifest"):
        loaded(root)

    assert not (tmp_path / "exploded").exists()
