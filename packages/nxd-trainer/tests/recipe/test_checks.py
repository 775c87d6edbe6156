import pytest
from nxd_pipeline import TRAINING_SCHEDULES, make_schedule
from nxd_trainer.recipe import RecipeError, check_layout, load_recipe, padded_vocab_size, recipe_from_dict


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["model.hidden_size=100"],
            "model.num_attention_heads=8 does not divide model.hidden_size=100; use 1, 2, 4, 5, 10, 20, 25, 50 or 100",
        ),
        (
            ["model.num_key_value_heads=3"],
            "model.num_key_value_heads=3 does not divide model.num_attention_heads=8; use 1, 2, 4 or 8",
        ),
        (
            ["model.hidden_size=24"],
            "model.hidden_size=24 over model.num_attention_heads=8 gives heads of size 3; "
            "rotary embedding needs an even size",
        ),
        (
            ["data.sequence_length=4096"],
            "data.sequence_length=4096 is more than model.max_position_embeddings=2048; "
            "lower it or raise model.max_position_embeddings",
        ),
        (
            ["optimizer.type=sgd", "optimizer.betas=0.8,0.9"],
            "optimizer.betas=0.8,0.9 is for optimizer.type=adamw and muon; set others in optimizer.config",
        ),
        (
            ["optimizer.type=sgd", "optimizer.factory=torch.optim:RAdam"],
            "optimizer.type=sgd and optimizer.factory each name an optimizer; set one of them",
        ),
        (
            ["optimizer.factory=RAdam"],
            "optimizer.factory=RAdam does not have the form module:name, such as torch.optim:NAdam",
        ),
        (
            ["model.rope_scaling.factor=8"],
            "model.rope_scaling={'factor': 8} has no rope_type, such as llama3",
        ),
        (
            ["optimizer.num_cycles=2"],
            "optimizer.num_cycles=2 is for optimizer.schedule=cosine_with_restarts, not cosine; leave it out",
        ),
        (
            ["optimizer.schedule=warmup_stable_decay", "optimizer.num_decay_steps=9", "train.steps=20"],
            "optimizer.warmup_steps=20 plus optimizer.num_decay_steps=9 is more than train.steps=20; lower one of them",
        ),
        (
            ["train.early_stopping_patience=2", "train.eval_every=0"],
            "train.early_stopping_patience=2 needs a held-out loss, which train.eval_every=0 turns off; "
            "set train.eval_every, or train.early_stopping_patience=0",
        ),
        (
            ["train.ema_decay=0.9", "lora.rank=4", "lora.save=merged"],
            "train.ema_decay=0.9 averages the adapter, which lora.save=merged does not save; "
            "set lora.save=adapter or both",
        ),
        (
            ["train.dtype=float16"],
            "train.dtype=float16 needs parallel.zero_stage=1, which has float32 master weights; set it, or use "
            "train.dtype=float32 with train.autocast=float16",
        ),
        (
            ["parallel.zero_offload=parameters", "parallel.zero_stage=2"],
            "parallel.zero_offload=parameters needs parallel.zero_stage=3",
        ),
        (
            ["parallel.shard_group_size=2"],
            "parallel.shard_group_size=2 needs parallel.zero_stage=1 or more, which shards over the replicas",
        ),
        (
            ["parallel.reshard_after_forward=false", "parallel.zero_stage=2"],
            "parallel.reshard_after_forward=false needs parallel.zero_stage=3, which shards the parameters",
        ),
        (
            ["optimizer.stochastic_rounding=true"],
            "optimizer.stochastic_rounding=true rounds bfloat16 weights, not train.dtype=float32; set "
            "train.dtype=bfloat16, or leave it out",
        ),
        (
            ["train.gradient_histograms_every=5", "train.report_to=wandb"],
            "train.gradient_histograms_every=5 writes to TensorBoard, which train.report_to does not list; add "
            "tensorboard to it, or set train.gradient_histograms_every=0",
        ),
        (
            ["data.column=text"],
            "data.column=text needs data.path, a file or folder of rows",
        ),
        (
            ["data.chat=true", "data.tokenizer=folder"],
            "data.chat=true needs data.path, a file or folder of rows",
        ),
        (
            ["data.packing=true"],
            "data.packing=true is for conversations; text is always packed. Leave it out, or set data.chat=true",
        ),
        (
            ["data.chat=true", "data.path=chat.jsonl"],
            "data.chat=true needs data.tokenizer, a tokenizer folder with a chat template, or model.path",
        ),
        (
            ["data.chat=true", "data.column=text", "data.path=chat.jsonl", "model.path=folder"],
            "data.column=text is plain text, which data.chat=true does not read; set one of them",
        ),
        (
            ["data.path=a", 'data.sources={"b": 1}', "data.dataset=org/name", "data.column=text"],
            "data.path, data.sources and data.dataset each name the data; keep one of them",
        ),
        (
            ["data.dataset=org/name"],
            "data.dataset=org/name holds rows; set data.column to the column with text, or data.chat=true",
        ),
        (
            ["data.dataset_config=main"],
            "data.dataset_config=main needs data.dataset; set it, or leave data.dataset_config out",
        ),
        (
            ["train.steps=10", "train.stop_after=11"],
            "train.stop_after=11 is more than train.steps=10; lower it or raise train.steps",
        ),
        (
            ["train.dtype=float64", "train.autocast=bfloat16"],
            "train.autocast=bfloat16 needs train.dtype=float32, not float64; "
            "set train.autocast=none or train.dtype=float32",
        ),
        (
            ["parallel.pipeline_parallel_size=8"],
            "parallel.pipeline_parallel_size=8 is more than model.num_hidden_layers=4 can fill: 8 ranks need 8 layers; "
            "use at most 4, or add layers",
        ),
        (
            ["parallel.pipeline_parallel_size=3", "pipeline.schedule=zb-v"],
            "parallel.pipeline_parallel_size=3 is more than model.num_hidden_layers=4 can fill: "
            "3 ranks of 2 stages each need 6 layers; use at most 2, or add layers",
        ),
        (
            ["parallel.pipeline_parallel_size=2", "pipeline.virtual_pipeline_size=2"],
            "pipeline.virtual_pipeline_size=2 does not fit pipeline.schedule=1f1b, which has 1; "
            "leave it unset, or use gpipe, interleaved, zb-v or dualpipe-v",
        ),
        (
            ["model.type=qwen3", "model.factory=a:b"],
            "model.type and model.factory each name a model; set one of them",
        ),
        (
            ["model.path=folder", "model.hidden_size=128", "model.rope_theta=5"],
            "model.hidden_size and model.rope_theta cannot be set: model.path has its own sizes; use "
            "model.config, or leave it to the folder's config.json",
        ),
        (
            ["model.factory=a:b", "model.vocab_size=300"],
            "model.vocab_size cannot be set: model.factory has its own sizes; use model.config",
        ),
        (["model.factory=make"], "model.factory=make does not have the form module:name, such as my_models:make"),
        (
            ["model.config.head_dim=8"],
            "model.config={'head_dim': 8} is for model.type, model.path or model.factory; "
            "our Llama is configured by its sizes alone",
        ),
        (["pipeline.layer_class=a:b"], "pipeline.layer_class=a:b is for models made by model.factory; leave it out"),
        (["parallel.pad_heads=true"], "parallel.pad_heads=true is for models made by model.factory; leave it out"),
        (
            ["parallel.activation_checkpointing=ful"],
            "parallel.activation_checkpointing=ful is unknown; did you mean full?",
        ),
        (
            ["lora.rank=4", "lora.use_dora=true", "lora.dropout=0.1"],
            "lora.use_dora=true does not support lora.dropout=0.1; set it to 0",
        ),
        (
            ["dpo.beta=0.1", "data.tokenizer=folder"],
            "dpo.beta=0.1 needs data.path, a file of rows with prompt, chosen and rejected",
        ),
        (
            ["dpo.beta=0.1", "data.path=rows.jsonl"],
            "dpo.beta=0.1 needs data.tokenizer, a Hugging Face folder, or model.path",
        ),
        (
            ["dpo.beta=0.1", "data.path=rows.jsonl", "model.path=folder", "data.chat=true"],
            "dpo.beta=0.1 does not support data.chat; leave data.chat out",
        ),
        (
            ["parallel.context_parallel_size=2", "train.compile=true"],
            "parallel.context_parallel_size=2 computes different blocks on each rank; set train.compile=false",
        ),
        (
            ["dpo.beta=0.1", "data.path=rows.jsonl", "model.path=folder", "parallel.context_parallel_size=2"],
            "parallel.context_parallel_size=2 does not support dpo.beta, whose loss needs whole answers; set it to 1",
        ),
        (
            ["parallel.activation_offload=true"],
            "parallel.activation_offload=true offloads the tensors that parallel.activation_checkpointing keeps; "
            "set parallel.activation_checkpointing=full",
        ),
        (
            ["parallel.activation_offload=true", "parallel.activation_checkpointing=full", "train.compile=true"],
            "parallel.activation_offload=true does not support compiled models; set train.compile=false",
        ),
        (
            ["moe.z_loss_coef=0.1"],
            "moe.z_loss_coef=0.1 is for models with experts; our Llama has none; "
            "choose another model by model.path or model.type",
        ),
        (
            ["moe.aux_loss_coef=0.1", "model.type=mixtral", "train.compile=true"],
            "moe.aux_loss_coef=0.1 counts the routers' choices, which needs train.compile=false",
        ),
        (["dpo.label_smoothing=0.1"], "dpo.label_smoothing=0.1 has no effect with dpo.beta=0; set dpo.beta"),
        (["dpo.loss=ipo"], "dpo.loss=ipo has no effect with dpo.beta=0; set dpo.beta"),
        (
            ["dpo.beta=0.1", "data.path=rows.jsonl", "model.path=folder", "dpo.loss=hinge", "dpo.label_smoothing=0.1"],
            "dpo.label_smoothing=0.1 is for dpo.loss=sigmoid and robust, not hinge; leave it out",
        ),
        (
            ["lora.target_modules=q_proj"],
            "lora.target_modules=q_proj has no effect with lora.rank=0; set lora.rank, such as 16",
        ),
        (
            ["checkpoint.keep=0", "checkpoint.keep_every=10"],
            "checkpoint.keep_every=10 has no effect with checkpoint.keep=0, which keeps all; "
            "set checkpoint.keep to 1 or more, or checkpoint.keep_every=0",
        ),
        (
            ["checkpoint.keep_best=2", "data.held_out_fraction=0"],
            "checkpoint.keep_best=2 needs a held-out loss, which data.held_out_fraction=0 turns off; "
            "set data.held_out_fraction, or checkpoint.keep_best=0",
        ),
        (
            ["checkpoint.memory_every=2", "checkpoint.resume=never"],
            "checkpoint.memory_every=2 has no effect with checkpoint.resume=never; set it to latest",
        ),
        (
            ["checkpoint.memory_every=2", "lora.rank=4", "lora.save=merged"],
            "checkpoint.memory_every=2 needs checkpoints to resume from, which lora.save=merged does not write; "
            "set lora.save=adapter or both",
        ),
        (
            ["checkpoint.keep_best=2", "train.eval_every=0"],
            "checkpoint.keep_best=2 needs a held-out loss, which train.eval_every=0 turns off; "
            "set train.eval_every, or checkpoint.keep_best=0",
        ),
        (
            ["checkpoint.keep_best=2", "checkpoint.save_every=30", "train.eval_every=20"],
            "checkpoint.keep_best=2 needs a held-out loss, which some checkpoints would lack; "
            "make checkpoint.save_every=30 a multiple of train.eval_every=20",
        ),
    ],
)
def test_values_that_do_not_fit_together_say_what_would(overrides, expected):
    with pytest.raises(RecipeError) as raised:
        load_recipe(overrides=overrides)

    assert raised.value.mistakes == (expected,)


