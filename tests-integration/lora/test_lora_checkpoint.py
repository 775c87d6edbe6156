"""The three save modes through nxd_ckpt, and back at other layouts, on a Llama of ours."""

import json

import nxd_ckpt
import pytest
import torch
from nxd_ckpt import CheckpointError
from nxd_engine.adapters import (
    initialize_lora_model,
    load_lora_checkpoint,
    read_lora_config,
    save_lora_checkpoint,
)
from nxd_engine.checkpoints.state import model_state
from nxd_lora import LoraConfig, LoraModel, config_from_adapter_config, gather_adapter

SETTINGS = {
    "lora_rank": 4,
    "lora_alpha": 6,
    "use_rslora": True,
    "target_modules": ["embed_tokens", "q_proj", "v_proj", "down_proj", "lm_head"],
}
MODES = {
    "adapter": {},
    "both": {"save_lora_base": True},
    "merged": {"save_lora_base": True, "merge_lora": True},
}


@pytest.fixture
def trained(our_llama):
    """A model of ours with an adapter whose values do not depend on the layout, ready to be saved."""
    from nxd_lora import load_adapter

    def make(weights, **settings):
        model = LoraModel(our_llama(weights), LoraConfig(**{**SETTINGS, **settings})).eval()
        generator = torch.Generator().manual_seed(0)
        names = sorted(gather_adapter(model).items())
        load_adapter(
            model, {name: torch.randn(t.shape, generator=generator, dtype=torch.float64) / 4 for name, t in names}
        )
        return model

    return make


@pytest.fixture
def save(trained, whole_logits):
    """`save(weights, folder, **settings)`: logits of the model that was saved, which saving has not changed."""

    def save_model(weights, folder, **settings):
        model = trained(weights, **settings)
        before = [parameter.clone() for parameter in model.parameters()]
        save_lora_checkpoint(folder, "first", model, objects={"seed": 1}, step=5)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        return whole_logits(model)

    return save_model


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", ["adapter", "both"])
@pytest.mark.parametrize(("save_tp", "load_tp"), [(2, 1), (1, 2), (2, 2), (4, 2), (1, 4)])
def test_adapter_comes_back_at_another_layout(
    on_tp, tmp_path, hugging_face_llama, our_llama, save, whole_logits, mode, save_tp, load_tp
):
    weights = hugging_face_llama().state_dict()
    logits = on_tp(save_tp, lambda: save(weights, tmp_path, **MODES[mode]))[0]

    def load():
        base = weights if mode == "adapter" else {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        config = LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path), lora_load_tag="first")
        return whole_logits(initialize_lora_model(our_llama(base), config).eval())

    for found in on_tp(load_tp, load):
        torch.testing.assert_close(found, logits, rtol=1e-10, atol=1e-12)


def test_checkpoint_holds_what_the_mode_says_under_the_unsharded_models_names(
    on_tp, tmp_path, hugging_face_llama, save
):
    weights = hugging_face_llama().state_dict()
    names = {}
    for mode, settings in MODES.items():
        on_tp(2, lambda settings=settings, mode=mode: save(weights, tmp_path / mode, **settings))
        names[mode] = set(nxd_ckpt.open_checkpoint(tmp_path / mode).tensors)

    factors = {
        f"model.layers.{i}.{name}.lora_{f}"
        for i in (0, 1)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
        for f in "AB"
    }
    factors |= {f"model.embed_tokens.lora_embedding_{f}" for f in "AB"} | {f"lm_head.lora_{f}" for f in "AB"}
    assert names == {"adapter": factors, "both": factors | set(weights), "merged": set(weights)}


