"""`neuronx_distributed_config`: defaults, what it accepts, and that all mistakes come in one error."""

import copy

import pytest
from nxd_engine import initialize_parallel_model, neuronx_distributed_config
from nxd_state import destroy_model_parallel, get_mesh, initialize_model_parallel, model_parallel_is_initialized
from torch import nn


@pytest.fixture(autouse=True)
def _no_mesh_afterwards():
    yield
    destroy_model_parallel()


def test_config_without_arguments_has_the_documented_defaults_and_initialises_the_mesh():
    config = neuronx_distributed_config()

    assert config["tensor_parallel_size"] == config["pipeline_parallel_size"] == 1
    assert config["optimizer_config"] == {
        "zero_one_enabled": False,
        "grad_clipping": True,
        "max_grad_norm": 1.0,
        "zero_stage": 0,
        "shard_group_size": None,
        "reshard_after_forward": None,
        "zero_offload": None,
    }
    assert config["model_init_config"] == {
        "sequential_move_factor": 11,
        "meta_device_init": False,
        "param_init_fn": None,
        "weights_are_loaded": False,
    }
    assert config["pad_model"] is config["sequence_parallel"] is False
    for name in ("pipeline_config", "activation_checkpoint_config", "lora_config"):
        assert config[name] is None
    assert model_parallel_is_initialized()


@pytest.mark.parametrize(
    ("given", "stage"),
    [
        ({"zero_one_enabled": True}, 1),
        ({"zero_stage": 1}, 1),
        ({"zero_one_enabled": True, "zero_stage": 3}, 3),
        ({"zero_stage": 0}, 0),
    ],
)
def test_zero_stage_and_zero_one_enabled_follow_each_other(given, stage):
    config = neuronx_distributed_config(optimizer_config=given)

    assert config["optimizer_config"]["zero_stage"] == stage
    assert config["optimizer_config"]["zero_one_enabled"] is (stage > 0)
    assert config["mixed_precision_config"]["use_master_weights"] is (stage > 0)
    assert neuronx_distributed_config(**config) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero_stage": 4}, "zero_stage=4 is not allowed; expected 0, 1, 2 or 3"),
        ({"zero_stage": True}, "zero_stage=True is not allowed"),
        ({"zero_stage": 1.0}, "zero_stage=1.0 is not allowed; expected 0, 1, 2 or 3"),
        ({"zero_stage": 0, "zero_one_enabled": True}, "zero_one_enabled=True contradicts zero_stage=0"),
        ({"shard_group_size": 2}, "shard_group_size needs zero_stage=1 or more"),
        ({"shard_group_size": "2", "zero_stage": 1}, "shard_group_size='2' is not allowed"),
        ({"reshard_after_forward": False, "zero_stage": 2}, "reshard_after_forward needs zero_stage=3"),
        ({"reshard_after_forward": "no", "zero_stage": 3}, "reshard_after_forward='no' is not allowed"),
        ({"zero_offload": "nvme", "zero_stage": 3}, "zero_offload='nvme' is not allowed; expected 'optimizer'"),
        ({"zero_offload": "optimizer"}, "zero_offload='optimizer' needs zero_stage=1"),
        ({"zero_offload": "parameters", "zero_stage": 2}, "zero_offload='parameters' needs zero_stage=3"),
    ],
)
def test_mistakes_in_sharding(given, message):
    with pytest.raises(ValueError, match=message):
        neuronx_distributed_config(optimizer_config=given)


@pytest.mark.parametrize("zero1", [False, True])
def test_mixed_precision_follows_zero1_unless_it_is_given(zero1):
    section = {"zero_one_enabled": zero1}

    config = neuronx_distributed_config(optimizer_config=section)

    assert config["mixed_precision_config"] == {
        "use_master_weights": zero1,
        "use_fp32_grad_acc": zero1,
        "use_master_weights_in_ckpt": False,
        "use_loss_scaling": False,
        "use_stochastic_rounding": False,
    }
    without_masters = neuronx_distributed_config(
        optimizer_config=section, mixed_precision_config={"use_master_weights": False}
    )
    assert without_masters["mixed_precision_config"]["use_master_weights"] is False