@pytest.mark.parametrize("schedule", TRAINING_SCHEDULES)
def test_stages_of_a_schedule_are_those_that_nxd_pipeline_makes(schedule):
    made = make_schedule(schedule, 2, 4)
    settings = ["parallel.pipeline_parallel_size=2", f"pipeline.schedule={schedule}"]

    load_recipe(overrides=[*settings, f"model.num_hidden_layers={made.num_stages}"])

    with pytest.raises(RecipeError, match=f"need {made.num_stages} layers"):
        load_recipe(overrides=[*settings, f"model.num_hidden_layers={made.num_stages - 1}"])


def test_pipeline_settings_are_without_effect_on_one_stage():
    load_recipe(overrides=["model.num_hidden_layers=1", "pipeline.schedule=zb-v"])


def test_rules_over_a_wrong_value_are_not_reported():
    with pytest.raises(RecipeError) as raised:
        load_recipe(overrides=["model.hidden_size=abc", "model.num_attention_heads=7", "train.steps=-1"])

    assert [mistake.partition("=")[0] for mistake in raised.value.mistakes] == [
        "model.hidden_size",
        "train.steps",
        "model.num_key_value_heads",
    ]


def test_rules_that_only_advise_a_wrong_key_are_reported():
    with pytest.raises(RecipeError) as raised:
        load_recipe(overrides=["optimizer.type=sgd", "optimizer.eps=0.1", "optimizer.config=5"])

    assert [mistake.partition("=")[0] for mistake in raised.value.mistakes] == ["optimizer.config", "optimizer.eps"]


