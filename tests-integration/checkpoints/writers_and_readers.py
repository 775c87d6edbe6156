"""What writes checkpoints and what reads them, each on two ranks: of the same Llama, or of a model of transformers."""

from dataclasses import asdict
from pathlib import Path

import torch
from neuronx_distributed.trainer import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    load_checkpoint,
    neuronx_distributed_config,
    save_checkpoint,
)
from nxd_ckpt.sharded_tensor import as_sharded
from nxd_engine.checkpoints.find import open_own
from nxd_engine.checkpoints.optimizer_state import optimizer_state
from nxd_engine.checkpoints.state import model_state
from nxd_engine.hugging_face import import_hugging_face
from nxd_engine.models import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from nxd_engine.unwrap import plain_model, plain_optimizer
from nxd_lora import LoraConfig
from nxd_state import barrier, get_world_group, initialize_model_parallel
from nxd_trainer.generate import generate, load_for_generation
from nxd_trainer.recipe import load_recipe
from nxd_trainer.training import prepare_run, train

SIZES = LlamaConfig(
    vocab_size=320,  # bytes, and what rounds them up
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_theta=500.0,
    rms_norm_eps=1e-5,
)
TOKENS = torch.arange(34).reshape(2, 17)


def recipe_of(output: Path, text: Path, *settings: str):
    sizes = asdict(SIZES)
    del sizes["initializer_range"]
    model = [f"model.{name}={size}" for name, size in sizes.items()]
    return recipe_with(output, text, *model, "train.dtype=float64", *settings)


def recipe_of_transformers(output: Path, text: Path, model_fn, *settings: str):
    """Of a folder, which the first rank writes."""
    folder = output / "model"
    if get_world_group().rank == 0:
        model_fn().save_pretrained(folder)
    barrier(get_world_group())
    dtype = str(model_fn().dtype).removeprefix("torch.")
    return recipe_with(output, text, f"model.path={folder}", f"train.dtype={dtype}", *settings)


def recipe_with(output: Path, text: Path, *settings: str):
    return load_recipe(
        None,
        [
            f"data.path={text}",
            f"output={output}",
            "data.sequence_length=16",
            "train.steps=2",
            "train.global_batch_size=4",
            "train.eval_every=0",
            *settings,
        ],
    )


def stages(transformer_layer_cls=None):
    return {
        "num_microbatches": 2,
        "input_names": ["input_ids", "labels"],
        "auto_partition": True,
        "transformer_layer_cls": transformer_layer_cls,
    }


def made_by_script(tp: int, pp: int, model_fn=None, seed: int = 0, *, lr: float = 1e-3, lora_config=None):
    """Model, optimizer and scheduler of the documented API."""
    pipeline = stages(None if model_fn else LlamaDecoderLayer) if pp > 1 else None
    config = neuronx_distributed_config(tp, pp, pipeline_config=pipeline, lora_config=lora_config)
    torch.manual_seed(seed)
    model = initialize_parallel_model(config, model_fn or (lambda: LlamaForCausalLM(SIZES, dtype=torch.float64)))
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [  # those of Lightning
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=lr)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def transformers_llama():
    import transformers

    sizes = asdict(SIZES)
    theta = sizes.pop("rope_theta")
    config = transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": theta})
    return transformers.LlamaForCausalLM(config).to(torch.float64)


OF_TRANSFORMERS = {  # what is not alike in all of them
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "llama": {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},  # heads that TP 2 pads
    "gemma3_text": {"head_dim": 8, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"pad_token_id": 0},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
}


def of_transformers(model_type: str) -> torch.nn.Module:
    """A tiny model that knows bytes; large weights make each token depend on all before it.

    In float64, unless it has experts, whose products transformers has in float32 and shorter types only.
    """
    import transformers

    sizes = asdict(SIZES) | {"vocab_size": 321, "initializer_range": 0.3}  # which two ranks do not divide
    del sizes["rope_theta"]
    config = transformers.AutoConfig.for_model(model_type, **sizes | OF_TRANSFORMERS[model_type])
    torch.manual_seed(0)
    has_experts = any("experts" in name for name in OF_TRANSFORMERS[model_type])
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.float32 if has_experts else torch.float64)


def write_by_train(folder: Path, text: Path) -> None:
    initialize_model_parallel(2)
    train(recipe_of(folder, text, "parallel.tensor_parallel_size=2"))


def write_by_train_of_transformers(folder: Path, text: Path, model_fn) -> None:
    initialize_model_parallel(1, 2)
    train(recipe_of_transformers(folder, text, model_fn, "parallel.pipeline_parallel_size=2"))


def write_by_script(folder: Path, text: Path, model_fn=None) -> None:
    step_and_save(folder, *made_by_script(tp=1, pp=2, model_fn=model_fn))


def write_by_script_of_transformers(folder: Path, text: Path) -> None:
    step_and_save(folder, *made_by_script(tp=2, pp=1, model_fn=transformers_llama))


def write_adapter_by_script(folder: Path, text: Path, model_fn) -> None:
    step_and_save(folder, *made_by_script(tp=2, pp=1, model_fn=model_fn, lr=0.1, lora_config=LORA))


LORA = LoraConfig(lora_rank=2, lora_alpha=8, target_modules=["q_proj", "o_proj"], save_lora_base=True)


def step_and_save(folder: Path, model, optimizer, scheduler) -> None:
    model.run_train(input_ids=TOKENS[:, :-1], labels=TOKENS[:, 1:])
    optimizer.step()
    scheduler.step()
    save_checkpoint(folder / "checkpoints", "first", model, optimizer, scheduler, {"steps": 1})


