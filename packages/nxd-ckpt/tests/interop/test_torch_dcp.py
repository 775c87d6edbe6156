import collections
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nxd_ckpt import CheckpointError, list_checkpoints, open_checkpoint, save
from nxd_ckpt.interop import from_checkpoint, open_torch_dcp, read_whole, save_source, write_torch_dcp
from nxd_ckpt.interop.torch_dcp import NxdStorageReader, NxdStorageWriter
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

WEIGHT = torch.arange(48.0).reshape(8, 6)
UNEVEN = torch.arange(15).reshape(5, 3).to(torch.bfloat16)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[Path, list[str]]:
    """What two processes saved through torch, and what they printed."""
    folder = tmp_path_factory.mktemp("dcp")
    command = [sys.executable, str(Path(__file__).with_name("dcp_rank.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return folder, outputs


def test_two_ranks_reshard_and_one_process_reads_the_whole(two_ranks):
    folder, _ = two_ranks  # that each rank loads at any placement is asserted there

    assert [info.tag for info in list_checkpoints(folder / "ours")] == ["step-2", "step-1"]  # only one has a step
    for tag in ("step-1", "step-2"):
        checkpoint = open_checkpoint(folder / "ours", tag)
        assert torch.equal(checkpoint.read("model.weight"), WEIGHT)
        assert torch.equal(checkpoint.read("model.uneven"), UNEVEN)


def test_torchs_async_save_commits_what_was_there_when_it_was_called(two_ranks):
    folder, _ = two_ranks

    assert torch.equal(open_checkpoint(folder / "async", "a").read("model.weight"), WEIGHT)


def test_one_of_several_processes_saves_and_loads_without_the_others_if_torch_says_so(two_ranks):
    folder, _ = two_ranks  # that it loads alone is asserted there

    assert open_checkpoint(folder / "alone").world_size == 1
    assert torch.equal(open_checkpoint(folder / "alone").read("w"), WEIGHT)


def test_a_rank_whose_planner_fails_stops_all_of_them(two_ranks):
    folder, outputs = two_ranks

    assert not (folder / "ours" / "bad").exists()
    for rank, output in enumerate(outputs):
        assert f"rank {rank} heard:" in output
        assert "rank 1: the weights have gone" in output


def test_torchs_own_folder_is_imported_by_one_of_several_processes(two_ranks):
    folder, _ = two_ranks

    checkpoint = open_checkpoint(folder / "imported")
    assert torch.equal(checkpoint.read("model.weight"), WEIGHT)
    assert torch.equal(checkpoint.read("model.uneven"), UNEVEN)
    assert checkpoint.objects == {"optimizer.lr": 0.1, "optimizer.betas": [0.9, 0.95]}
    assert torch.equal(read_whole(open_torch_dcp(folder / "again"), "model.weight"), WEIGHT)


def test_without_process_groups_state_goes_out_and_comes_back(tmp_path, every_dtype, bits):
    state = {"model": dict(every_dtype), "steps": [1, 2], "name": "a run"}
    dcp.save(state, storage_writer=NxdStorageWriter(tmp_path, "a"))

    found = {"model": {n: torch.zeros_like(t) for n, t in every_dtype.items()}, "steps": [0, 0], "name": ""}
    dcp.load(found, storage_reader=NxdStorageReader(tmp_path))

    assert {n: bits(t) for n, t in found["model"].items()} == {n: bits(t) for n, t in every_dtype.items()}
    assert (found["steps"], found["name"]) == ([1, 2], "a run")


def test_what_this_package_saved_is_loaded_by_torch(tmp_path):
    save(tmp_path, "a", {"w": WEIGHT})

    state = {"w": torch.zeros(8, 6)}
    dcp.load(state, storage_reader=NxdStorageReader(tmp_path))

    assert torch.equal(state["w"], WEIGHT)


def test_a_taken_tag_and_a_missing_tensor_are_errors_with_their_reason(tmp_path):
    dcp.save({"w": WEIGHT}, storage_writer=NxdStorageWriter(tmp_path, "a"))

    with pytest.raises(dcp.CheckpointException, match="exists; choose another tag"):
        dcp.save({"w": WEIGHT}, storage_writer=NxdStorageWriter(tmp_path, "a"))
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: v"):
        dcp.load({"v": WEIGHT}, storage_reader=NxdStorageReader(tmp_path))


def test_a_pickled_object_in_our_checkpoint_is_not_run(tmp_path, bomb, exploded):
    dcp.save({"w": WEIGHT, "thing": bomb}, storage_writer=NxdStorageWriter(tmp_path / "ours", "a"))

    with pytest.raises(dcp.CheckpointException, match=r"thing.*asks for posix.system"):
        dcp.load({"w": torch.zeros(8, 6), "thing": None}, storage_reader=NxdStorageReader(tmp_path / "ours"))

    assert not exploded()


# --- folders ---


def test_every_dtype_goes_to_torchs_folder_and_back(tmp_path, every_dtype, bits):
    save(tmp_path / "ours", "a", every_dtype)

    write_torch_dcp(from_checkpoint(open_checkpoint(tmp_path / "ours")), tmp_path / "torchs")

    state = {name: torch.zeros_like(tensor) for name, tensor in every_dtype.items()}
    dcp.load(state, checkpoint_id=tmp_path / "torchs", no_dist=True)
    source = open_torch_dcp(tmp_path / "torchs")
    for name, tensor in every_dtype.items():
        assert bits(state[name]) == bits(tensor), name
        assert bits(read_whole(source, name)) == bits(tensor), name


def test_no_more_than_a_tensor_is_in_memory(tmp_path, own_memory):
    save(tmp_path / "ours", "a", {str(i): torch.full((2**20,), float(i)) for i in range(20)})
    before, peaks = own_memory(), []

    def watch(name: str, num_bytes: int) -> None:
        peaks.append(own_memory() - before)

    write_torch_dcp(from_checkpoint(open_checkpoint(tmp_path / "ours")), tmp_path / "torchs", progress=watch)
    save_source(open_torch_dcp(tmp_path / "torchs"), tmp_path / "back", "a", progress=watch)

    assert len(peaks) == 40
    assert max(peaks) < 30 * 2**20  # of 80 MiB; a tensor has 4, and torch holds it several times


def test_an_object_that_json_cannot_hold_is_left_out_with_a_warning(tmp_path, bomb, exploded):
    dcp.save({"w": WEIGHT, "thing": bomb, "shape": torch.Size([1])}, checkpoint_id=tmp_path / "torchs", no_dist=True)

    with pytest.warns(UserWarning, match="leaving out an object"):
        source = open_torch_dcp(tmp_path / "torchs")

    assert source.objects == {"shape": torch.Size([1])}
    assert not exploded()


def test_a_malicious_metadata_file_is_refused_and_not_run(tmp_path, bomb, exploded):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(bomb))

    with pytest.raises(CheckpointError, match=r"asks for posix.system, and is refused"):
        open_torch_dcp(tmp_path)

    assert not exploded()


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "torch.hub.load", "os.getcwd", "pathlib.os"])
def test_metadata_can_ask_for_nothing_but_its_own_classes(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())

    with pytest.raises(CheckpointError, match=f"asks for {name}"):
        open_torch_dcp(tmp_path)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x04", pickle.dumps({"a": 1}), pickle.dumps([]) * 3])