def test_sections_are_completed_in_copies():
    sections = {
        "optimizer_config": {"zero_one_enabled": True},
        "model_init_config": {"sequential_move_factor": 4},
        "pipeline_config": {"num_microbatches": 2, "leaf_module_cls": ["Norm"]},
        "mixed_precision_config": {"use_master_weights_in_ckpt": True},
    }
    before = copy.deepcopy(sections)

    config = neuronx_distributed_config(**sections)
    config["optimizer_config"]["max_grad_norm"] = 5.0
    config["pipeline_config"]["num_microbatches"] = 8

    assert sections == before
    assert config["model_init_config"]["sequential_move_factor"] == 4
    assert config["model_init_config"]["meta_device_init"] is False


@pytest.mark.parametrize(
    ("section", "expected"), [(None, 4), ({"meta_device_init": False}, 4), ({"sequential_move_factor": 2}, 2)]
)
def test_move_factor_may_stand_beside_its_section_which_goes_before_it(section, expected):
    config = neuronx_distributed_config(sequential_move_factor=4, model_init_config=section)

    assert config["model_init_config"]["sequential_move_factor"] == expected
    assert "sequential_move_factor" not in config


def test_size_of_a_logical_core_is_taken_and_said_to_change_nothing(caplog):
    with caplog.at_level("INFO", logger="nxd_engine"):
        config = neuronx_distributed_config(lnc_size=2)

    assert config["lnc_size"] == 2
    assert caplog.messages == ["lnc_size=2 has no effect: ranks are processes, whatever cores they have"]
    initialize_parallel_model(config, lambda: nn.Linear(1, 1))