@pytest.mark.parametrize("tp", [1, 2])
def test_merged_checkpoint_loads_as_an_ordinary_model(
    on_tp, tmp_path, hugging_face_llama, our_llama, save, whole_logits, tp
):
    weights = hugging_face_llama().state_dict()
    logits = on_tp(2, lambda: save(weights, tmp_path, **MODES["merged"]))[0]

    def load():
        model = our_llama({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
        assert nxd_ckpt.load(tmp_path, into=model_state(model)).objects["seed"] == 1
        return whole_logits(model)

    for found in on_tp(tp, load):
        torch.testing.assert_close(found, logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("inside_only", [True, False])
def test_config_lies_inside_and_if_wanted_beside(on_tp, tmp_path, hugging_face_llama, save, inside_only):
    weights = hugging_face_llama().state_dict()
    on_tp(2, lambda: save(weights, tmp_path, save_lora_config_adapter=inside_only))

    assert read_lora_config(tmp_path) == LoraConfig(
        **{**SETTINGS, "target_modules": sorted(SETTINGS["target_modules"])}
    )
    file = tmp_path / "first" / "lora_adapter" / "adapter_config.json"
    assert file.exists() is not inside_only
    if not inside_only:
        assert config_from_adapter_config(json.loads(file.read_text())) == read_lora_config(tmp_path)


def test_merged_checkpoint_is_not_taken_for_an_adapter(on_tp, tmp_path, hugging_face_llama, our_llama, save):
    weights = hugging_face_llama().state_dict()
    on_tp(1, lambda: save(weights, tmp_path, **MODES["merged"]))
    config = LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(tmp_path))

    def load():
        with pytest.raises(CheckpointError, match=r"'first' .* holds no LoRA adapter; if .* merge_lora=True"):
            initialize_lora_model(our_llama(weights), config)
        return True

    assert on_tp(2, load) == [True, True]


def test_merged_weights_are_not_saved_as_the_base_model(tmp_path, hugging_face_llama, trained):
    model = trained(hugging_face_llama().state_dict(), **MODES["both"])
    model.merge()

    with pytest.raises(RuntimeError, match=r"merged into the base model's weights; unmerge\(\) first"):
        save_lora_checkpoint(tmp_path, "first", model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_alpha": 8}, "lora_alpha=6 in the adapter, 8 in the model"),
        ({"use_rslora": False}, "use_rslora=True in the adapter, False in the model"),
        ({"lora_rank": 2}, "lora_rank=4 in the adapter, 2 in the model"),
    ],
)
def test_checkpoint_of_another_scale_is_refused(tmp_path, settings, message):
    make = {"lora_rank": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["0"]}
    save_lora_checkpoint(tmp_path, "first", LoraModel(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(**make)))
    other = LoraModel(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(**make | settings))

    with pytest.raises(ValueError, match=message):
        load_lora_checkpoint(tmp_path, other)


@pytest.mark.parametrize("settings", [{}, {"merge_lora": True, "save_lora_base": True}])
def test_model_without_adapter_is_saved_as_an_ordinary_one(tmp_path, settings):
    model = LoraModel(torch.nn.Linear(2, 2), LoraConfig(enable_lora=False, **settings))

    save_lora_checkpoint(tmp_path, "first", model, objects={"seed": 1})

    loaded = torch.nn.Linear(2, 2)
    found = nxd_ckpt.load(tmp_path, "first", into=model_state(loaded))
    assert torch.equal(loaded.weight, model.module.weight)
    assert torch.equal(loaded.bias, model.module.bias)
    assert found.objects == {"seed": 1}


@pytest.mark.parametrize(
    "settings", [{}, {"enable_lora": False}, {"merge_lora": True, "save_lora_base": True}], ids=str
)
def test_object_under_the_adapters_key_is_refused(tmp_path, settings):
    config = LoraConfig(**{"lora_rank": 2, "target_modules": ["0"], **settings})
    model = LoraModel(torch.nn.Sequential(torch.nn.Linear(2, 2)), config)

    with pytest.raises(ValueError, match="objects has the key 'lora', which is reserved for the adapter"):
        save_lora_checkpoint(tmp_path, "first", model, objects={"lora": 1})


def test_training_goes_on_exactly_after_a_checkpoint(on_tp, tmp_path, hugging_face_llama, our_llama):
    weights = hugging_face_llama().state_dict()
    ids = torch.arange(16).view(2, 8) % 11

    def steps(model, optimizer, count):
        for _ in range(count):
            model(ids, labels=ids).backward()
            optimizer.step()
            optimizer.zero_grad()

    def train(folder):
        torch.manual_seed(0)
        model = LoraModel(our_llama(weights), LoraConfig(**SETTINGS))
        optimizer = torch.optim.SGD(model.adapter_parameters().values(), lr=0.5)
        steps(model, optimizer, 2)
        save_lora_checkpoint(folder, "two", model)
        steps(model, optimizer, 2)

        config = LoraConfig(load_lora_from_ckpt=True, lora_save_dir=str(folder))
        resumed = initialize_lora_model(our_llama(weights), config)
        steps(resumed, torch.optim.SGD(resumed.adapter_parameters().values(), lr=0.5), 2)
        others = resumed.adapter_parameters()
        return all(torch.equal(p, others[name]) for name, p in model.adapter_parameters().items())

    assert on_tp(2, train, tmp_path) == [True, True]
