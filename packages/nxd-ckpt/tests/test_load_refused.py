"""A checkpoint that does not fit or is damaged: one error that says so, and the destination stays as it was."""

import hashlib
import json
import shutil

import pytest
import torch
import xxhash
from nxd_ckpt import (
    CheckpointError,
    MismatchError,
    Shard,
    ShardedTensor,
    list_checkpoints,
    load,
    manifest_text,
    open_checkpoint,
    save,
)
from nxd_ckpt.manifest_text import decode, encode
from nxd_ckpt.testing import outcomes_on_threads

STATE = {"a": torch.ones(4, 2), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(1)}


@pytest.fixture
def root(tmp_path):
    save(tmp_path, "t", STATE)
    return tmp_path


def data_file(root):
    (path,) = (root / "t" / "data").iterdir()
    return path


def rewrite_manifest(root, change):
    """Changes the manifest's content and gives it a right digest again, as a hostile writer would."""
    path = root / "t" / "manifest.json"
    content = json.loads(path.read_bytes())
    change(content)
    text = json.dumps(content | {"digest": "0" * 64}, separators=(",", ":")).encode()
    path.write_bytes(resign(text))


def resign(text):
    return text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1)


def test_load_differences_are_listed_all_at_once_and_on_every_rank(root):
    into = [
        {"a": torch.zeros(2, 4), "b": torch.zeros(3)},
        {"a": torch.zeros(2, 4), "d": torch.zeros(1)},
    ]

    outcomes = outcomes_on_threads(lambda ranks: load(root, into=into[ranks.rank], process_group=ranks), 2)

    assert isinstance(outcomes[0], CheckpointError)
    assert str(outcomes[0]) == str(outcomes[1])
    assert str(outcomes[0]).splitlines() == [
        f"loading checkpoint 't' from {root} failed: the checkpoint does not match the request",
        "  'a' is torch.float32 [4, 2] as [0:4,0:2]; requested: torch.float32 [2, 4] as [0:2,0:4]",
        "  'b' is torch.bfloat16 [3] as [0:3]; requested: torch.float32 [3] as [0:3] (rank 0)",
        "  (pass convert_dtype=True to convert) (rank 0)",
        "  'd' torch.float32 [1] was requested but is not in the checkpoint (rank 1)",
        "  'c' torch.float32 [1] as [0:1] is in the checkpoint but was not requested",
        "  (pass strict=False to leave these out)",
    ]
    assert not any(tensor.any() for wanted in into for tensor in wanted.values())


def test_load_many_differing_names_are_counted_by_their_first_part(tmp_path):
    parts = ("bias", "gate", "scale", "shift", "weight")
    save(tmp_path, "t", {f"model.{part}": torch.ones(2) for part in parts} | {"optimizer/step": torch.ones(1)})

    with pytest.raises(MismatchError) as caught:
        load(tmp_path, into={f"net.{part}": torch.zeros(2) for part in parts})

    assert str(caught.value).splitlines()[1:] == [
        "  5 tensors 'net.*', such as 'net.bias' torch.float32 [2], were requested but are not in the checkpoint",
        "  5 tensors 'model.*', such as 'model.bias' torch.float32 [2] as [0:2], "
        "are in the checkpoint but were not requested",
        "  'optimizer/step' torch.float32 [1] as [0:1] is in the checkpoint but was not requested",
        "  (pass strict=False to leave these out)",
    ]


def test_load_without_strict_still_refuses_missing_names(root):
    with pytest.raises(CheckpointError, match=r"'d' torch.float32 \[1\] was requested but is not in the checkpoint"):
        load(root, into={"d": torch.zeros(1)}, strict=False)


