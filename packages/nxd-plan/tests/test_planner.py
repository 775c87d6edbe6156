"""Plans of a tiny Llama: which layouts there are, which fit, in which order, and why the others do not."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from nxd_engine.models import LlamaConfig, LlamaForCausalLM
from nxd_pipeline import Costs, StageCost, make_schedule, simulate
from nxd_plan import FixedDegrees, OwnLlama, TrainingJob, find_device, make_plan, step_time
from nxd_plan.layout import Layout
from nxd_plan.render import explain_no_fit, plan_as_json
from nxd_state import ParallelDegrees

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
ELEMENTS = sum(parameter.numel() for parameter in LlamaForCausalLM(CONFIG, device="meta").parameters())


def job(num_devices=4, *, batch=8, dtype=torch.float32, schedule="1f1b", device=None, config=CONFIG):
    return TrainingJob(
        OwnLlama(config),
        device or find_device("cpu"),
        num_devices,
        sequence_length=32,
        global_batch_size=batch,
        dtype=dtype,
        schedule=schedule,
    )


def only(plan):
    (planned,) = plan.best
    return planned


@pytest.fixture(scope="module")
def plan_of_four():
    return make_plan(job(), top=10_000)


def test_cut_sequences_halve_activations_and_send_keys_and_values_with_their_gradients():
    whole, cut = (
        only(make_plan(job(contexts, batch=4), FixedDegrees(1, 1, False, 0, 1, "none", contexts), top=1))
        for contexts in (1, 2)
    )
    keys = 2 * 16 * CONFIG.num_key_value_heads * CONFIG.head_size * 4  # and values, of 16 positions, in float32
    assert cut.communication.cp == 4 * CONFIG.num_hidden_layers * 3 * keys  # of 4 sequences
    assert cut.communication.dp == whole.communication.dp + 2 * 4 * ELEMENTS // 2
    assert 0.45 * whole.memory.activations < cut.memory.activations < 0.6 * whole.memory.activations


def test_contexts_are_tried_where_sequences_are_long_and_models_and_devices_can():
    long = replace(CONFIG, max_position_embeddings=32768)
    fixed = FixedDegrees(1, 1, None, False, 1, "full")

    def contexts_of(device, length):
        planned = TrainingJob(OwnLlama(long), find_device(device), 4, length, 4, torch.float32)
        return {it.layout.degrees.cp for it in make_plan(planned, fixed, top=100).best}

    assert contexts_of("h100", 32768) == {1, 2, 4}
    assert contexts_of("h100", 4096) == {1}
    assert contexts_of("trn2", 32768) == {1, 2, 4}
    shared = TrainingJob(OwnLlama(CONFIG), find_device("cpu"), 8, 20, 4, torch.float32)
    fixed = FixedDegrees(4, 1, True, 0, 1, "none", 2)
    assert make_plan(shared, fixed).num_fitting == 1  # 20 positions filled up to 32
    assert "CP 4 x DP 1" in str(Layout(ParallelDegrees(cp=4, dp=1), 1, 4, "none"))


def test_contexts_on_xla_need_heads_that_split_and_one_stage():
    def rejections(heads, degrees):
        config = replace(CONFIG, hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=heads)
        return [
            it.reason
            for it in make_plan(TrainingJob(OwnLlama(config), find_device("trn2"), 4, 16, 4), degrees).rejected
        ]

    cut = FixedDegrees(1, 1, False, 1, 1, "none", context_parallel_size=4)
    assert rejections(4, cut) == []
    assert "cannot split the 6 query heads and 6 key heads" in rejections(6, cut)[0]
    staged = FixedDegrees(1, 2, False, 1, 1, "none", context_parallel_size=2)
    assert "trn2 does not combine context and pipeline parallelism" in rejections(4, staged)[0]


def test_every_feasible_combination_of_degrees_is_among_the_layouts(plan_of_four):
    found = {(it.layout.degrees.tp, it.layout.degrees.pp, it.layout.degrees.dp) for it in plan_of_four.best}
    assert found == {(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
    assert len(plan_of_four.best) == plan_of_four.num_fitting


def test_layouts_are_ranked_by_the_time_of_a_step_and_use_the_whole_batch(plan_of_four):
    times = [planned.time.seconds for planned in plan_of_four.best]
    assert times == sorted(times)
    for layout in (planned.layout for planned in plan_of_four.best):
        assert layout.microbatch_size * layout.num_microbatches * layout.degrees.dp == 8


def test_the_quickest_are_the_same_however_many_are_asked_for():
    few, all_there_are = (make_plan(job(), FixedDegrees(tensor_parallel_size=1), top=top).best for top in (3, 1000))
    assert few == all_there_are[:3]


def test_the_process_is_left_without_ranks(plan_of_four):
    assert not dist.is_initialized()


def test_zero1_divides_the_state_by_the_replicas_and_nothing_else_of_the_states():
    plain, shared = (only(make_plan(job(), FixedDegrees(1, 1, False, zero1, 2, "none"), top=1)) for zero1 in (0, 1))
    assert plain.memory.optimizer_state == 2 * 4 * ELEMENTS
    assert shared.memory.optimizer_state == 2 * 4 * ELEMENTS // 4
    assert plain.memory.parameters == shared.memory.parameters == 4 * ELEMENTS


def test_a_model_that_fits_with_no_less_is_sharded_further_and_over_the_replicas_of_a_host():
    def stages(memory, devices_per_host=4, **fixed):
        device = find_device("cpu", memory_bytes=memory / 0.9, devices_per_host=devices_per_host)
        degrees = FixedDegrees(1, 1, microbatch_size=1, checkpointing="full", **fixed)
        found = [it.layout.degrees for it in make_plan(job(device=device), degrees, top=100).best]
        return [(it.zero_stage, it.shard_group_size) for it in found]

    peaks = {
        (stage, group): only(
            make_plan(job(), FixedDegrees(1, 1, False, stage, 1, "full", shard_group_size=group), top=1)
        ).memory.peak
        for stage, group in ((1, 4), (1, 2), (2, 4), (3, 4), (3, 2))
    }
    assert peaks[1, 2] > peaks[1, 4] > peaks[3, 4]
    assert peaks[3, 2] > peaks[3, 4]
    assert set(stages(1e9)) == {(0, 0), (1, 0)}
    assert stages(peaks[1, 4]) == [(1, 0)]
    assert stages(peaks[1, 4] - 1)[0][0] > 1
    assert stages(peaks[3, 4]) == [(3, 0)]
    assert stages(peaks[3, 4] - 1) == []
    assert set(stages(1e9, devices_per_host=2)) == {(0, 0), (1, 0), (1, 2)}
    assert stages(1e9, devices_per_host=2, zero_stage=1)[0] == (1, 2)  # whole gradients stay within a host
    assert stages(1e9, devices_per_host=2, shard_group_size=2) == [(1, 2)]


def test_zero3_divides_parameters_and_states_by_the_ranks_of_a_group():
    for group in (2, 4):
        fixed = FixedDegrees(1, 1, False, 3, 2, "none", shard_group_size=group)
        memory = only(make_plan(job(dtype=torch.bfloat16), fixed, top=1)).memory
        assert memory.parameters == 2 * ELEMENTS // group
        assert memory.optimizer_state == 3 * 4 * ELEMENTS // group
        assert 0 < memory.gathered < 2 * ELEMENTS


def test_zero3_gathers_take_time_only_as_far_as_they_take_longer_than_the_computation():
    kept, released = (
        FixedDegrees(1, 1, False, 3, 1, "none", reshard_after_forward=reshard) for reshard in (False, True)
    )

    def seconds(fixed, bandwidth):
        device = replace(find_device("cpu"), intra_host_bandwidth=bandwidth, inter_host_bandwidth=bandwidth)
        planned = only(make_plan(job(2, batch=2, device=device), fixed, top=1))
        return planned.time.data_parallel, planned.communication

    (few, sent), (many, more) = seconds(kept, 1e11), seconds(released, 1e11)
    assert more.dp > sent.dp  # all layers but the last are gathered again for backward
    assert many == pytest.approx(few)
    (few, sent), (many, more) = seconds(kept, 1e3), seconds(released, 1e3)
    assert many - few == pytest.approx((more.dp - sent.dp) / (1e3 * step_time.SUSTAINED_BANDWIDTH), rel=1e-3)


@pytest.mark.parametrize(
    ("fixed", "device", "reason"),
    [
        (FixedDegrees(1, 1, zero_stage=3, shard_group_size=3), "cpu", "shard_group_size=3 does not divide the 4 rep"),
        (FixedDegrees(1, 1, reshard_after_forward=3), "cpu", "reshard_after_forward=3 does not divide the 4 ranks"),
        (FixedDegrees(1, 1, zero_stage=3), "trn2", "trn2 cannot shard parameters"),
    ],
)
def test_sharding_that_cannot_be_is_rejected_with_the_reason(fixed, device, reason):
    plan = make_plan(job(device=find_device(device)), fixed)
    assert not plan.best
    assert reason in plan.rejected[0].reason


def test_half_precision_weights_are_planned_with_their_float32_masters():
    planned = only(
        make_plan(job(dtype=torch.bfloat16), FixedDegrees(1, 1, microbatch_size=2, checkpointing="none"), top=1)
    )
    assert planned.layout.degrees.zero_stage
    assert planned.memory.parameters == 2 * ELEMENTS
    assert planned.memory.optimizer_state == 3 * 4 * ELEMENTS // 4


def test_checkpointing_keeps_less_and_computes_more():
    none, full = (
        only(make_plan(job(1), FixedDegrees(microbatch_size=2, checkpointing=it), top=1)) for it in ("none", "full")
    )
    assert full.memory.activations < none.memory.activations / 3
    assert full.memory.logits == none.memory.logits
    assert full.time.pipeline > none.time.pipeline


def test_bytes_by_axis_are_those_of_the_algorithms():
    whole = only(make_plan(job(2, batch=4), FixedDegrees(1, 1, False, 0, 1, "none"), top=1))
    assert (whole.communication.tp, whole.communication.pp) == (0, 0)
    assert whole.communication.dp == 2 * 4 * ELEMENTS // 2  # an all-reduce sends each half twice
    cut = only(make_plan(job(2, batch=4), FixedDegrees(1, 2, False, 0, 1, "none"), top=1))
    hidden = 32 * 32 * 4
    assert (cut.communication.pp, cut.communication.dp) == (4 * hidden, 0)
    split = only(make_plan(job(2, batch=4), FixedDegrees(2, 1, False, 0, 1, "none"), top=1))
    all_reduces = 1 + 4 * (2 + 2) + 1  # embedding; two in each layer, forward and backward; the head's input
    per_token = 3 * 32 * 4  # a maximum and two sums for each token's loss, in float32
    assert split.communication.tp == 4 * (all_reduces * hidden + per_token)


def test_the_bubble_is_that_of_the_simulated_schedule():
    even = LlamaConfig(**{**vars(CONFIG), "vocab_size": 4})  # so small that embedding and head cost next to nothing
    fast = find_device("cpu", intra_host_bandwidth=1e15, memory_bandwidth=1e7)
    planned = only(make_plan(job(4, config=even, device=fast), FixedDegrees(1, 4, False, 0, 1, "none"), top=1))
    expected = simulate(make_schedule("1f1b", 4, 8), Costs(StageCost())).bubble_fraction
    assert planned.time.bubble == pytest.approx(expected, abs=0.06)


def test_many_microbatches_cost_as_much_as_a_simulation_of_all_of_them_says(monkeypatch):
    degrees = FixedDegrees(1, 4, False, 0, 1, "none")
    extrapolated = only(make_plan(job(4, batch=64), degrees, top=1)).time
    simulated = []

    def simulate_all(name, ranks, num_microbatches, costs):
        simulated.append(simulate(make_schedule(name, ranks, 64), costs).makespan)
        return simulated[-1]

    monkeypatch.setattr(step_time, "_simulated", simulate_all)
    make_plan(job(4, batch=64), degrees, top=1)
    assert extrapolated.pipeline == pytest.approx(simulated[0], rel=1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_every_schedule_that_trains_can_be_planned(schedule):
    planned = only(make_plan(job(2, schedule=schedule), FixedDegrees(1, 2, False, 0, 1, "none"), top=1))
    assert 0 <= planned.time.bubble < 1
    assert len(planned.memories) == 2


@pytest.mark.parametrize(
    ("fixed", "reason"),
    [
        (FixedDegrees(tensor_parallel_size=3), "tp=3 = 3 does not divide world_size=4"),
        (FixedDegrees(pipeline_parallel_size=8), "pp=8"),
        (FixedDegrees(microbatch_size=3), "microbatch_size=3 does not divide"),
    ],
)
def test_a_degree_that_cannot_be_is_rejected_with_the_reason(fixed, reason):
    plan = make_plan(job(), fixed)
    assert not plan.best
    assert any(reason in rejected.reason for rejected in plan.rejected)
    assert reason in explain_no_fit(plan, fixed)


def test_what_the_model_itself_refuses_is_rejected_with_its_reason():
    fixed = FixedDegrees(pipeline_parallel_size=1, microbatch_size=1, checkpointing="none")
    plan = make_plan(job(8, device=find_device("cpu", devices_per_host=8)), fixed)
    reasons = {rejected.what: rejected.reason for rejected in plan.rejected}
    assert "tensor_parallel_size=8 does not divide num_attention_heads=4" in reasons["TP 8"]
    assert all(planned.layout.degrees.tp <= 4 for planned in plan.best)


def test_a_batch_that_the_replicas_do_not_divide_is_rejected_with_batches_that_would_do():
    plan = make_plan(job(4, batch=6), FixedDegrees(1, 1))
    assert "global_batch_size=6 is not a multiple of 4 replicas; use 4 or 8" in plan.rejected[0].reason


def test_where_nothing_fits_the_plan_says_by_how_much_and_what_would_help():
    small = find_device("cpu", memory_bytes=100_000)
    plan = make_plan(job(device=small), FixedDegrees(tensor_parallel_size=1))
    assert not plan.best
    nearest = min(it.memory.peak for it in plan.too_large)
    text = explain_no_fit(plan, FixedDegrees(checkpointing="none"))
    assert f"{(nearest - 90_000) / 2**20:.1f} MiB more than the usable 0.1 MiB" in text
    assert "leave out --checkpointing" in text
    assert "--zero-stage 3" not in text  # tried already
    states = min(plan.too_large, key=lambda it: it.memory.peak).memory.states
    assert f"at least {math.ceil(states / 90_000)} times as many devices" in text


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be 1 or more"),
        ({"pipeline_parallel_size": -2}, "pipeline_parallel_size=-2 must be 1 or more"),
        ({"microbatch_size": 0}, "microbatch_size=0 must be 1 or more"),
        ({"zero_stage": 0, "shard_group_size": 2}, "shard_group_size=2 shares what ZeRO shards, but zero_stage=0"),
        ({"zero_stage": 2, "reshard_after_forward": False}, "reshard_after_forward=False is of sharded parameters"),
        ({"reshard_after_forward": 0}, "reshard_after_forward"),
        ({"checkpointing": "selective"}, "unknown checkpointing='selective'; use none or full"),
        ({"tensor_parallel_size": 1, "sequence_parallel": True}, "but tensor_parallel_size=1; use"),
    ],
)
def test_degrees_that_never_can_be_are_refused_at_once(degrees, message):
    with pytest.raises(ValueError, match=message):
        FixedDegrees(**degrees)


def test_messages_are_slow_where_any_group_is_on_two_hosts_and_not_only_where_the_first_is():
    degrees = FixedDegrees(4, 1, False, 0, 1, "none")
    inside, across = (  # of the ranks 4 to 7, two lie on another host
        only(make_plan(job(12, batch=12, device=find_device("cpu", devices_per_host=hosts)), degrees, top=1))
        for hosts in (12, 6)
    )
    assert across.communication == inside.communication
    slower = find_device("cpu").intra_host_bandwidth / find_device("cpu").inter_host_bandwidth
    link = 0.8 * find_device("cpu").intra_host_bandwidth
    extra = inside.communication.tp / link * (slower - 1)
    assert across.time.pipeline - inside.time.pipeline == pytest.approx(extra, rel=1e-6)


def test_attention_is_counted_as_one_operation_that_keeps_no_scores():
    long = LlamaConfig(**{**vars(CONFIG), "max_position_embeddings": 4096})
    sizes = [512, 1024]
    kept = [
        only(
            make_plan(
                TrainingJob(OwnLlama(long), find_device("cpu"), 1, it, 1, torch.float32),
                FixedDegrees(1, 1, None, False, 1, "none"),
            )
        )
        for it in sizes
    ]
    assert kept[1].memory.activations <= 2 * kept[0].memory.activations


def test_the_json_of_a_plan_says_what_the_plan_says(plan_of_four):
    content = json.loads(plan_as_json(plan_of_four))
    assert content["num_fitting"] == len(content["best"]) == plan_of_four.num_fitting
    first, told = plan_of_four.best[0], content["best"][0]
    assert told["layout"] == first.layout.as_dict()
    assert told["layout"]["data_parallel_size"] == first.layout.degrees.dp
    assert [it["peak"] for it in told["memory"]] == [it.peak for it in first.memories]
    assert told["time"]["step"] == first.time.seconds
    assert len(content["not_possible"]) == len(plan_of_four.rejected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_devices": 0}, "num_devices=0"),
        ({"batch": 0}, "global_batch_size=0"),
        ({"schedule": "inference"}, "'inference' cannot train"),
        ({"dtype": torch.float16}, "no FLOP/s for float16"),
    ],
)
def test_a_job_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        job(**arguments)


def test_a_sequence_longer_than_the_model_is_made_for_is_refused():
    with pytest.raises(ValueError, match="sequence_length=65 is more than max_position_embeddings=64"):
        TrainingJob(OwnLlama(CONFIG), find_device("cpu"), 1, sequence_length=65)
