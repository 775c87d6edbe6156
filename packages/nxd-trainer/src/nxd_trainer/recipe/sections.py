# ruff: noqa: RUF009  (`option` makes a dataclass field, as `dataclasses.field` does)
"""Every key of a recipe, with its default and meaning. Nothing here reads files or checks values.

The defaults train a small Llama on the running Python's standard library within minutes on a laptop.
Numbers that switch something off are 0; a key that may be left unset is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from nxd_engine.options import option
from nxd_pipeline import TrainingSchedule
from nxd_state.degrees import SIZES, ParallelDegrees

from nxd_trainer.lr_schedule import DecayType, LrScheduleName

DpoLossName = Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down"]
DtypeName = Literal["float32", "bfloat16", "float16", "float64"]
DTYPE_NAMES: tuple[DtypeName, ...] = get_args(DtypeName)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model to train: our Llama with these sizes, or the model that path, type or factory names."""

    path: Path | None = option(None, "folder of a Hugging Face model whose weights a new run starts from")
    type: str | None = option(None, "transformers architecture, such as qwen3, with these sizes and random weights")
    factory: str | None = option(
        None, "MODULE:FUNCTION that returns the model, which takes input_ids and labels and returns the loss"
    )
    config: Mapping[str, Any] | None = option(
        None, "additional config keys of model.type or model.path, or the arguments of model.factory"
    )
    towers: Literal["frozen", "train", "left_out"] | None = option(
        None,
        "what reads images or sounds in model.path, with its projectors: frozen (unset), train, or left_out (not in "
        "memory; exported folders take it from model.path)",
    )
    hidden_size: int = option(256, "width of the residual stream", at_least=1)
    intermediate_size: int = option(768, "width inside the MLP", at_least=1)
    num_hidden_layers: int = option(4, "decoder layers", at_least=1)
    num_attention_heads: int = option(8, "query heads", at_least=1)
    num_key_value_heads: int = option(4, "key/value heads, each shared by a group of query heads", at_least=1)
    max_position_embeddings: int = option(2048, "longest sequence that the model supports", at_least=1)
    rope_theta: float | None = option(
        None, "base of the rotary frequencies; unset: 10000, or the default of model.type", above=0
    )
    rope_scaling: Mapping[str, Any] | None = option(
        None,
        "rotary frequencies of another rope_type, as in a config.json; unset: plain, or the default of model.type",
    )
    rms_norm_eps: float | None = option(
        None, "added to the mean square in RMSNorm; unset: 1e-5, or the default of model.type", above=0
    )
    tie_word_embeddings: bool | None = option(
        None, "also use the token embedding as the output head; unset: false, or the default of model.type"
    )
    vocab_size: int | None = option(
        None, "rows of the embedding; unset: the tokenizer's, rounded up to a multiple of 64", at_least=1
    )
    initializer_range: float | None = option(
        None, "standard deviation of the initial weights; unset: 0.02, or the default of model.type", above=0
    )

    @property
    def is_own_llama(self) -> bool:
        """Whether the model is this package's Llama."""
        return self.path is None and self.type is None and self.factory is None

    @property
    def use_of_towers(self) -> Literal["frozen", "train", "left_out"]:
        """What happens to the towers."""
        return self.towers or "frozen"

    @property
    def has_these_sizes(self) -> bool:
        """Whether the sizes here are the model's: models from a folder or a factory have their own."""
        return self.path is None and self.factory is None


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """How one model is split over ranks; the remaining factor is data parallel."""

    tensor_parallel_size: int = option(1, "ranks that each layer is sharded over", at_least=1)
    sequence_parallel: bool = option(False, "also shard the sequence between the layers' matrix products")
    pipeline_parallel_size: int = option(1, "ranks that the layers are distributed over", at_least=1)
    context_parallel_size: int = option(1, "ranks that each sequence is split over", at_least=1)
    expert_parallel_size: int = option(1, "ranks that the experts of a layer are distributed over", at_least=1)
    expert_tensor_parallel_size: int | None = option(
        None, "ranks that each expert is sharded over: 1 or tensor_parallel_size (the default)", at_least=1
    )
    zero_stage: int = option(
        0, "sharded over the replicas: 1 optimizer states, 2 also gradients, 3 also parameters", at_least=0, at_most=3
    )
    shard_group_size: int | None = option(
        None,
        "neighboring replicas that zero_stage shards over, mirrored by others (hybrid); unset: all",
        at_least=1,
    )
    reshard_after_forward: bool | int | None = option(
        None,
        "zero_stage=3: give parameters up after each forward (true, the default), keep them until the step (false: "
        "fewer messages with several microbatches), or share them among N neighbors meanwhile",
    )
    zero_offload: Literal["none", "optimizer", "parameters"] = option(
        "none",
        "what zero_stage keeps in host memory: none, optimizer (states, updated there), or with 3 also parameters",
    )
    activation_checkpointing: str = option(
        "none",
        "recomputed in backward: none, full (decoder layers), selective (all but matrix products), or class names",
    )
    activation_offload: bool = option(
        False, "offload the tensors that activation_checkpointing keeps to host memory until backward"
    )
    timeout: float | None = option(
        None, "seconds that ranks wait for one another; unset: NXD_TIMEOUT, or 1800 (600 with NCCL)", above=0
    )
    pad_heads: bool = option(
        False, "pad the heads of model.factory to fit tensor_parallel_size; transformers models are always padded"
    )

    @property
    def degrees(self) -> ParallelDegrees:
        """The parallel degrees of these sizes; the launch decides the number of replicas.

        Raises:
            ValueError: the experts cannot be split this way.
        """
        return ParallelDegrees(
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.context_parallel_size,
            self.expert_parallel_size,
            self.expert_tensor_parallel_size or self.tensor_parallel_size,
            sequence_parallel=self.sequence_parallel,
            zero_stage=self.zero_stage,
            shard_group_size=self.shard_group_size or 0,
        )

    def at(self, degrees: ParallelDegrees) -> Self:
        """Return a copy with the sizes of other degrees; whole experts stay whole."""
        whole_experts = self.expert_tensor_parallel_size == 1
        sizes = {name: getattr(degrees, axis) for axis, name in SIZES.items()}
        return replace(self, **sizes, expert_tensor_parallel_size=1 if whole_experts else None)


