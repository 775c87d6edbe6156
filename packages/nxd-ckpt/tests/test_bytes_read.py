"""Each rank reads the bytes that it needs and no others, or their blocks to verify them; counted at the system call."""

import os
import threading

import nxd_ckpt.checksums
import nxd_ckpt.chunk_reads
import nxd_ckpt.reader
import nxd_ckpt.tensor_bytes
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from nxd_ckpt import Shard, ShardedTensor, load, open_checkpoint, save
from nxd_ckpt.checksums import BlockCheck


@pytest.fixture
def bytes_read(monkeypatch):
    """A list that grows by the size of each read from a data file."""
    sizes = []
    preadv = os.preadv

    def counting(fd, buffers, offset):
        count = preadv(fd, buffers, offset)
        sizes.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    return sizes


def test_next_request_to_an_object_store_is_under_way_while_one_is_verified(monkeypatch):
    monkeypatch.setattr(nxd_ckpt.checksums, "BLOCK_BYTES", 2**16)
    monkeypatch.setattr(nxd_ckpt.reader, "_REQUEST_BYTES", 2**16)
    whole, columns = torch.randn(512, 256), torch.zeros(512, 128)
    save("memory://ahead", "a", {"w": whole})
    cat_ranges, update = MemoryFileSystem.cat_ranges, BlockCheck.update
    requests = [threading.Event() for _ in range(8)]  # for as many blocks
    asked, verified = iter(requests), iter([*requests[1:], requests[-1]])

    def asking(*args, **options):
        if ".safetensors" in str(args):  # not the manifests
            next(asked).set()
        return cat_ranges(*args, **options)

    def verifying(check, part):
        if len(part) == 2**16:  # not the header
            assert next(verified).wait(60)
        update(check, part)

    monkeypatch.setattr(MemoryFileSystem, "cat_ranges", asking)
    monkeypatch.setattr(BlockCheck, "update", verifying)
    load("memory://ahead", into={"w": ShardedTensor((512, 256), [Shard(columns, (0, 128))])})

    assert torch.equal(columns, whole[:, 128:])
    assert requests[-1].is_set()


def test_blocks_pass_in_pieces_also_where_these_cut_rows_and_types(tmp_path, monkeypatch):
    monkeypatch.setattr(nxd_ckpt.checksums, "BLOCK_BYTES", 2**12)
    monkeypatch.setattr(nxd_ckpt.chunk_reads, "_PIECE_BYTES", 2**8)
    saved = {"w": torch.randn(7, 5, 123), "half": torch.randn(999).to(torch.bfloat16), "z": torch.randn(33, 33) + 1j}
    save(tmp_path, "t", saved)
    middle, double = torch.zeros(3, 5, 40), torch.zeros(999, dtype=torch.float64)

    load(
        tmp_path,
        into={"w": ShardedTensor((7, 5, 123), [Shard(middle, (2, 0, 50))]), "half": double},
        strict=False,
        convert_dtype=True,
    )

    assert torch.equal(middle, saved["w"][2:5, :, 50:90])
    assert torch.equal(double, saved["half"].double())
    assert torch.equal(open_checkpoint(tmp_path).read("z"), saved["z"])


def test_two_tensors_in_one_memory_are_verified_before_the_second_replaces_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(nxd_ckpt.checksums, "BLOCK_BYTES", 2**12)
    saved = {"a": torch.randn(3000), "b": torch.randn(3000), "c": torch.randn(3000)}
    save(tmp_path, "t", saved)
    both, alone = torch.zeros(3000), torch.zeros(3000)

    load(tmp_path, into={"a": both, "b": both, "c": alone})

    assert torch.equal(both, saved["b"])
    assert torch.equal(alone, saved["c"])


@pytest.mark.parametrize("root", ["folder", "memory://default-device"])
@pytest.mark.parametrize("verify", [True, False])
def test_saves_and_loads_of_tensors_on_the_cpu_do_not_mind_the_default_device(tmp_path, root, verify):
    root = tmp_path if root == "folder" else root
    whole, columns, double = torch.randn(300, 70), torch.zeros(300, 20), torch.zeros(300, 70, dtype=torch.float64)

    with torch.device("meta"):
        save(root, "t", {"w": whole, "v": whole.t()}, overwrite=True)
        into = {"w": ShardedTensor((300, 70), [Shard(columns, (0, 5))]), "v": double.t()}
        load(root, into=into, verify=verify, convert_dtype=True)
        read = open_checkpoint(root, verify=verify).read("v")

    assert torch.equal(columns, whole[:, 5:25])
    assert torch.equal(double, whole.double())
    assert torch.equal(read, whole.t())