@pytest.mark.parametrize("override", ["moe.z_loss_coef=0.1", "parallel.expert_parallel_size=2"])
def test_experts_of_a_model_that_is_named_wrongly_are_not_refused(override):
    with pytest.raises(RecipeError) as raised:
        recipe_from_dict({"model": {"type": 5}}, overrides=[override])

    assert [mistake.partition("=")[0] for mistake in raised.value.mistakes] == ["model.type"]


@pytest.mark.parametrize(("tp_size", "dp_size", "accumulation"), [(1, 1, 1), (2, 2, 2), (4, 16, 1), (4, 1, 16)])
def test_layout_that_divides_is_accepted(tp_size, dp_size, accumulation):
    recipe = load_recipe(
        overrides=[
            f"parallel.tensor_parallel_size={tp_size}",
            "parallel.sequence_parallel=true",
            f"train.gradient_accumulation_steps={accumulation}",
        ]
    )

    check_layout(recipe, dp_size, vocab_size=320)


@pytest.mark.parametrize(
    ("overrides", "vocab_size", "uneven", "degrees"),
    [
        (["model.num_attention_heads=4"], None, "model.num_attention_heads=4", "1, 2 or 4"),
        (
            ["model.num_attention_heads=4", "model.intermediate_size=684"],
            None,
            "model.num_attention_heads=4 and model.intermediate_size=684",
            "1, 2 or 4",
        ),
        (["model.intermediate_size=684"], None, "model.intermediate_size=684", "1, 2 or 4"),
        ([], 260, "model.vocab_size=260", "1, 2 or 4"),
        (["model.vocab_size=300"], None, "model.vocab_size=300", "1, 2 or 4"),
        (
            ["parallel.sequence_parallel=true", "data.sequence_length=130"],
            320,
            "data.sequence_length=130",
            "1 or 2",
        ),
    ],
)
def test_degree_that_does_not_divide_names_sizes_and_degrees(overrides, vocab_size, uneven, degrees):
    recipe = load_recipe(overrides=["parallel.tensor_parallel_size=8", *overrides])

    with pytest.raises(RecipeError) as raised:
        check_layout(recipe, 1, vocab_size=vocab_size)

    (mistake,) = raised.value.mistakes
    assert mistake.startswith(f"parallel.tensor_parallel_size=8 does not divide {uneven}; use {degrees}, or change")


