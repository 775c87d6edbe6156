"""What a folder may be like: other names, types and sizes than the model's, tensors too few or too many."""

import json
import shutil

import pytest
import torch
import transformers
from nxd_engine.hugging_face import import_hugging_face, load_pretrained
from nxd_layers.hf import parallelize
from nxd_state import get_shard_spec, initialize_model_parallel
from safetensors.torch import load_file, save_file

IDS = torch.arange(3, 17).view(2, 7)


def loss_of(folder, **options):
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)(IDS, labels=IDS).loss


def rewritten(folder, target, change):
    """A copy of a one-file folder whose tensors are changed."""
    shutil.copytree(folder, target)
    save_file(change(load_file(folder / "model.safetensors")), target / "model.safetensors", metadata={"format": "pt"})
    return target


def renamed(prefix):
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def test_names_ties_types_and_padding_do_not_matter(run_ranks, make_folder, tmp_path):
    one_file = {"max_shard_size": "1GB"}
    llama = make_folder("llama", **one_file)
    tied = make_folder("smollm3", **one_file)
    odd = make_folder("qwen2", vocab_size=61, num_attention_heads=3, num_key_value_heads=1, **one_file)
    cases = {
        "names of the base model": (rewritten(llama, tmp_path / "base", renamed("model.")), {}),
        "the tied table under the head's name": (
            rewritten(
                tied,
                tmp_path / "head",
                lambda t: {n.replace("model.embed_tokens", "lm_head"): it for n, it in t.items()},
            ),
            {},
        ),
        "both names of the tied table": (
            rewritten(
                tied, tmp_path / "both", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()}
            ),
            {},
        ),
        "buffers that were stored once": (
            rewritten(llama, tmp_path / "old", lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": IDS}),
            {},
        ),
        "another type": (llama, {"dtype": torch.float64}),
        "heads and vocabulary that do not divide": (odd, {}),
    }

    def load_all():
        initialize_model_parallel(tensor_model_parallel_size=2)
        losses = {}
        for case, (folder, options) in cases.items():
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
            model = parallelize(model)
            load_pretrained(model, folder, **options)
            specs = [(p, get_shard_spec(p)) for p in model.parameters()]
            padded = [(p, spec) for p, spec in specs if spec is not None and spec.has_padding]
            losses[case] = model(IDS, labels=IDS).loss, len(padded), {p.dtype for p in model.parameters()}
        return losses

    by_rank = run_ranks(load_all, 2)

    origins = {"head": tied, "both": tied, "base": llama, "old": llama}
    for case, (folder, options) in cases.items():
        expected = loss_of(origins.get(folder.name, folder), **options)
        for loss, _, dtypes in (rank[case] for rank in by_rank):
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0, check_dtype=False, msg=case)
            assert dtypes == {options.get("dtype", torch.float32)}
        assert any(num_padded for _, num_padded, _ in (rank[case] for rank in by_rank)) == ("divide" in case), case


def test_tensors_that_do_not_fit_are_named_on_every_rank(run_ranks, make_folder, tmp_path):
    llama = make_folder("llama", max_shard_size="1GB")
    name = "model.layers.1.mlp.up_proj.weight"
    missing = rewritten(llama, tmp_path / "missing", without(name))
    further = rewritten(
        llama, tmp_path / "further", lambda t: t | {"model.layers.4.mlp.up_proj.weight": t[name].clone()}
    )
    shorter = rewritten(llama, tmp_path / "shorter", lambda t: t | {name: t[name][:24].contiguous()})

    def load_all():
        initialize_model_parallel(tensor_model_parallel_size=2)
        model = parallelize(transformers.AutoConfig.from_pretrained(llama))
        messages = []
        for folder in (missing, further, shorter):
            with pytest.raises(ValueError, match="does not fit the model") as raised:
                load_pretrained(model, folder)
            messages.append(str(raised.value))
        untouched = model.model.layers[1].mlp.up_proj.weight.detach().clone()
        left_out = load_pretrained(model, missing, strict=False)
        return messages, left_out, torch.equal(untouched, model.model.layers[1].mlp.up_proj.weight)

    for messages, left_out, is_untouched in run_ranks(load_all, 2):
        assert f"{name!r} is not in the folder" in messages[0]
        assert "'model.layers.4.mlp.up_proj.weight' is in the folder, but not in the model" in messages[1]
        assert f"{name!r} has shape [24, 32] in the folder, [48, 32] in the model" in messages[2]
        assert (left_out, is_untouched) == ([name], True)


def test_model_on_the_meta_device_cannot_leave_tensors_out(make_folder, tmp_path):
    llama = make_folder("llama", max_shard_size="1GB")
    missing = rewritten(llama, tmp_path / "missing", without("model.norm.weight"))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(llama))

    with pytest.raises(ValueError, match=r"'model\.norm\.weight' is not in the folder"):
        load_pretrained(model, missing, strict=False)


def test_conversion_that_is_not_a_rearrangement_is_refused_by_name(make_folder, monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import PermuteForRope, WeightConverter

    folder = make_folder("llama")
    rule = WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", operations=[PermuteForRope()])
    rules = {"llama": [rule], "legacy": []}
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", rules.get)

    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj.weight' is made from .* PermuteForRope"):
        import_hugging_face(folder, folder / "checkpoints")


def test_import_refuses_a_folder_that_is_not_what_its_config_says(make_folder, tmp_path):
    llama = make_folder("llama", max_shard_size="1GB")
    missing = rewritten(llama, tmp_path / "missing", without("lm_head.weight"))
    (missing / "config.json").write_text(json.dumps(json.loads((llama / "config.json").read_text())))

    with pytest.raises(ValueError, match=r"it lacks \['lm_head.weight'\]"):
        import_hugging_face(missing, tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        import_hugging_face(tmp_path, tmp_path / "checkpoints")
