"""What names of `parallel_layers` do that scripts for NeuronX Distributed import beside the documented ones."""

import pytest
import torch
import torch.distributed as dist
from neuronx_distributed import parallel_state
from neuronx_distributed.parallel_layers import grads, layers, loss_functions, mappings, pad, utils
from neuronx_distributed.parallel_layers.checkpointing import _invoke_preshard_hook, load, save
from nxd_state import active_group, all_gather, all_reduce, get_group, get_shard_spec
from torch import nn
from torch.nn import functional as F


@pytest.fixture
def on_mesh(run_ranks):
    """`on_mesh(job, world, **degrees)`: what `job()` returns on each rank of a mesh."""

    def run(job, world=2, **degrees):
        def meshed():
            parallel_state.initialize_model_parallel(**degrees)
            return job()

        return run_ranks(meshed, world)

    return run


def test_mesh_takes_context_before_experts_and_says_its_groups_without_making_them(run_ranks):
    def job():
        groups = parallel_state.initialize_model_parallel(2, 1, 2, mesh_only=True)
        assert not parallel_state.model_parallel_is_initialized()
        parallel_state.initialize_model_parallel(2, 1, 2, 1, True, 1)
        return groups, parallel_state.get_context_model_parallel_size(), parallel_state.get_world_group(as_list=True)

    groups, context, world = run_ranks(job, 4)[0]

    assert (groups.tp_groups, groups.cp_groups, groups.dp_groups) == (
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0], [1], [2], [3]],
    )
    assert (context, world) == (2, [[0, 1, 2, 3]])


def test_groups_of_parts_of_an_axis_are_runs_of_neighbours(on_mesh):
    def job():
        with pytest.raises(RuntimeError, match=r"no kv_shared groups; call initialize_kv_group\(\) first"):
            parallel_state.get_kv_shared_group()
        parallel_state.initialize_kv_group(2)
        parallel_state.initialize_speculative_draft_group(2)
        with pytest.raises(ValueError, match="the kv_shared groups have 2 ranks, not 4"):
            parallel_state.initialize_kv_group(4)
        summed = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(summed, group=parallel_state.get_kv_shared_group())
        parallel_state.destroy_kv_group()
        parallel_state.initialize_kv_group(4)
        return (
            summed.item(),
            parallel_state.get_kv_shared_group(as_list=True),
            parallel_state.get_speculative_draft_group(as_list=True),
        )

    assert on_mesh(job, 4, tensor_model_parallel_size=4) == [
        (it, [[0, 1, 2, 3]], [[0, 1], [2, 3]]) for it in (1.0, 1.0, 5.0, 5.0)
    ]


def test_replicas_that_shuffle_tokens_are_neighbours_along_the_replicas(on_mesh):
    def job():
        parallel_state.initialize_token_shuffle_group(2)
        return parallel_state.get_token_shuffle_group(as_list=True), parallel_state.get_token_shuffle_group_size()

    assert on_mesh(job, 4)[0] == ([[0, 1], [2, 3]], 2)


def test_experts_of_a_rank_are_an_equal_part_or_those_of_a_distribution():
    experts = parallel_state.get_experts_for_expert_parallel_rank

    assert experts(1, 4, 2) == [2, 3]
    assert experts(1, 4, 2, [[0, 3], [1, 2]]) == [1, 2]
    with pytest.raises(ValueError, match="name each expert"):
        experts(0, 4, 2, [[0, 1], [1, 2]])


@pytest.mark.parametrize("norm_type", [2, 3.0, float("inf")])
def test_norm_of_gradients_spread_over_replicas_is_that_of_the_whole(on_mesh, norm_type):
    gradient = torch.linspace(-1, 2, 8, dtype=torch.float64)

    def job():
        parameter = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        parameter.grad = gradient.chunk(2)[get_group("dp").rank].clone()
        groups = parallel_state.get_data_parallel_group(as_list=True)
        norms = [grads.get_grad_norm([parameter], norm_type, True, given, False) for given in (None, groups)]
        clipped = grads.clip_grad_norm([parameter], 0.5, norm_type, True)
        with pytest.raises(ValueError, match="zero1_optimizer_groups need zero1_optimizer=True"):
            grads.get_grad_norm([parameter], zero1_optimizer_groups=groups)
        return torch.stack([*norms, clipped]), parameter.grad

    results = on_mesh(job)

    expected = torch.linalg.vector_norm(gradient, norm_type)
    for norms, _ in results:
        torch.testing.assert_close(norms, expected.expand(3))
    after = torch.cat([it for _, it in results])
    torch.testing.assert_close(after, gradient * 0.5 / (expected + 1e-6))


def test_gradients_of_replicas_of_experts_are_averaged_in_two_steps(on_mesh):
    def job():
        gradient = torch.tensor([float(dist.get_rank())])
        grads.bucket_allreduce_gradients([gradient])
        of_expert = gradient.item()
        grads.bucket_allreduce_gradients([gradient], reduce_over_ep_group=True)
        return of_expert, gradient.item()

    assert on_mesh(job, 4, expert_model_parallel_size=2) == [(0.5, 1.5), (1.0, 1.5), (0.5, 1.5), (1.0, 1.5)]


def test_layers_are_instances_of_their_bases():
    assert isinstance(layers.RowParallelLinear(2, 2), layers.BaseParallelLinear)
    assert isinstance(layers.ParallelEmbedding(2, 2), layers.BaseParallelLayer)
    assert not isinstance(nn.Linear(2, 2), layers.BaseParallelLayer)
    assert isinstance(layers.OutputChannelParallelConv2d(1, 1, 1), layers.BaseParallelConv)