def test_all_mistakes_come_in_one_error_with_the_nearest_key():
    with pytest.raises(ValueError, match="neuronx_distributed_config") as raised:
        neuronx_distributed_config(
            tensor_parallel_size=0,
            tensor_paralel_size=2,
            pad_model=2,
            pipeline_config={"num_microbatch": 3, "auto_partition": "yes", "virtual_pipeline_size": 1.5},
            optimizer_config={"zero_one_enable": True, "max_grad_norm": -1},
            activation_checkpoint_config="Full",
            model_init_config={"sequential_move_factor": 33, "meta_device_init": True},
            lora_config={"lora_rank": 8},
            mixed_precision_config={"use_master_weight": True},
        )

    message = str(raised.value)
    for part in (
        "tensor_parallel_size=0 is not allowed; expected an integer at least 1",
        "unknown key tensor_paralel_size; did you mean tensor_parallel_size?",
        "pad_model=2 is not allowed; expected true or false",
        "unknown key pipeline_config.num_microbatch; did you mean pipeline_config.num_microbatches?",
        "pipeline_config.auto_partition='yes' is not allowed; expected true or false",
        "pipeline_config.virtual_pipeline_size=1.5 is not allowed; expected an integer",
        "unknown key optimizer_config.zero_one_enable; did you mean optimizer_config.zero_one_enabled?",
        "optimizer_config.max_grad_norm=-1 is not allowed; expected a number above 0; grad_clipping=False",
        "unknown activation_checkpoint_config='Full'; did you mean 'full'?",
        "sequential_move_factor=33 is not allowed; expected an integer at least 1 and at most 32",
        "meta_device_init=True needs param_init_fn",
        "must be a LoraConfig",
        "unknown key mixed_precision_config.use_master_weight; did you mean mixed_precision_config.use_master_weights?",
    ):
        assert part in message
    assert not model_parallel_is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 needs pipeline_config"),
        (
            {"pipeline_parallel_size": 2, "pipeline_config": {"pipeline_cuts": ["a", "b"]}},
            "2 pipeline_cuts make 3 stages; pipeline_parallel_size=2 times virtual_pipeline_size=1 needs 1 cuts",
        ),
        ({"pipeline_config": {"pipeline_cuts": ["a"], "auto_partition": True}}, "mutually exclusive"),
        ({"num_microbatches": 4}, "unknown key num_microbatches; did you mean pipeline_config.num_microbatches?"),
        ({"optimiser_config": {}}, r"unknown section \[optimiser_config\]; did you mean \[optimizer_config\]?"),
        ({"optimizer_config": [1]}, r"optimizer_config=\[1\]: optimizer_config is a section; give a dict of its keys"),
        ({"mixed_precision_config": {"use_fp32_grad_acc": True}}, "needs zero_one_enabled=True"),
        ({"activation_checkpoint_config": nn.Linear(1, 1)}, r"or a module class \(not an instance\)"),
        ({"activation_checkpoint_config": [None]}, "activation_checkpoint_config=None must be"),
        ({"pipeline_config": {"pipeline_cuts": 3}}, "pipeline_config.pipeline_cuts=3 is not allowed; expected a list"),
        (
            {"pipeline_config": {"pipeline_cuts": "layers.1"}},
            "pipeline_cuts='layers.1' is not allowed",
        ),
        ({"pipeline_config": {"leaf_module_cls": "Norm"}}, "leaf_module_cls='Norm' is not allowed; expected a list"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        neuronx_distributed_config(**arguments)


def test_zero_and_one_of_a_command_line_are_bools():
    config = neuronx_distributed_config(
        sequence_parallel=1,
        pad_model=0,
        pipeline_config={"auto_partition": 1, "num_microbatches": 1},
        optimizer_config={"zero_one_enabled": 1, "max_grad_norm": 1},
        mixed_precision_config={"use_master_weights": 0},
    )

    assert config["sequence_parallel"] is config["pipeline_config"]["auto_partition"] is True
    assert (
        config["optimizer_config"]["zero_one_enabled"] is config["mixed_precision_config"]["use_fp32_grad_acc"] is True
    )
    assert config["pad_model"] is config["mixed_precision_config"]["use_master_weights"] is False
    assert (config["pipeline_config"]["num_microbatches"], config["optimizer_config"]["max_grad_norm"]) == (1, 1)


def test_what_is_no_config_is_refused():
    with pytest.raises(ValueError, match="nxd_config=None is not a config"):
        initialize_parallel_model(None, nn.Linear, 1, 1)


@pytest.mark.parametrize("chosen", [None, "full", nn.Linear, "CoreAttention", [nn.Linear, "Block"]])
def test_parts_to_recompute_are_named_in_any_of_the_ways(chosen):
    assert neuronx_distributed_config(activation_checkpoint_config=chosen)["activation_checkpoint_config"] == chosen


def test_mesh_that_there_is_must_have_the_degrees_of_the_config(run_ranks):
    def run():
        initialize_model_parallel(tensor_model_parallel_size=2)
        agreeing = neuronx_distributed_config(tensor_parallel_size=2)
        with pytest.raises(ValueError, match="tensor_parallel_size=1, but it has 2"):
            neuronx_distributed_config()
        return agreeing["tensor_parallel_size"], get_mesh().tp

    assert run_ranks(run, 2) == [(2, 2), (2, 2)]


def test_degree_that_the_launched_ranks_do_not_allow_is_refused_on_every_rank(run_ranks):
    def run():
        with pytest.raises(ValueError, match="3") as raised:
            neuronx_distributed_config(tensor_parallel_size=3)
        return "world_size=2" in str(raised.value)

    assert run_ranks(run, 2) == [True, True]


def test_config_of_several_ranks_waits_for_whoever_starts_them(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    config = neuronx_distributed_config(tensor_parallel_size=2)

    assert not model_parallel_is_initialized()
    with pytest.raises(ValueError, match="world_size=1"):
        initialize_parallel_model(config, nn.Linear, 2, 2)
