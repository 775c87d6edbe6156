import json

import nxd_ckpt.tensor_bytes
import pytest
import torch
from nxd_ckpt import LoadedObjects, Shard, ShardedTensor, load, open_checkpoint, save
from nxd_ckpt.tensor_bytes import CODE_OF_DTYPE
from nxd_ckpt.testing import run_on_threads

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("dtype", list(CODE_OF_DTYPE), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (3, 4), (2, 3, 4)], ids=str)
def test_load_into_plain_tensors_gives_the_same_bits(tmp_path, bits, dtype, shape, random_tensor):
    saved = random_tensor(shape, dtype)
    loaded = torch.empty(shape, dtype=dtype)  # torch has no zeros of four bits

    save(tmp_path, "a", {"x": saved})
    load(tmp_path, "a", into={"x": loaded})

    assert bits(loaded) == bits(saved)


@pytest.mark.parametrize("dtype", list(CODE_OF_DTYPE), ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor.t(),
        lambda tensor: tensor[:, 1:3],
        lambda tensor: tensor[::2],
        lambda tensor: tensor[1:, ::3],
    ],
    ids=["transposed", "columns", "every second row", "every third column"],
)
def test_save_and_load_strided_views_give_the_same_bits(tmp_path, bits, dtype, view, random_tensor):
    saved = view(random_tensor((6, 8), dtype))
    loaded = view(torch.zeros((6, 8), dtype=dtype))

    save(tmp_path, "a", {"x": saved})
    load(tmp_path, "a", into={"x": loaded})

    assert not saved.is_contiguous()
    assert bits(loaded) == bits(saved)


def test_save_transposed_square_matrix_stores_it_as_it_is_indexed(tmp_path):
    matrix = torch.arange(16.0).view(4, 4)
    plain, transposed = torch.zeros(4, 4), torch.zeros(4, 4)

    save(tmp_path, "a", {"x": matrix.t()})
    load(tmp_path, "a", into={"x": plain})
    load(tmp_path, "a", into={"x": transposed.t()})

    assert torch.equal(plain, matrix.t())
    assert torch.equal(transposed, matrix)