def test_load_elements_that_no_chunk_holds_are_refused_before_the_destination_changes(root):
    def lose_second_half(content):
        chunk = content["tensors"]["a"]["chunks"][0]
        chunk["box"], chunk["bytes"] = [[0, 0], [2, 2]], 16
        chunk["xxh3"] = [xxhash.xxh3_64_hexdigest(torch.ones(2, 2).numpy().tobytes())]

    rewrite_manifest(root, lose_second_half)
    wanted = {"a": torch.zeros(4, 2)}

    with pytest.raises(CheckpointError, match=r"lacks elements:\n  'a': no data for \[2:4,0:2\]"):
        load(root, into=wanted, strict=False)

    assert not wanted["a"].any()
    first_half = ShardedTensor((4, 2), [Shard(wanted["a"][:2], (0, 0))])
    load(root, into={"a": first_half}, strict=False)
    assert wanted["a"][:2].all()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"has \d+ bytes, expected \d+"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"has \d+ bytes, expected \d+"),
    ],
    ids=["missing", "truncated", "extended"],
)
def test_load_damaged_data_file_is_refused_by_all_ranks_before_destinations_change(root, damage, message):
    damage(data_file(root))
    wanted = [{"a": torch.zeros(4, 2)}, {}]

    outcomes = outcomes_on_threads(
        lambda ranks: load(root, into=wanted[ranks.rank], strict=False, process_group=ranks), 2
    )

    assert str(outcomes[0]) == str(outcomes[1])
    with pytest.raises(CheckpointError, match=rf"failed on 1 of 2 ranks\n  rank 0: data file .*{message}"):
        raise outcomes[0]
    assert not wanted[0]["a"].any()


def test_load_data_file_replaced_by_a_link_is_refused(root, tmp_path):
    path = data_file(root)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CheckpointError, match=r"data file .* cannot be read: .*symbolic link"):
        open_checkpoint(root).read("a")


@pytest.mark.parametrize("position", [0, 20, 200, -1])
def test_load_manifest_with_one_changed_byte_is_refused(root, position):
    path = root / "t" / "manifest.json"
    text = bytearray(path.read_bytes())
    text[position] ^= 1
    path.write_bytes(text)

    with pytest.raises(CheckpointError, match=r"manifest.json is (damaged|not an nxd-ckpt manifest)"):
        load(root, "t", into={})


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 100_000, b'{"digest":1}'])
def test_load_other_text_in_place_of_the_manifest_is_refused(root, text):
    (root / "t" / "manifest.json").write_bytes(text)

    with pytest.raises(CheckpointError, match="is not an nxd-ckpt manifest, or its beginning is damaged"):
        load(root, "t", into={})


def set_chunk(**fields):
    return lambda content: content["tensors"]["a"]["chunks"][0].update(fields)


def set_fields(**fields):
    return lambda content: content.update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_fields(version=4), "it has format version 4, but this nxd-ckpt reads 2 and 3; upgrade nxd-ckpt"),
        (set_fields(format="other"), "it has format 'other'"),
        (set_fields(save_id="../x"), "it has save_id '../x'"),
        (set_fields(step=-1), "it has step -1"),
        (set_fields(files={"../../etc/passwd": 3}), "it has data file name '../../etc/passwd'"),
        (set_fields(files=None), "AttributeError"),
        (set_fields(tensors={"a": {"dtype": "F128", "shape": [], "chunks": []}}), "it has dtype 'F128' of 'a'"),
        (set_fields(tensors={"a": {"dtype": "F32", "shape": [-1], "chunks": []}}), "it has shape"),
        (set_chunk(file="manifest.json"), "it has chunk"),
        (set_chunk(offset=10**9), "it has chunk"),
        (set_chunk(offset=-8), "it has chunk"),
        (set_chunk(bytes=31), "it has chunk"),
        (set_chunk(xxh3=[]), "it has chunk"),
        (set_chunk(xxh3=["x" * 16]), "it has chunk"),
        (set_chunk(xxh3=["0" * 16] * 2), "it has chunk"),
        (set_chunk(file="data/../x"), "it has chunk"),
        (set_fields(world_size="2"), "it has world_size '2'"),
        (set_fields(committed_at=10**400), "it has committed_at 1000"),
        (set_fields(committed_at=float("nan")), "it has committed_at nan"),
        (set_fields(committed_at="inf"), "it has committed_at 'inf'"),
        (set_fields(rank_objects={"01": 1}), "it has rank_objects of rank '01'"),
        (set_fields(extra={"../x": {"file": "extra/y", "xxh3": []}}), "it has extra file '../x'"),
        (set_fields(mesh=json.loads("[" * 70 + "]" * 70)), "is nested more than 64 deep"),
        (set_chunk(box=[[1, 0], [4, 2]]), "it has chunk"),
        (set_chunk(box=[[0], [4, 2]]), "it has chunk"),
        (set_chunk(box=3), "TypeError"),
    ],
)
def test_load_manifest_that_says_something_impossible_is_refused(root, change, message):
    rewrite_manifest(root, change)

    with pytest.raises(CheckpointError, match=rf"manifest.json cannot be used: .*{message}"):
        load(root, "t", into={})