@pytest.mark.parametrize(("tp_size", "num_key_value_heads"), [(8, 4), (4, 1), (8, 2)])
def test_degree_that_does_not_divide_the_key_value_heads_is_accepted(tp_size, num_key_value_heads):
    recipe = load_recipe(
        overrides=[
            f"parallel.tensor_parallel_size={tp_size}",
            f"model.num_key_value_heads={num_key_value_heads}",
            "model.intermediate_size=704",
        ]
    )

    check_layout(recipe, 1, vocab_size=320)


@pytest.mark.parametrize("model", ["path=folder", "type=qwen3", "factory=a:b"])
def test_degrees_and_sizes_of_other_models_than_our_llama_are_left_to_who_splits_them(model):
    settings = ["parallel.tensor_parallel_size=3", "parallel.pipeline_parallel_size=4", f"model.{model}"]

    check_layout(load_recipe(overrides=settings), 1, vocab_size=257)


def test_hidden_size_that_does_not_divide_is_named():
    recipe = load_recipe(overrides=["parallel.tensor_parallel_size=3", "model.intermediate_size=768"])

    with pytest.raises(RecipeError, match=r"model\.hidden_size=256"):
        check_layout(recipe, 1)


def test_sequence_length_is_free_without_sequence_parallel():
    recipe = load_recipe(overrides=["parallel.tensor_parallel_size=4", "data.sequence_length=130"])

    check_layout(recipe, 1, vocab_size=320)


