"""Large models and many ranks, planned and read back in one process, as no cluster is at hand."""

import math

import pytest
import torch
from nxd_ckpt import load, open_checkpoint, save
from nxd_ckpt.boxes import Box, uncovered
from nxd_ckpt.checksums import hashes_of, num_blocks
from nxd_ckpt.manifest import Chunk, HeaderEntry, Manifest, TensorEntry, data_file_name
from nxd_ckpt.manifest_text import decode, encode
from nxd_ckpt.plan import TensorDescription, plan_read, plan_save
from nxd_ckpt.safetensors_file import lay_out

SAVE_ID = "0" * 32


def manifest_of(plan):
    """As a save would commit it, with made-up hashes."""
    chunks = {name: [] for name in plan.tensors}
    files, headers = {}, {}
    for rank, writes in enumerate(plan.writes):
        layout = lay_out(writes, plan.tensors)
        file = data_file_name(SAVE_ID, rank)
        files[file] = layout.size
        headers[file] = HeaderEntry(len(layout.header), hashes_of([layout.header]))
        for placed in layout.placed:
            hashes = ("0" * 16,) * num_blocks(placed.num_bytes)
            chunks[placed.name].append(Chunk(file, placed.offset, placed.num_bytes, placed.box, hashes))
    tensors = {
        name: TensorEntry(tensor.dtype, tensor.global_shape, tuple(chunks[name]))
        for name, tensor in plan.tensors.items()
    }
    return Manifest(SAVE_ID, 1, 1.0, len(plan.writes), None, files, tensors, {}, None, {}, headers)


@pytest.mark.slow
def test_hundred_thousand_tensors_are_planned_encoded_and_read_back():
    shape = (64, 16)
    description = TensorDescription("BF16", shape, (Box.whole(shape),))
    state = {f"model.layers.{i}.weight": description for i in range(100_000)}

    plan = plan_save([state, state])
    manifest = decode(encode(manifest_of(plan)), "here")

    assert [len(writes) for writes in plan.writes] == [50_000, 50_000]
    assert len(manifest.tensors) == 100_000
    for entry in manifest.tensors.values():
        reads, missing = plan_read(Box.whole(shape), entry.chunks)
        assert len(reads) == 1
        assert missing == []


@pytest.mark.slow
def test_thousand_ranks_with_sharded_optimizer_states_are_planned_and_read_at_another_layout():
    tp, dp, rows = 8, 125, 512

    def state_of(rank):
        first = rank % tp * rows
        low, high = rows * (rank // tp) // dp, rows * (rank // tp + 1) // dp
        weight = TensorDescription("BF16", (tp * rows, 1024), (Box((first, 0), (rows, 1024)),))
        moment = TensorDescription("F32", (tp * rows, 1024), (Box((first + low, 0), (high - low, 1024)),))
        return {f"w{i}": weight for i in range(100)} | {f"m{i}": moment for i in range(100)}

    plan = plan_save([state_of(rank) for rank in range(tp * dp)])
    manifest = decode(encode(manifest_of(plan)), "here")

    assert len(manifest.files) == tp * dp
    for name, entry in manifest.tensors.items():
        boxes = [chunk.box for chunk in entry.chunks]
        assert sum(box.num_elements for box in boxes) == math.prod(entry.global_shape)
        assert uncovered(Box.whole(entry.global_shape), boxes) == []
        if name.startswith("m"):
            reads, missing = plan_read(Box((1000, 0), (300, 1024)), entry.chunks)
            assert sum(read.box.num_elements for read in reads) == 300 * 1024
            assert missing == []


@pytest.mark.slow
def test_tensor_of_more_than_2_gib_comes_back_whole_and_by_columns(tmp_path):
    shape = (2**16 + 1, 2**15)  # bytes; one system call moves less than that
    tensor = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    loaded = torch.zeros_like(tensor)

    save(tmp_path, "a", {"x": tensor})
    load(tmp_path, "a", into={"x": loaded})

    assert torch.equal(loaded, tensor)
    found = open_checkpoint(tmp_path, "a").read_box("x", (0, shape[1] - 3), (shape[0], 3))
    assert torch.equal(found, tensor[:, -3:])


@pytest.mark.slow
def test_tensor_of_more_than_two_gibibytes_is_saved_and_loaded(tmp_path):
    """Whose offsets and sizes do not fit into 32 bits."""
    whole = torch.zeros(2**31 + 5, dtype=torch.uint8)
    marks = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 4])
    whole[marks] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)

    save(tmp_path, "t", {"before": torch.ones(3), "w": whole, "z": torch.ones(3)})
    found = {"w": torch.empty_like(whole), "z": torch.zeros(3)}
    whole = whole.count_nonzero()
    load(tmp_path, "t", into=found, strict=False)

    assert found["w"][marks].tolist() == [1, 2, 3, 4]
    assert found["w"].count_nonzero() == whole == 4
    assert found["z"].tolist() == [1, 1, 1]
    assert open_checkpoint(tmp_path, "t").read_box("w", (2**31 - 1,), (3,)).tolist() == [2, 3, 0]