def test_one_chunk_in_many_boxes(tmp_path):
    whole, rows = torch.randn(1000, 30), torch.zeros(1000, 30)
    save(tmp_path, "t", {"w": whole})

    load(tmp_path, into={"w": ShardedTensor((1000, 30), [Shard(rows[i : i + 1], (i, 0)) for i in range(1000)])})

    assert torch.equal(rows, whole)


def test_load_rows_reads_only_these_rows(tmp_path, rows_of, bytes_read):
    save(tmp_path, "a", {"w": torch.randn(64, 1024)})

    load(tmp_path, into={"w": rows_of(torch.zeros(64, 1024), 1, 4)}, verify=False)

    assert sum(bytes_read) == 16 * 1024 * 4
    assert len(bytes_read) == 1


def test_load_columns_wide_apart_reads_only_these_columns(tmp_path, columns_of, bytes_read):
    save(tmp_path, "a", {"w": torch.randn(8, 8192)})

    load(tmp_path, into={"w": columns_of(torch.zeros(8, 8192), 2, 4)}, verify=False)

    assert sum(bytes_read) == 8 * 2048 * 4
    assert len(bytes_read) == 8


def test_load_columns_closer_than_a_page_reads_over_the_gaps_in_one_go(tmp_path, columns_of, bytes_read):
    save(tmp_path, "a", {"w": torch.randn(64, 128)})

    load(tmp_path, into={"w": columns_of(torch.zeros(64, 128), 0, 2)}, verify=False)

    assert len(bytes_read) == 1
    assert sum(bytes_read) == (63 * 128 + 64) * 4


def test_load_rows_verified_reads_the_blocks_that_they_touch(tmp_path, monkeypatch, bytes_read):
    monkeypatch.setattr(nxd_ckpt.checksums, "BLOCK_BYTES", 4096)
    whole, rows = torch.randn(64, 256), torch.zeros(10, 256)
    save(tmp_path, "a", {"w": whole})

    load(tmp_path, into={"w": ShardedTensor((64, 256), [Shard(rows, (6, 0))])})

    assert torch.equal(rows, whole[6:16])
    assert sum(bytes_read) == 128 + 3 * 4096  # the header, and rows 4 to 15


def test_load_one_tensor_of_many_reads_no_other(tmp_path, bytes_read):
    save(tmp_path, "a", {f"w{i}": torch.randn(100) for i in range(5)})

    load(tmp_path, into={"w3": torch.zeros(100)}, strict=False, verify=False)

    assert sum(bytes_read) == 400


@pytest.mark.parametrize("verify", [True, False])
def test_load_small_tensors_that_lie_close_together_are_read_in_one_go(tmp_path, bytes_read, verify):
    saved = {f"w{i}": torch.randn(100) for i in range(5)}
    wanted = {name: torch.zeros(100) for name in ("w0", "w1", "w3")}
    save(tmp_path, "a", saved)

    load(tmp_path, into=wanted, strict=False, verify=verify)

    assert all(torch.equal(tensor, saved[name]) for name, tensor in wanted.items())
    assert bytes_read == [4 * 400 + (384 if verify else 0)]  # verified, with the header


def test_read_of_many_tensors_verifies_the_header_once(tmp_path, bytes_read):
    save(tmp_path, "a", {f"w{i}": torch.randn(2000) for i in range(3)})
    checkpoint = open_checkpoint(tmp_path)

    for name in checkpoint.tensors:
        checkpoint.read(name)

    assert bytes_read == [256 + 8000, 8000, 8000]


def test_open_checkpoint_alone_reads_no_data(tmp_path, bytes_read):
    save(tmp_path, "a", {"w": torch.randn(100)})

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.tensors["w"].global_shape == (100,)
    assert bytes_read == []


def test_read_box_reads_only_the_box(tmp_path, bytes_read):
    save(tmp_path, "a", {"w": torch.arange(1000)})

    box = open_checkpoint(tmp_path, verify=False).read_box("w", (10,), (5,))

    assert torch.equal(box, torch.arange(10, 15))
    assert sum(bytes_read) == 5 * 8


@pytest.mark.parametrize("shape", [(5000,), (100, 60), (4, 6, 200)])
def test_strided_tensors_move_in_blocks_of_bounded_size(tmp_path, monkeypatch, bytes_read, shape):
    monkeypatch.setattr(nxd_ckpt.tensor_bytes, "SCRATCH_BYTES", 1024)
    strided = torch.zeros(*shape, 2)[..., 0]
    bytes_written = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, content: (bytes_written.append(len(content)), write(fd, content))[1])

    save(tmp_path, "a", {"w": strided})
    load(tmp_path, into={"w": strided}, verify=False)

    blocks = bytes_written[1:-2]  # the header comes before them, the manifest and the hint LATEST after
    assert sum(blocks) == sum(bytes_read) == strided.nbytes
    assert max(blocks) <= 1024