def test_decode_deeply_nested_manifest_is_refused(root):
    deep = b'{"digest":"' + b"0" * 64 + b'","a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"

    with pytest.raises(CheckpointError, match="cannot be used: RecursionError"):
        decode(resign(deep), "here")


def test_decode_gives_back_what_was_encoded(root):
    manifest = decode((root / "t" / "manifest.json").read_bytes(), "here")

    assert decode(encode(manifest), "there") == manifest


def test_load_ranks_that_find_different_saves_under_a_tag_are_refused(tmp_path):
    for rank in (0, 1):
        save(tmp_path / str(rank), "t", STATE)

    outcomes = outcomes_on_threads(
        lambda ranks: load(tmp_path / str(ranks.rank), "t", into={}, strict=False, process_group=ranks), 2
    )

    for outcome in outcomes:
        with pytest.raises(CheckpointError, match="ranks found different saves under this tag"):
            raise outcome


def test_load_absent_tag_says_which_there_are(root):
    shutil.copytree(root / "t", root / "u")

    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'v' in .*; available: t, u"):
        load(root, "v", into={})


def test_load_latest_of_nothing_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="there is no complete checkpoint in"):
        load(tmp_path / "absent", into={})


def test_list_checkpoints_survives_a_manifest_with_an_impossible_time(root):
    save(root, "u", STATE)
    rewrite_manifest(root, set_fields(committed_at=10**400))

    with pytest.warns(UserWarning, match="it has committed_at 1000"):
        assert [info.tag for info in list_checkpoints(root)] == ["u"]


@pytest.mark.parametrize("verify", [True, False])
def test_load_tensors_that_lie_in_the_same_bytes_each_get_their_own_type_and_shape(root, verify):
    def add_views_of_b(content):
        (chunk,) = content["tensors"]["b"]["chunks"]
        for name, dtype, shape in (("as-int", "I16", [3]), ("as-column", "BF16", [3, 1])):
            box = [[0] * len(shape), shape]
            content["tensors"][name] = {"dtype": dtype, "shape": shape, "chunks": [chunk | {"box": box}]}

    rewrite_manifest(root, add_views_of_b)
    into = {name: torch.zeros_like(value) for name, value in STATE.items()}
    into |= {"as-int": torch.zeros(3, dtype=torch.int16), "as-column": torch.zeros(3, 1, dtype=torch.bfloat16)}

    load(root, "t", into=into, verify=verify)

    assert torch.equal(into["b"], STATE["b"])
    assert torch.equal(into["as-int"], STATE["b"].view(torch.int16))
    assert torch.equal(into["as-column"], STATE["b"][:, None])


def test_save_of_a_manifest_larger_than_readers_take_leaves_the_old_one(root, monkeypatch):
    monkeypatch.setattr(manifest_text, "MAX_MANIFEST_BYTES", 2000)

    with pytest.raises(CheckpointError, match="bytes, the limit is 2000; pass large objects as extra files"):
        save(root, "t", STATE, objects="x" * 2000, overwrite=True)

    assert open_checkpoint(root, "t").objects is None