def fit(folder: Path, text: Path, *, tp: int, pp: int, model_fn=None, ckpt_path: Path | None = None, callbacks=()):
    """A Trainer that has trained to step 2, or from a checkpoint to step 3."""
    import lightning
    from nxd_lightning import NeuronLTModule, NeuronXLAPrecisionPlugin, NeuronXLAStrategy, TextDataModule

    pipeline = stages(None if model_fn else LlamaDecoderLayer) if pp > 1 else None
    config = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "pipeline_config": pipeline}
    lightning.seed_everything(5)
    data = TextDataModule(text, sequence_length=16, global_batch_size=4, cache_folder=folder / "tokens")
    module = NeuronLTModule(
        model_fn or (lambda: LlamaForCausalLM(SIZES, dtype=torch.float64)),
        config,
        torch.optim.AdamW,
        torch.optim.lr_scheduler.ConstantLR,
        opt_kwargs={"lr": 1e-3},
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=NeuronXLAStrategy(config),
        plugins=[NeuronXLAPrecisionPlugin()],
        max_steps=2 if ckpt_path is None else 3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer


def write_by_lightning(folder: Path, text: Path, model_fn=None) -> None:
    fit(folder, text, tp=1, pp=1, model_fn=model_fn).save_checkpoint(folder / "checkpoints" / "last.ckpt")


def write_by_import(folder: Path, text: Path, model_fn) -> None:
    initialize_model_parallel()
    if get_world_group().rank == 0:
        model_fn().save_pretrained(folder / "model")
        import_hugging_face(folder / "model", folder / "checkpoints")


WRITERS = {
    "nxd train": write_by_train,  # TP 2
    "save_checkpoint": write_by_script,  # PP 2
    "save_checkpoint of transformers": write_by_script_of_transformers,  # TP 2
    "Lightning": write_by_lightning,  # DP 2
}
WRITERS_OF_TRANSFORMERS = {
    "nxd train": write_by_train_of_transformers,  # PP 2
    "save_checkpoint": write_by_script,  # PP 2
    "save_checkpoint of an adapter": write_adapter_by_script,  # TP 2
    "Lightning": write_by_lightning,  # DP 2
    "nxd import": write_by_import,  # weights alone
}


def differing(model, checkpoints: Path, optimizer=None) -> list[str]:
    """Tensors of this rank's part of a model, and of its optimizer, that are not what the checkpoint holds."""
    checkpoint = open_own(checkpoints, None)
    state = model_state(plain_model(model))
    if optimizer is not None:
        state |= optimizer_state(plain_model(model), plain_optimizer(optimizer))
        assert any(name.endswith("/exp_avg") for name in state)
    assert state
    return [
        name
        for name, tensor in state.items()
        for shard in as_sharded(name, tensor).shards
        if not torch.equal(shard.tensor, checkpoint.read_box(name, shard.box.offsets, shard.box.shape))
    ]


def begin_by_train(checkpoints: Path, folder: Path, text: Path, model_fn=None, tp: int = 1) -> list[str]:
    initialize_model_parallel(tp, 2 // tp)
    begun = [f"checkpoint.initial_weights={checkpoints}", "train.seed=7"]
    begun += [f"parallel.tensor_parallel_size={tp}", f"parallel.pipeline_parallel_size={2 // tp}"]
    recipe = recipe_of_transformers(folder, text, model_fn, *begun) if model_fn else recipe_of(folder, text, *begun)
    state, resumed = prepare_run(recipe)
    assert resumed is None
    return differing(state.model, checkpoints)


def load_by_script(
    checkpoints: Path, folder: Path, text: Path, model_fn=None, tp=2, *, with_optimizer=True, **settings
) -> list[str]:
    model, optimizer, _ = made_by_script(tp=tp, pp=2 // tp, model_fn=model_fn, seed=7, **settings)
    optimizer = optimizer if with_optimizer else None
    load_checkpoint(checkpoints, model=model, optimizer=optimizer)
    return differing(model, checkpoints, optimizer)


def load_by_transformers_script(checkpoints: Path, folder: Path, text: Path) -> list[str]:
    return load_by_script(checkpoints, folder, text, transformers_llama)


def fit_by_lightning(checkpoints: Path, folder: Path, text: Path, model_fn=None, tp: int = 1) -> list[str]:
    from lightning.pytorch.callbacks import Callback

    found: list[list[str]] = []

    class Compare(Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            found.append(differing(pl_module.model, checkpoints))

    last = checkpoints / "last.ckpt"
    begun = last if last.exists() else checkpoints
    fit(folder, text, tp=tp, pp=2 // tp, model_fn=model_fn, ckpt_path=begun, callbacks=[Compare()])
    return found[0]


def generate_text(checkpoints: Path, folder: Path, text: Path) -> list[str]:
    initialize_model_parallel(2)
    model, tokenizer = load_for_generation(checkpoints, tokenizer="bytes")
    prompt = torch.from_numpy(tokenizer.encode("the"))
    assert len(list(generate(model, prompt, max_new_tokens=4, temperature=0))) == 4
    return differing(model, checkpoints)


READERS = {
    "nxd train from its weights": begin_by_train,  # PP 2
    "load_checkpoint": load_by_script,  # TP 2
    "load_checkpoint of transformers": load_by_transformers_script,  # TP 2
    "Lightning": fit_by_lightning,  # PP 2
    "generate": generate_text,  # TP 2
}