def test_log_probabilities_of_the_next_tokens(on_mesh):
    def job():
        torch.manual_seed(0)
        logits, tokens = torch.randn(2, 4, 6, dtype=torch.float64), torch.randint(6, (2, 4))
        own = logits.chunk(2, dim=-1)[active_group("tp").rank]
        expected = F.log_softmax(logits, -1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
        torch.testing.assert_close(loss_functions.from_parallel_logits_to_logprobs(own, tokens), expected)
        losses = loss_functions.parallel_cross_entropy(vocab_parallel_logits=own, target=tokens)
        all_tokens = F.log_softmax(logits, -1).gather(-1, tokens[..., None]).squeeze(-1)
        torch.testing.assert_close(-losses, all_tokens)

    on_mesh(job, tensor_model_parallel_size=2)


def test_part_of_a_rank_that_is_data_is_its_run(on_mesh):
    def job():
        whole = torch.arange(8).view(1, 8)
        taken = mappings.scatter_to_process_group_spmd(whole, 1, torch.tensor([1])).tolist()
        with pytest.raises(ValueError, match="2 ranks do not divide dim 1"):
            mappings.scatter_to_process_group_spmd(whole[:, :7], 1, torch.tensor([0]))
        return taken

    assert on_mesh(job, tensor_model_parallel_size=2)[0] == [[4, 5, 6, 7]]


def test_whole_tensors_are_cut_by_runs_of_each_fused_matrix(on_mesh):
    def job():
        whole = torch.arange(8.0)
        return [layers.create_local_weight(whole, 0, 4, stride).tolist() for stride in (1, 2)]

    assert on_mesh(job, tensor_model_parallel_size=2) == [
        [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 4.0, 5.0]],
        [[4.0, 5.0, 6.0, 7.0], [2.0, 3.0, 6.0, 7.0]],
    ]


def test_every_replica_saves_and_loads_its_own_file_where_asked_to(on_mesh, tmp_path):
    def job():
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, get_group("dp").rank)
        save({"model": model.state_dict()}, tmp_path, master_dp_only=False)
        nn.init.zeros_(model.weight)
        load(tmp_path, model, master_dp_only=False, weights_only=True)
        lax = nn.Linear(1, 1, bias=False)
        load(tmp_path, lax, master_dp_only=False, strict=False)
        assert torch.equal(lax.weight, model.weight)
        return model.weight.item()

    assert on_mesh(job) == [0.0, 1.0]


def test_spmd_rank_holds_the_rank_until_a_checkpoint_says_otherwise(on_mesh):
    def job():
        rank = layers.SPMDRank(2)
        rank.initialize_expert_indices(3)
        assert (rank.rank.num_partitions, rank.get_local_expert_indices().shape) == (2, (1, 3))
        assert get_shard_spec(rank.rank).pieces[0].logical_shape == (2,)
        return rank.get_rank().tolist()

    assert on_mesh(job, tensor_model_parallel_size=2) == [[0], [1]]


def test_preshard_hooks_change_whole_weights_by_the_names_of_their_modules():
    class Doubled(nn.Linear):
        add_bias = True

        def preshard_hook(self, state, name):
            state[name] = state[name] * 2

    model = nn.ModuleDict({"plain": nn.Linear(1, 1), "inner": nn.ModuleDict({"doubled": Doubled(1, 1)})})
    state = {name: torch.ones(1) for name in model.state_dict()}

    _invoke_preshard_hook(model, state)

    assert {name: value.item() for name, value in state.items()} == {
        "plain.weight": 1,
        "plain.bias": 1,
        "inner.doubled.weight": 2,
        "inner.doubled.bias": 2,
    }


def test_padding_heads_are_those_behind_each_key_and_value_heads():
    masks = [pad.generate_padding_mask(6, 8, 2, 4, rank).tolist() for rank in range(4)]

    assert masks == [[True, True], [True, False]] * 2
    two_here = [pad.generate_padding_mask(8, 12, 4, 2, rank).tolist() for rank in range(2)]
    assert two_here == [[True] * 4 + [False] * 2] * 2  # two heads for each of two key and value heads
    assert pad.get_number_of_extra_heads(n_head=6, tp_degree=4) == 2
    with pytest.raises(RuntimeError, match=r"Unexpected hardware_type='trn1'; give hardware\.TRN1"):
        pad.generate_padding_mask(6, 8, 2, 4, 0, hardware_type="trn1")


def test_small_functions_of_scripts():
    assert utils.get_padding_length(10, 4) == 2
    assert utils.EmbeddingUtility.range_from_global_vocab_size(12, 1, 3) == (4, 8)
    tensor = torch.ones(1)
    assert utils.move_all_tensor_to_cpu([tensor], convert=False)[0] is tensor


def test_gathered_dim_and_reduced_dim_may_be_any(on_mesh):
    def job():
        part = torch.full((2, 1), float(active_group("tp").rank))
        gathered = mappings.gather_from_tensor_model_parallel_region_with_dim(part, 1)
        assert torch.equal(gathered, all_gather(part, get_group("tp"), dim=1))
        reduced = mappings.reduce_scatter_to_tensor_model_parallel_region_with_dim(gathered, 0)
        assert torch.equal(reduced, all_reduce(gathered, get_group("tp"))[:1])
        # The names that scripts use in autograd functions of their own.
        assert torch.equal(mappings._gather_along_first_dim(part), gathered.T.reshape(4, 1))
        assert torch.equal(mappings._split_along_first_dim(gathered.T), part.T)
        assert torch.equal(mappings._gather_along_dim(part, 1), gathered)
        assert torch.equal(mappings._reduce_scatter_along_dim(gathered, 0), reduced)
        largest = all_reduce(part, get_group("tp"), op="max")
        assert torch.equal(mappings._reduce_scatter_along_dim(part, 0, "max"), largest[:1])

    on_mesh(job, tensor_model_parallel_size=2)