def test_a_metadata_file_that_is_none_is_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"\.metadata"):
        open_torch_dcp(tmp_path)


def test_a_folder_without_metadata_is_no_whole_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \.metadata; torch writes it last"):
        open_torch_dcp(tmp_path)


def change_metadata(folder: Path, change) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (_StorageInfo("../x.distcp", 0, 9), "is not the plain name"),
        (_StorageInfo("/etc/x.distcp", 0, 9), "is not the plain name"),
        (_StorageInfo("passwd", 0, 9), "is not the plain name"),
        (_StorageInfo("__0_0.distcp", -1, 9), "bytes starting at byte -1"),
        (_StorageInfo("__0_0.distcp", 0, 9, ["zstd"]), "extensions"),
        (collections.OrderedDict(), "relative_path"),
    ],
)
def test_a_place_that_cannot_be_is_refused(tmp_path, place, message):
    dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path, no_dist=True)
    change_metadata(tmp_path, lambda metadata: metadata.storage_data.update({MetadataIndex("w", (0, 0)): place}))

    with pytest.raises(CheckpointError, match=message):
        open_torch_dcp(tmp_path)


def test_a_malicious_tensor_is_refused_and_not_run(tmp_path, bomb, exploded):
    dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    file = next((tmp_path / "torchs").glob("*.distcp"))
    torch.save(bomb, file)
    place = _StorageInfo(file.name, 0, file.stat().st_size)
    change_metadata(tmp_path / "torchs", lambda m: m.storage_data.update({MetadataIndex("w", (0, 0)): place}))

    with pytest.raises(CheckpointError, match=r"asks for posix.system"):
        read_whole(open_torch_dcp(tmp_path / "torchs"), "w")

    assert not exploded()


@pytest.mark.parametrize("shape", [(8, 5), (4, 6)])
def test_a_tensor_that_is_not_what_metadata_says_is_an_error(tmp_path, shape):
    dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path, no_dist=True)

    def lie(metadata) -> None:
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size(shape)

    change_metadata(tmp_path, lie)

    with pytest.raises(CheckpointError, match=r"\.metadata says|no stored part holds"):
        read_whole(open_torch_dcp(tmp_path), "w")


@pytest.mark.parametrize("content", [WEIGHT.to_sparse(), WEIGHT.to("meta"), [1, 2]], ids=["sparse", "meta", "list"])
def test_what_is_no_plain_tensor_is_an_error(tmp_path, content):
    dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path, no_dist=True)
    file = next(tmp_path.glob("*.distcp"))
    torch.save(content, file)
    place = _StorageInfo(file.name, 0, file.stat().st_size)
    change_metadata(tmp_path, lambda metadata: metadata.storage_data.update({MetadataIndex("w", (0, 0)): place}))

    with pytest.raises(CheckpointError, match=r"holds a \w+ for 'w'"):
        read_whole(open_torch_dcp(tmp_path), "w")


def test_a_truncated_file_is_an_error(tmp_path):
    dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path, no_dist=True)
    file = next(tmp_path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])

    with pytest.raises(CheckpointError, match="ends early"):
        read_whole(open_torch_dcp(tmp_path), "w")


def test_a_folder_that_is_not_empty_is_never_written_to(tmp_path):
    dcp.save({"w": WEIGHT}, checkpoint_id=tmp_path / "a", no_dist=True)

    with pytest.raises(ValueError, match="not empty"):
        write_torch_dcp(open_torch_dcp(tmp_path / "a"), tmp_path / "a")
