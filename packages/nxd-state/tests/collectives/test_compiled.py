"""Collectives inside torch.compile and torch.export: in the graph, without breaks, with the numbers of eager mode."""

import nxd_state
import pytest
import torch
import torch.distributed as dist
from nxd_testing import run_on_ranks

pytestmark = pytest.mark.sample(2)  # each takes its time


class Program(torch.nn.Module):
    """A function of a tensor and a group as a module, which torch.export wants."""

    def __init__(self, function, group):
        super().__init__()
        self.function, self.group = function, group

    def forward(self, x):
        return self.function(x, self.group)


def programs():
    return {
        "all_reduce": lambda x, group: nxd_state.all_reduce(x, group) + 1,
        "all_reduce avg": lambda x, group: nxd_state.all_reduce(x.t(), group, op="avg"),
        "all_reduce max": lambda x, group: nxd_state.all_reduce(x, group, op="max", async_op=True).wait(),
        "all_reduce_": lambda x, group: nxd_state.all_reduce_(2 * x, group),
        "all_gather": nxd_state.all_gather,
        "all_gather dim 1": lambda x, group: nxd_state.all_gather(x.t(), group, dim=1, async_op=True).wait(),
        "all_gather_": lambda x, group: nxd_state.all_gather_(2 * x, group, async_op=True).wait(),
        "reduce_scatter": lambda x, group: nxd_state.reduce_scatter(x.t(), group),
        "reduce_scatter avg": lambda x, group: nxd_state.reduce_scatter(x, group, dim=-1, op="avg"),
        "all_to_all": lambda x, group: nxd_state.all_to_all(x, group, split_dim=1, concat_dim=0),
        "all_to_all back": lambda x, group: nxd_state.all_to_all(x, group, split_dim=0, concat_dim=1),
        "broadcast": lambda x, group: nxd_state.broadcast(x, group, source=1),
    }


def rank_tensor(group):
    return torch.arange(6.0 * group.size**2).reshape(2 * group.size, 3 * group.size) * (group.rank + 1)


def collectives_in(graph):
    return [str(node.target) for node in graph.nodes if "_c10d_functional" in str(node.target)]


def test_compiled_collectives_without_graph_breaks_equal_eager_ones():
    def check():
        nxd_state.initialize_model_parallel(dist.get_world_size())
        group = nxd_state.get_group("tp")
        for name, program in programs().items():
            compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
            x = rank_tensor(group)
            assert torch.equal(compiled(x, group), program(x, group)), name
            assert torch.equal(x, rank_tensor(group)), name

    run_on_ranks(check, 3)


def test_compiled_collectives_on_a_subgroup_of_the_world_stay_within_it():
    def check():
        nxd_state.initialize_model_parallel(2)
        for axis in ("tp", "dp"):
            group = nxd_state.get_group(axis)
            for name in ("all_reduce", "all_gather", "broadcast"):
                program = programs()[name]
                compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
                assert torch.equal(compiled(rank_tensor(group), group), program(rank_tensor(group), group)), name

    run_on_ranks(check, 4)


def test_compiled_training_step_compiles_once_for_all_steps():
    def compilations():
        nxd_state.initialize_model_parallel(dist.get_world_size())
        group = nxd_state.get_group("tp")
        graphs = []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        step = torch.compile(lambda x: nxd_state.all_reduce(x, group) * 2, fullgraph=True, backend=count)
        results = [step(torch.full((2,), float(value))).tolist() for value in range(3)]
        return len(graphs), results

    assert run_on_ranks(compilations, 2) == [(1, [[0.0, 0.0], [4.0, 4.0], [8.0, 8.0]])] * 2


def test_exported_collectives_are_in_the_graph_and_equal_eager_ones():
    def check():
        nxd_state.initialize_model_parallel(dist.get_world_size())
        group = nxd_state.get_group("tp")
        for name, program in programs().items():
            exported = torch.export.export(Program(program, group), (rank_tensor(group),))
            assert collectives_in(exported.graph), name
            assert torch.equal(exported.module()(rank_tensor(group)), program(rank_tensor(group), group)), name

    run_on_ranks(check, 2)


def test_exported_graphs_of_all_ranks_are_the_same():
    def graphs():
        nxd_state.initialize_model_parallel(dist.get_world_size())
        group = nxd_state.get_group("tp")
        exported = [torch.export.export(Program(p, group), (rank_tensor(group),)) for p in programs().values()]
        return [program.graph_module.code for program in exported]

    first, second = run_on_ranks(graphs, 2)

    assert first == second
