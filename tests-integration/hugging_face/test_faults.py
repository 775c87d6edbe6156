"""What a stranger gets wrong: damaged folders, on one rank only too, and arguments that are no types or sizes."""

import json
import shutil

import pytest
import torch
import transformers
from nxd_ckpt import CheckpointError
from nxd_engine.hugging_face import import_hugging_face, load_pretrained, save_pretrained
from nxd_layers.hf import parallelize
from nxd_state import PeerError, get_tensor_model_parallel_rank, initialize_model_parallel


def empty_model(folder):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    return parallelize(model)


def truncated(folder, target):
    shutil.copytree(folder, target)
    largest = max(target.glob("*.safetensors"), key=lambda it: it.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-8])
    return target


def with_a_file_missing(folder, target):
    shutil.copytree(folder, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    (target / index["weight_map"]["model.norm.weight"]).unlink()
    return target


def test_folder_that_is_damaged_for_one_rank_fails_on_all(run_ranks, make_folder, tmp_path):
    whole = make_folder("llama")
    damaged = {"is not a whole safetensors file": truncated(whole, tmp_path / "short")}
    damaged["cannot be read: No such file"] = with_a_file_missing(whole, tmp_path / "missing")

    def load():
        initialize_model_parallel(tensor_model_parallel_size=2)
        rank, model, raised = get_tensor_model_parallel_rank(), empty_model(whole), []
        for folder in damaged.values():
            with pytest.raises((CheckpointError, RuntimeError)) as error:
                load_pretrained(model, folder if rank == 1 else whole)
            raised.append((error.type, str(error.value)))
        load_pretrained(model, whole)  # nothing is left over from the failures
        return raised, bool(model.model.norm.weight.any())

    first, second = run_ranks(load, 2)

    for message, (kind, text), (other_kind, other_text) in zip(damaged, first[0], second[0], strict=True):
        assert (kind, other_kind) == (PeerError, CheckpointError)
        assert text.startswith(f"opening {whole} failed on rank 1: ")
        assert message in text
        assert message in other_text
    assert first[1]
    assert second[1]


class Unreadable(torch.nn.Parameter):
    """Values that cannot be copied, as where memory runs out."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.contiguous:
            raise MemoryError("no room for a copy")
        return torch.Tensor.__torch_function__.__func__(cls, func, types, args, kwargs)  # which views inherit


def test_a_rank_that_cannot_give_its_part_fails_the_saving_on_all_and_leaves_nobody_waiting(
    run_ranks, make_folder, tmp_path
):
    whole = make_folder("llama")

    def save():
        initialize_model_parallel(tensor_model_parallel_size=2)
        rank, model, raised = get_tensor_model_parallel_rank(), empty_model(whole), []
        load_pretrained(model, whole)
        weight = model.model.layers[1].mlp.gate_proj.weight
        for failing in (1, 0):
            weight.__class__ = Unreadable if rank == failing else torch.nn.Parameter
            with pytest.raises((MemoryError, RuntimeError)) as error:
                save_pretrained(model, tmp_path / f"failed-{failing}", like=whole)
            raised.append((error.type, str(error.value)))
        weight.__class__ = torch.nn.Parameter
        save_pretrained(model, tmp_path / "saved", like=whole)  # nothing is left over from the failures
        return raised

    (first, own_of_first), (own_of_second, second) = run_ranks(save, 2)

    assert own_of_second == own_of_first == (MemoryError, "no room for a copy")
    told = "reading a part of the model failed on rank 1: MemoryError: no room for a copy"
    assert (issubclass(first[0], RuntimeError), first[1]) == (True, told)
    assert second == (PeerError, "writing the model failed on rank 0: MemoryError: no room for a copy")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 0
    assert not list(tmp_path.glob("failed-*/model*"))


def test_a_model_that_cannot_be_read_on_one_rank_fails_the_saving_on_all(run_ranks, make_folder, tmp_path):
    whole = make_folder("llama")

    def save():
        initialize_model_parallel(tensor_model_parallel_size=2)
        model = empty_model(whole)
        load_pretrained(model, whole)
        if get_tensor_model_parallel_rank() == 1:
            layer = model.model.layers[0].mlp.gate_proj
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone())  # without what says which part it is
        with pytest.raises((ValueError, RuntimeError)) as error:
            save_pretrained(model, tmp_path / "saved", like=whole)
        return error.type, str(error.value)

    first, second = run_ranks(save, 2)

    assert (first[0], second[0]) == (PeerError, ValueError)
    assert first[1].startswith("reading a part of the model failed on rank 1: ValueError: ")
    assert second[1] in first[1]


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8])
def test_what_is_no_floating_point_type_is_refused_before_anything_is_touched(make_folder, tmp_path, dtype):
    folder = make_folder("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)

    with pytest.raises(ValueError, match="is not a floating-point dtype"):
        load_pretrained(model, folder, dtype=dtype)
    with pytest.raises(ValueError, match="is not a floating-point dtype"):
        save_pretrained(model, tmp_path / "saved", dtype=dtype)
    with pytest.raises(ValueError, match="is not a floating-point dtype"):
        import_hugging_face(folder, tmp_path / "saved", dtype=dtype)

    assert model.dtype == torch.float32
    assert not (tmp_path / "saved").exists()


def test_sizes_of_files_may_be_huge_but_must_be_sizes(make_folder, tmp_path):
    folder = make_folder("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)

    for size in ("five", "0GB", "-1MB", 0):
        with pytest.raises(ValueError, match=r"is not a size|is too small"):
            save_pretrained(model, tmp_path / "saved", max_shard_size=size)
    assert not (tmp_path / "saved").exists()

    save_pretrained(model, tmp_path / "saved", max_shard_size="900000TB")
    assert [file.name for file in (tmp_path / "saved").glob("*.safetensors*")] == ["model.safetensors"]


def test_folder_of_a_model_in_the_older_format_keeps_its_config(make_folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(make_folder("llama"))
    for name in ("pytorch_model.bin", "config.json"):
        (tmp_path / name).write_text("mine")

    with pytest.raises(ValueError, match=r"already holds a pytorch_model\.bin"):
        save_pretrained(model, tmp_path)

    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {
        "pytorch_model.bin": "mine",
        "config.json": "mine",
    }


def test_target_that_cannot_be_a_folder_is_named(make_folder, tmp_path):
    folder = make_folder("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="file"):
        save_pretrained(model, tmp_path / "file" / "saved")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 32},
            r"embed_tokens.weight' has shape \[\d+, \d+\] in the files, \[32, \d+\] according to the config",
        ),
        ({"num_hidden_layers": 3}, "it lacks"),
        ({"hidden_size": "32"}, "transformers cannot create a LlamaForCausalLM from the config: .*hidden_size"),
        ({"num_attention_heads": 0}, "transformers cannot create a LlamaForCausalLM from the config"),
    ],
)
def test_config_that_does_not_fit_its_files_is_refused_and_nothing_is_written(make_folder, tmp_path, changes, message):
    folder = make_folder("llama")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))

    with pytest.raises(ValueError, match=message):
        import_hugging_face(folder, tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("changes", [{"eos_token_id": []}, {"architectures": ["pipeline"]}, {"architectures": [3]}])
def test_config_with_odd_entries_is_imported_all_the_same(make_folder, tmp_path, changes):
    folder = make_folder("llama")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))

    import_hugging_face(folder, tmp_path / "checkpoints")

    assert (tmp_path / "checkpoints" / "imported").is_dir()