@pytest.mark.parametrize(
    ("batch", "accumulation", "dp_size", "expected"),
    [
        (10, 3, 2, "a multiple of 6, which is train.gradient_accumulation_steps=3 x data-parallel size 2; use 6 or 12"),
        (2, 1, 4, "a multiple of 4, which is train.gradient_accumulation_steps=1 x data-parallel size 4; use 4"),
    ],
)
def test_batch_that_does_not_divide_names_the_next_that_do(batch, accumulation, dp_size, expected):
    recipe = load_recipe(
        overrides=[f"train.global_batch_size={batch}", f"train.gradient_accumulation_steps={accumulation}"]
    )

    with pytest.raises(RecipeError) as raised:
        check_layout(recipe, dp_size)

    assert raised.value.mistakes == (f"train.global_batch_size={batch} is not {expected}",)


@pytest.mark.parametrize(("tokenizer_size", "expected"), [(257, 320), (320, 320), (321, 384), (1, 64)])
def test_vocab_size_unset_is_rounded_up_to_a_multiple_of_64(tokenizer_size, expected):
    assert padded_vocab_size(load_recipe(), tokenizer_size) == expected


def test_vocab_size_given_is_kept():
    assert padded_vocab_size(load_recipe(overrides=["model.vocab_size=258"]), 257) == 258


def test_vocab_size_below_the_tokenizers_is_refused():
    with pytest.raises(RecipeError, match=r"model\.vocab_size=256 is less than the tokenizer's 257 ids"):
        padded_vocab_size(load_recipe(overrides=["model.vocab_size=256"]), 257)


@pytest.mark.parametrize("needs_the_loss", ["checkpoint.keep_best=1", "train.early_stopping_patience=1"])
def test_evaluation_file_gives_the_held_out_loss_where_nothing_is_held_out(needs_the_loss):
    keys = [needs_the_loss, "data.held_out_fraction=0"]

    with pytest.raises(RecipeError, match=r"data\.held_out_fraction=0 turns off"):
        load_recipe(overrides=keys)
    assert load_recipe(overrides=[*keys, "data.evaluation_path=a.txt"]).data.evaluation_path.name == "a.txt"


def test_steps_of_epochs_are_counted_later():
    decay = ["optimizer.schedule=warmup_stable_decay", "optimizer.num_decay_steps=500"]

    recipe = load_recipe(overrides=["train.epochs=0.5", "train.stop_after=1000", *decay])

    assert (recipe.train.epochs, recipe.train.stop_after) == (0.5, 1000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["data.column=text", "data.path=x"],
            "cannot hold out data.held_out_fraction=0.05; set data.eval",
        ),
        (["data.held_out_fraction=0"], "data.streaming=true reads rows of text; set data.column to the column"),
        (
            ["data.held_out_fraction=0", "data.column=text", "data.path=x", "train.epochs=2"],
            "data.streaming=true reads an endless stream of text, which train.epochs does not support; leave one out",
        ),
    ],
)
def test_recipe_whose_options_need_all_data_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(None, ["data.streaming=true", *settings])


def test_buffer_without_a_stream_is_refused():
    with pytest.raises(ValueError, match=r"data\.shuffle_buffer_size=9 is for data\.streaming=true"):
        load_recipe(None, ["data.shuffle_buffer_size=9"])