def test_save_conjugated_and_negated_views_stores_their_values(tmp_path):
    number = torch.tensor([1 + 2j, 3 - 4j])

    save(tmp_path, "a", {"conj": number.conj(), "imag": number.conj().imag})

    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("conj"), torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(checkpoint.read("imag"), torch.tensor([-2.0, 4.0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_save_and_load_on_an_accelerator_gives_the_same_bits(tmp_path, bits):
    saved = torch.randn(64, 32, device="cuda")
    loaded, columns = torch.zeros_like(saved), torch.zeros(64, 64, device="cuda")[:, ::4]

    save(tmp_path, "a", {"w": saved, "strided": saved[:, ::2]})
    load(tmp_path, into={"w": loaded, "strided": columns})

    assert bits(loaded.cpu()) == bits(saved.cpu())
    assert bits(columns.cpu()) == bits(saved[:, ::2].cpu())


def test_load_parameters_that_require_grad_fills_them_in_place(tmp_path):
    saved, loaded = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    save(tmp_path, "a", dict(saved.named_parameters()))
    load(tmp_path, "a", into=dict(loaded.named_parameters()))

    assert torch.equal(loaded.weight, saved.weight)
    assert torch.equal(loaded.bias, saved.bias)


@pytest.fixture(scope="session")
def cuts(rows_of, columns_of):
    return {"rows": rows_of, "columns": columns_of, "whole": lambda whole, rank, world_size: whole}


@pytest.mark.pairs
@pytest.mark.parametrize("save_cut", ["rows", "columns", "whole"])
@pytest.mark.parametrize("load_cut", ["rows", "columns", "whole"])
@pytest.mark.parametrize("num_ranks", [(4, 2), (2, 4), (1, 3), (3, 1)])
def test_load_other_layout_gives_the_same_bits(tmp_path, cuts, save_cut, load_cut, num_ranks):
    save_ranks, load_ranks = num_ranks
    saved, loaded = torch.randn(12, 24), [torch.zeros(12, 24) for _ in range(load_ranks)]

    def save_one(ranks):
        save(tmp_path, "a", {"w": cuts[save_cut](saved, ranks.rank, save_ranks)}, process_group=ranks)

    def load_one(ranks):
        wanted = cuts[load_cut](loaded[ranks.rank], ranks.rank, load_ranks)
        load(tmp_path, into={"w": wanted}, process_group=ranks)

    run_on_threads(save_one, save_ranks)
    run_on_threads(load_one, load_ranks)

    total = loaded[0] if load_cut == "whole" else torch.stack(loaded).sum(dim=0)
    assert torch.equal(total, saved)


@pytest.mark.parametrize("shape", [(3000,), (70, 50), (4, 6, 130)])
def test_save_and_load_larger_than_a_scratch_block_gives_the_same_bits(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(nxd_ckpt.tensor_bytes, "SCRATCH_BYTES", 1024)
    saved = torch.randn(*shape, 2)[..., 0]
    loaded = torch.zeros(*shape, 2)[..., 0]
    corner = tuple(size // 2 for size in shape)

    save(tmp_path, "a", {"x": saved})
    load(tmp_path, into={"x": loaded})
    box = open_checkpoint(tmp_path).read_box("x", (1,) * len(shape), corner)

    assert torch.equal(loaded, saved)
    assert torch.equal(box, saved[tuple(slice(1, 1 + size) for size in corner)])


def test_ranks_with_different_names_each_get_their_own(tmp_path):
    stages = [{"first": torch.randn(3)}, {"last": torch.randn(4)}, {}]

    run_on_threads(lambda ranks: save(tmp_path, "a", stages[ranks.rank], process_group=ranks), 3)
    into = [{"last": torch.zeros(4)}, {"first": torch.zeros(3)}]
    run_on_threads(lambda ranks: load(tmp_path, into=into[ranks.rank], process_group=ranks), 2)

    assert torch.equal(into[0]["last"], stages[1]["last"])
    assert torch.equal(into[1]["first"], stages[0]["first"])


def test_load_returns_common_objects_and_those_of_the_own_rank(tmp_path):
    objects = {"lr": 0.5, "betas": [0.9, 0.95], "name": "é", "none": None, "best": float("inf")}

    def save_one(ranks):
        save(
            tmp_path,
            "a",
            {},
            step=7,
            objects=objects if ranks.rank == 0 else "ignored",
            rank_objects={"position": 10 * ranks.rank},
            process_group=ranks,
        )

    run_on_threads(save_one, 2)
    loaded = run_on_threads(lambda ranks: load(tmp_path, into={}, process_group=ranks), 3)

    expected = [{"position": 0}, {"position": 10}, None]
    assert loaded == [LoadedObjects("a", 7, 2, objects, rank_objects) for rank_objects in expected]


def test_load_without_strict_takes_only_what_is_asked_for(tmp_path):
    save(tmp_path, "a", {"model": torch.ones(2), "optimizer": torch.ones(2)})
    model = torch.zeros(2)

    load(tmp_path, into={"model": model}, strict=False)

    assert torch.equal(model, torch.ones(2))


def test_open_checkpoint_reads_whole_tensors_and_boxes(tmp_path, columns_of):
    whole = torch.arange(48).reshape(6, 8)
    run_on_threads(
        lambda ranks: save(
            tmp_path, "a", {"w": columns_of(whole, ranks.rank, 4)}, step=3, objects=[1], process_group=ranks
        ),
        4,
    )

    checkpoint = open_checkpoint(tmp_path)

    assert (checkpoint.tag, checkpoint.step, checkpoint.objects, checkpoint.world_size) == ("a", 3, [1], 4)
    assert checkpoint.tensors["w"].dtype is torch.int64
    assert checkpoint.tensors["w"].global_shape == (6, 8)
    assert torch.equal(checkpoint.read("w"), whole)
    assert torch.equal(checkpoint.read_box("w", (1, 1), (4, 6)), whole[1:5, 1:7])


@pytest.mark.parametrize("verify", [True, False])
def test_load_box_that_a_rank_wants_twice_fills_both(tmp_path, verify):
    saved, first, second = torch.randn(6, 4), torch.zeros(6, 4), torch.zeros(6, 4)
    save(tmp_path, "a", {"w": saved})

    load(tmp_path, into={"w": ShardedTensor((6, 4), [Shard(first, (0, 0)), Shard(second, (0, 0))])}, verify=verify)

    assert torch.equal(first, saved)
    assert torch.equal(second, saved)


def test_objects_as_deep_as_save_takes_them_can_be_loaded(tmp_path):
    deep = json.loads("[" * 65 + "]" * 65)

    save(tmp_path, "a", {}, objects=deep, rank_objects=deep, mesh=deep)

    loaded = load(tmp_path, into={})
    assert loaded.objects == loaded.rank_objects == deep
