"""`Group.rank_tensor`: the rank as data, in eager mode, in graphs, and on tensors without values."""

import pytest
import torch
from nxd_state import get_group, initialize_model_parallel
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


class AddsRank(nn.Module):
    def forward(self, tensor):
        return tensor + get_group("tp").rank_tensor(tensor)


class TakesRank(nn.Module):
    def forward(self, rank, tensor):
        with get_group("tp").rank_given_by(rank):
            return tensor + get_group("tp").rank_tensor(tensor)


@pytest.fixture
def on_both_ranks(run_ranks):
    """What a function gives on the ranks of a mesh of two tensor-parallel ones."""

    def run(job):
        def with_mesh():
            initialize_model_parallel(tensor_model_parallel_size=2)
            return job()

        return run_ranks(with_mesh, 2)

    return run


def test_rank_tensor_is_the_rank_in_the_dtype_of_what_it_is_used_with(on_both_ranks):
    def job():
        added = AddsRank()(torch.zeros(3, dtype=torch.int32))
        assert added.dtype == torch.int32
        return added.tolist()

    assert on_both_ranks(job) == [[0, 0, 0], [1, 1, 1]]


def test_rank_tensor_first_made_in_inference_mode_serves_training(on_both_ranks):
    def job():
        weight = torch.ones(2, device="meta", requires_grad=True)
        with torch.inference_mode():
            get_group("tp").rank_tensor(weight)
        weight.index_select(0, get_group("tp").rank_tensor(weight).view(1)).sum().backward()  # keeps the index

    on_both_ranks(job)


def test_rank_tensor_belongs_to_the_fake_mode_of_what_it_is_used_with(on_both_ranks):
    def job():
        for _ in range(2):  # one mode's tensors do not serve the next
            with FakeTensorMode():
                assert AddsRank()(torch.zeros(3)).shape == (3,)
        return AddsRank()(torch.zeros(1)).item()

    assert on_both_ranks(job) == [0, 1]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_graph_is_the_same_on_all_ranks_and_gives_each_its_own_result(on_both_ranks, strict):
    def job():
        exported = torch.export.export(AddsRank(), (torch.zeros(2),), strict=strict)
        return str(exported.graph), exported.module()(torch.zeros(2)).tolist()

    (first_graph, first), (second_graph, second) = on_both_ranks(job)
    assert first_graph == second_graph
    assert (first, second) == ([0, 0], [1, 1])


@pytest.mark.skipif(torch.__version__ < "2.13", reason="before, the compiler takes itself for an exporter")
def test_compiled_graph_is_the_same_on_all_ranks_and_gives_each_its_own_result(on_both_ranks):
    def job():
        graphs = []

        def backend(graph, example_inputs):
            graphs.append(str(graph.graph))
            return graph

        added = torch.compile(AddsRank(), fullgraph=True, backend=backend)(torch.zeros(2))
        return graphs, added.tolist()

    (first_graphs, first), (second_graphs, second) = on_both_ranks(job)
    assert first_graphs == second_graphs
    assert (first, second) == ([0, 0], [1, 1])


def test_program_recorded_with_a_given_rank_takes_it_as_an_input(on_both_ranks):
    def job():
        exported = torch.export.export(TakesRank(), (torch.tensor([0]), torch.zeros(2)), strict=False)
        assert not exported.constants
        return [exported.module()(torch.tensor([rank]), torch.zeros(2)).tolist() for rank in (0, 1)]

    assert on_both_ranks(job) == [[[0, 0], [1, 1]]] * 2