@dataclass(frozen=True, kw_only=True)
class MoeSection:
    """Load balancing of the experts, for transformers models that have them."""

    aux_loss_coef: float | None = option(
        None,
        "weight of the load-balancing loss; unset: the model's router_aux_loss_coef with output_router_logits=true, "
        "or 0",
        at_least=0,
    )
    aux_loss_scope: Literal["global", "sequence"] = option(
        "global", "scope to balance over: all layers and tokens of the global batch, or each sequence in each layer"
    )
    z_loss_coef: float = option(0.0, "weight of the router z-loss, which keeps logits small", at_least=0)
    bias_update_rate: float = option(
        0.0, "step size of e_score_correction_bias, which balances loads without a loss; 0: off", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class PipelineSection:
    """How pipeline-parallel ranks work together; no effect with pipeline_parallel_size=1."""

    schedule: TrainingSchedule = option("1f1b", "pipeline schedule, by its name in nxd-pipeline")
    virtual_pipeline_size: int | None = option(
        None, "stages on each rank; unset: 2 for interleaved, zb-v and dualpipe-v, else 1", at_least=1
    )
    trace_file: Path | None = option(
        None, "file for a Perfetto timeline of one step on all ranks, with a picture beside it; unset: none"
    )
    layer_class: str | None = option(
        None, "MODULE:CLASS of the layers of model.factory, which stages are cut between; other models declare theirs"
    )


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The data to train on and how they are split into sequences."""

    path: Path | None = option(None, "file or folder; unset: the sources of the running Python's standard library")
    sources: Mapping[str, Any] | None = option(
        None, "several files or folders with weights, instead of path: { books = 0.7, code = 0.3 }"
    )
    dataset: str | None = option(None, "dataset of the Hugging Face hub, instead of path, such as openai/gsm8k")
    dataset_config: str | None = option(None, "config of the dataset, if it has several")
    dataset_split: str = option("train", "split of the dataset")
    evaluation_path: Path | None = option(
        None, "file or folder to evaluate on, read like path; unset: held_out_fraction of the training data"
    )
    column: str | None = option(
        None, "text column of files with rows (.jsonl, .json, .csv, .parquet, .arrow); unset: files are plain text"
    )
    chat: bool = option(False, "rows are conversations; the loss counts the assistant's tokens only")
    packing: bool = option(False, "pack several conversations into a sequence, without attention between them")
    suffixes: tuple[str, ...] | None = option(
        None, "files to read in a folder; unset: .py,.txt,.md,.rst, or the row formats with data.column or data.chat"
    )
    token_dtype: Literal["uint16", "uint32", "int32", "int64"] | None = option(
        None, "dtype of the tokens in flat .bin files; .npy files and .bin files with .idx declare theirs"
    )
    include_tests: bool = option(False, "with path unset: also read the standard library's tests")
    tokenizer: Path | None = option(
        None, "Hugging Face tokenizer.json, or a folder with one; unset: that of model.path, or one token per byte"
    )
    sequence_length: int = option(256, "tokens in a training sequence", at_least=1)
    held_out_fraction: float = option(
        0.05, "fraction of sequences held out for evaluation; 0: none", at_least=0, below=1
    )
    streaming: bool = option(False, "tokenize data.column during training and cache no tokens, for very large data")
    shuffle_buffer_size: int = option(1024, "with streaming: sequences in the shuffle buffer", at_least=1)
    cache_folder: Path | None = option(None, "folder for tokenized text; unset: tokens/ in the output folder")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """Length, batch size, precision and intervals of the training loop."""

    steps: int = option(300, "optimizer steps of the whole run, unless epochs is given", at_least=1)
    epochs: float | None = option(
        None,
        "length in passes over the training data, instead of steps; one on the command line replaces the file's length",
        above=0,
    )
    stop_after: int | None = option(
        None, "stop this invocation after this step, to be resumed later; unset: run to the end", at_least=1
    )
    global_batch_size: int = option(16, "sequences in one optimizer step, over all ranks", at_least=1)
    gradient_accumulation_steps: int = option(
        1, "microbatches that each rank splits its batch into, also with a pipeline", at_least=1
    )
    seed: int = option(0, "seed of the initial weights, dropout and data order", at_least=0)
    dtype: DtypeName = option("float32", "dtype of the weights; float16 needs parallel.zero_stage and scales the loss")
    autocast: Literal["none", "bfloat16", "float16"] = option(
        "none", "dtype of matrix products with float32 weights; float16 scales the loss"
    )
    compile: bool = option(False, "compile the model's layers with torch.compile and static shapes")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; 0: no clipping", at_least=0)
    ema_decay: float = option(
        0.0,
        "decay of an exponential moving average of the weights, such as 0.999, which evaluations use; 0: no average",
        at_least=0,
        below=1,
    )
    log_every: int = option(10, "steps between log lines", at_least=1)
    eval_every: int = option(50, "steps between evaluations on held-out text; 0: none", at_least=0)
    eval_batches: int = option(4, "global batches in an evaluation", at_least=1)
    gradient_histograms_every: int = option(
        0, "steps between histograms of the gradients in TensorBoard; 0: none", at_least=0
    )
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = option(
        ("tensorboard",), "trackers that get the metrics besides metrics.jsonl; empty: none"
    )
    early_stopping_patience: int = option(
        0, "end the run after this many evaluations in a row without a lower held-out loss; 0: never", at_least=0
    )
    early_stopping_threshold: float = option(0.0, "smallest decrease of the held-out loss that counts", at_least=0)


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """The optimizer and its learning-rate schedule."""

    type: Literal["adamw", "muon", "sgd", "adafactor"] = option(
        "adamw", "optimizer; muon updates the matrices of hidden layers, and adamw the rest"
    )
    factory: str | None = option(
        None, "MODULE:CLASS of another torch optimizer, such as transformers:Adafactor, instead of type"
    )
    config: Mapping[str, Any] | None = option(
        None, "additional arguments of the optimizer, by its own names, such as momentum for sgd"
    )
    lr: float = option(1e-3, "learning rate after the warm-up", above=0)
    betas: tuple[float, float] = option((0.9, 0.95), "adamw, muon: decay rates of the two moments", at_least=0, below=1)
    eps: float = option(1e-8, "adamw, muon: added to the root of the second moment", above=0)
    weight_decay: float = option(0.1, "weight decay of matrices; decoupled in adamw, muon and adafactor", at_least=0)
    stochastic_rounding: bool = option(
        False, "round bfloat16 weights up or down at random after each update, instead of float32 master weights"
    )
    warmup_steps: int = option(20, "steps of linear warm-up", at_least=0)
    min_lr_ratio: float = option(0.1, "minimum learning rate, as a fraction of lr", at_least=0, at_most=1)
    schedule: LrScheduleName = option("cosine", "learning-rate schedule after the warm-up, by its name in transformers")
    num_decay_steps: int | None = option(
        None, "warmup_stable_decay: steps of the decay at the end of the run; unset: a tenth of the run", at_least=1
    )
    decay_type: DecayType = option("linear", "warmup_stable_decay: shape of the decay")
    num_cycles: int = option(1, "cosine_with_restarts: number of cycles", at_least=1)
    power: float = option(1.0, "polynomial: the exponent", above=0)


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Low-rank adapters, trained instead of the model."""

    rank: int = option(0, "rank of the adapters; 0: no adapters", at_least=0)
    alpha: float = option(8.0, "adapter outputs are multiplied by alpha / rank", above=0)
    dropout: float = option(0.0, "fraction of the adapters' inputs that is dropped", at_least=0, below=1)
    target_modules: tuple[str, ...] = option(
        (), "layers that get adapters, by name suffix: q_proj,v_proj; empty: all linear layers but the head"
    )
    target_parameters: tuple[str, ...] = option(
        (), "fused expert weights that get adapters, by name suffix; then no other layers by default"
    )
    modules_to_save: tuple[str, ...] = option((), "modules that are trained in full, beside the adapters: lm_head")
    bias: Literal["none", "all", "lora_only"] = option(
        "none", "biases that are also trained: none, all, or those of adapted layers"
    )
    use_rslora: bool = option(False, "multiply by alpha / sqrt(rank) instead")
    use_dora: bool = option(False, "also train a magnitude for each row of the adapted weights (DoRA)")
    save: Literal["adapter", "both", "merged"] = option(
        "adapter", "contents of checkpoints: the adapter, model and adapter, or the model with the adapter merged"
    )


@dataclass(frozen=True, kw_only=True)
class DpoSection:
    """Direct preference optimization (DPO): learn to prefer chosen answers to rejected ones."""

    beta: float = option(0.0, "penalty for deviating from the reference model; 0: no DPO", at_least=0)
    loss: DpoLossName = option("sigmoid", "loss to minimize, by its name in TRL")
    label_smoothing: float = option(
        0.0, "sigmoid and robust: fraction of pairs whose preference is assumed to be flipped", at_least=0, below=0.5
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When checkpoints are written, how many are kept, and whether a run resumes from one."""

    folder: Path | None = option(None, "folder of the checkpoints; unset: checkpoints/ in the output folder")
    save_every: int = option(100, "steps between checkpoints; 0: only at the end", at_least=0)
    background: bool = option(False, "write checkpoints while training continues, from a copy in memory")
    incremental: bool = option(
        False, "reference data that the previous checkpoint holds, such as frozen weights, instead of rewriting it"
    )
    keep: int = option(3, "newest checkpoints kept; 0: all", at_least=0)
    keep_every: int = option(0, "also keep checkpoints at multiples of this step; 0: none", at_least=0)
    keep_best: int = option(0, "also keep this many checkpoints with the lowest held-out loss; 0: none", at_least=0)
    check_replicas_every: int = option(
        10, "ranks compare their copies of the weights before every Nth checkpoint; 0: never", at_least=0
    )
    memory_every: int = option(0, "steps between checkpoints in host memory, for --elastic; 0: none", at_least=0)
    memory_copies: int = option(1, "copies of these files on other hosts; this many hosts may be lost", at_least=0)
    resume: Literal["latest", "never", "required"] = option(
        "latest", "resume from the newest checkpoint if there is one, never resume, or fail if there is none"
    )
    initial_weights: Path | None = option(
        None, "checkpoints of any kind, or a Hugging Face folder, whose weights a new run starts from"
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run."""

    model: ModelSection = field(default_factory=ModelSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    moe: MoeSection = field(default_factory=MoeSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lora: LoraSection = field(default_factory=LoraSection)
    dpo: DpoSection = field(default_factory=DpoSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    output: Path = option(Path("runs/nxd"), "folder of the run: recipe, metrics, report")

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, so that small gradients do not vanish in float16."""
        return "float16" in (self.train.dtype, self.train.autocast)

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.checkpoint.folder or self.output / "checkpoints"

    @property
    def token_cache_folder(self) -> Path:
        """The folder of this run's tokenized text."""
        return self.data.cache_folder or self.output / "tokens"

    @property
    def last_step(self) -> int:
        """The step at which this invocation ends: `train.stop_after` if set, otherwise `train.steps`."""
        return self.train.steps if self.train.stop_after is None else self.train.stop_after

    @property
    def last_step_key(self) -> str:
        """The key that `last_step` is from."""
        return "train.steps" if self.train.stop_after is None else "train.stop_after"
