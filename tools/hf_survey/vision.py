"""Small models of text and images: folders with config, random weights, tokenizer, processor and chat template.

Each family is what its checkpoints have: its own classes of transformers, its own processor, and its own tokens
around an image. Sizes are tiny, but every kind of layer is there, twice. Llama 4 is missing: its forward raises in
transformers 5.24 (`MoeCausalLMOutputWithPast` has no `image_outputs`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 320  # entries that are bytes and pieces of words; the special tokens come after them
LENGTH = 512  # positions

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QFORMER = {"hidden_size": 64, "intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 1}
_QFORMER |= {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "cross_attention_frequency": 1}
_QFORMER |= {"max_position_embeddings": 64, "use_qformer_text_input": False}
_COHERE2 = {"model_type": "cohere2", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SQUARE = {"height": 32, "width": 32}
_SIGLIP = {"size": _SQUARE}
_QWEN_IMAGES = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
}
_RATIOS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]  # of up to four tiles
_GRID = [[32, 64], [64, 32], [64, 64]]


@dataclass(frozen=True)
class _Family:
    """How one family differs from the others; configs and arguments are those of its classes in transformers."""

    name: str  # of its classes: `Gemma3` for `Gemma3ForConditionalGeneration`
    text: Mapping[str, Any] = field(default_factory=dict)
    tower: Mapping[str, Any] = field(default_factory=lambda: _TOWER)
    config: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)  # special tokens, by their name in the tokenizer
    more_tokens: tuple[str, ...] = ()  # special tokens without a name
    ids: Mapping[str, str] = field(default_factory=dict)  # keys of the config that are ids of these special tokens
    placeholder: str = "<image>"  # what the chat template writes for an image
    images: Callable[[], Any] = lambda: None  # makes its image processor
    processor: str = ""  # its class, if that has another name
    processing: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the processor
    added_tokens: int = 0  # tokens that its processor adds to the tokenizer
    videos: str = ""  # class of its video processor, if the processor needs one


def _qwen(name: str, text: Mapping[str, Any], tower: Mapping[str, Any], *, processor: str = "") -> _Family:
    return _Family(
        name,
        text={"rope_parameters": _MROPE, **text},
        tower={**_QWEN_TOWER, **tower},
        more_tokens=("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        ids={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        images=lambda: transformers.Qwen2VLImageProcessor(**_QWEN_IMAGES),
        processor=processor,
        videos="Qwen3VLVideoProcessor" if "3" in name else "Qwen2VLVideoProcessor",
    )


def _llava_images() -> Any:
    return transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 32}, crop_size=_SQUARE, image_grid_pinpoints=_GRID
    )


_FAMILIES: dict[str, _Family] = {
    "gemma3": _Family(
        "Gemma3",
        text={"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        config={"mm_tokens_per_image": 4},
        tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        ids={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        placeholder="<start_of_image>",
        images=lambda: transformers.Gemma3ImageProcessor(**_SIGLIP),
        processing={"image_seq_length": 4},
    ),
    "qwen2_5_vl": _qwen("Qwen2_5_VL", {}, {"window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen3_vl": _qwen("Qwen3VL", {}, {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}),
    "qwen3_5": _qwen(
        "Qwen3_5",
        {**_LINEAR_ATTENTION, "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16}
        | {"rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
        {"deepstack_visual_indexes": [], "num_position_embeddings": 64},
        processor="Qwen3VL",
    ),
    "mllama": _Family(
        "Mllama",
        text={"cross_attention_layers": [1, 3], "intermediate_size": 48},
        tower={"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_global_layers": 1}
        | {"attention_heads": 2, "image_size": 32, "patch_size": 8, "vision_output_dim": 48, "max_num_tiles": 4}
        | {
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        more_tokens=("<|image|>", "<|python_tag|>"),
        ids={"image_token_index": "<|image|>"},
        placeholder="<|image|>",
        images=lambda: transformers.MllamaImageProcessor(size=_SQUARE, max_image_tiles=4),
    ),
    "mistral3": _Family(
        "Mistral3",
        text={"model_type": "mistral", "sliding_window": None},
        tower={**_TOWER, "model_type": "pixtral", "head_dim": 12},
        config={"spatial_merge_size": 2, "vision_feature_layer": -1},
        more_tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        ids={"image_token_index": "[IMG]"},
        placeholder="[IMG]",
        images=lambda: transformers.PixtralImageProcessor(size={"longest_edge": 48}, patch_size=16),
        processor="Pixtral",
        processing={"patch_size": 8, "spatial_merge_size": 2},
    ),
    "llava_next": _Family(
        "LlavaNext",
        text={"model_type": "llama"},
        tower={**_TOWER, "model_type": "clip_vision_model", "projection_dim": 24},
        config={"image_grid_pinpoints": _GRID, "image_seq_length": 16},
        more_tokens=("<image>",),
        ids={"image_token_index": "<image>"},
        images=_llava_images,
        processing={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "internvl": _Family(
        "InternVL",
        text={"model_type": "qwen2"},
        tower={**_TOWER, "image_size": [32, 32], "patch_size": [8, 8]},
        config={"image_seq_length": 4, "downsample_ratio": 0.5, "tie_word_embeddings": False},
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        ids={"image_token_id": "<IMG_CONTEXT>"},
        placeholder="<IMG_CONTEXT>",
        images=lambda: transformers.GotOcr2ImageProcessor(
            size=_SQUARE, crop_to_patches=True, min_patches=1, max_patches=2
        ),
        processing={"image_seq_length": 4},
        videos="InternVLVideoProcessor",
    ),
    "idefics3": _Family(
        "Idefics3",
        text={"model_type": "llama"},
        config={"scale_factor": 2},
        more_tokens=(
            *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
            *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
        ),
        ids={"image_token_id": "<image>"},
        images=lambda: transformers.Idefics3ImageProcessor(
            size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
        ),
        processing={"image_seq_len": 4},
    ),
    "paligemma": _Family(
        "PaliGemma",
        text={"model_type": "gemma"},
        tower={**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32},
        config={"projection_dim": 32, "hidden_size": 32},
        more_tokens=("<image>",),
        ids={"image_token_index": "<image>"},
        images=lambda: transformers.SiglipImageProcessor(size=_SQUARE, image_seq_length=16),
        added_tokens=1024 + 128,  # of places and of segments
    ),
    "glm4v": _Family(
        "Glm4v",
        text={"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        tower={**_QWEN_TOWER, "image_size": 32, "intermediate_size": 48},
        more_tokens=(
            *("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
            *("<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
        ),
        ids={
            "image_token_id": "<|image|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_token_id": "<|video|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
        placeholder="<|begin_of_image|><|image|><|end_of_image|>",
        images=lambda: transformers.Glm4vImageProcessor(**_QWEN_IMAGES),
        videos="Glm4vVideoProcessor",
    ),
    "aya_vision": _Family(
        "AyaVision",
        text={
            "model_type": "cohere2",
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        tower={**_TOWER, "model_type": "siglip_vision_model"},
        config={"downsample_factor": 2, "alignment_intermediate_size": 32},
        more_tokens=(
            *("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"),
            *("TILE", "TILE_GLOBAL"),
        ),
        ids={"image_token_index": "<|IMG_PATCH|>"},
        images=lambda: transformers.GotOcr2ImageProcessor(
            size=_SQUARE, crop_to_patches=True, min_patches=1, max_patches=2
        ),
        processing={"patch_size": 8, "img_size": 32, "downsample_factor": 2},
    ),
    "cohere2_vision": _Family(
        "Cohere2Vision",
        text={
            "model_type": "cohere2",
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        tower={**_TOWER, "model_type": "siglip_vision_model"},
        config={"downsample_factor": 2, "alignment_intermediate_size": 32},
        tokens={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        ids={"image_token_id": "<|IMG_PATCH|>"},
        placeholder="<|IMG_PATCH|>",
        images=lambda: transformers.Cohere2VisionImageProcessor(
            size=_SQUARE, patch_size=2, min_patches=1, max_patches=2
        ),
    ),
    "granite4_vision": _Family(
        "Granite4Vision",
        tower={**_TOWER, "model_type": "siglip_vision_model", "hidden_size": 64},  # 64 per head of its Q-Former
        config={
            "image_grid_pinpoints": _GRID,
            "image_seq_length": 4,
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[0, 1], [1, 2]],
            "spatial_target_layers": [0, 1, 2, 3],
            "vision_feature_select_strategy": "full",
            "projector_dropout": 0.0,
            "qformer_config": _QFORMER,
        },
        more_tokens=("<image>",),
        ids={"image_token_index": "<image>"},
        images=_llava_images,
        processing={"patch_size": 8, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"},
    ),
}

VISION_FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
"""The families, by the `model_type` of their configs."""

_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'PLACEHOLDER' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '</s>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def vision_config(family: str, **text: Any) -> Any:
    """Return the config of a family's small model; `text` are further keys of its text model."""
    about, tokenizer = _FAMILIES[family], _tokenizer(family)
    vocabulary = -(-(len(tokenizer) + about.added_tokens) // 64) * 64
    of_text = {**_TEXT, "vocab_size": vocabulary, **about.text, **text}
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in about.ids.items()}
    further = {"vocab_size": vocabulary} if family == "paligemma" else {}
    config = CONFIG_MAPPING[family](
        text_config=of_text, vision_config=dict(about.tower), **about.config, **ids, **further
    )
    config.architectures = [f"{about.name}ForConditionalGeneration"]
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part._experts_implementation = "eager"  # the other ones have no float64
        for name in list(vars(part)):
            if "dropout" in name and isinstance(getattr(part, name), float):
                setattr(part, name, 0.0)
    return config


def vision_model(family: str, *, dtype: torch.dtype = torch.float64, **text: Any) -> Any:
    """Return a family's small model with random weights, the same ones each time, in training mode."""
    config = vision_config(family, **text)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        model = getattr(transformers, config.architectures[0])(config)
        with torch.no_grad():  # what starts at zero or one would hide errors
            for name, parameter in model.named_parameters():
                if parameter.dim() < 2 or not parameter.any() or "gate" in name.rpartition(".")[2]:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    finally:
        torch.set_rng_state(state)
    return model.to(dtype).train()


def vision_processor(family: str) -> Any:
    """Return a family's processor, with its tokenizer and chat template."""
    about = _FAMILIES[family]
    parts = {"image_processor": about.images(), "tokenizer": _tokenizer(family)}
    if about.videos:
        parts["video_processor"] = getattr(transformers, about.videos)()
    name = f"{about.processor or about.name}Processor"
    template = _TEMPLATE.replace("PLACEHOLDER", about.placeholder)
    return getattr(transformers, name)(**parts, **about.processing, chat_template=template)


def write_vision_folder(family: str, folder: str | Path, *, dtype: torch.dtype = torch.float32, **text: Any) -> None:
    """Write a whole folder of a family: config, weights, tokenizer, processor and chat template.

    Args:
        family: one of `VISION_FAMILIES`.
        folder: the folder; created if missing.
        dtype: dtype of the weights.
        **text: further keys of the text model's config.
    """
    vision_model(family, dtype=dtype, **text).save_pretrained(folder)
    vision_processor(family).save_pretrained(folder)


@cache
def _pieces() -> str:
    """Return a small byte-level tokenizer as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "What is in the image? The picture shows a red square and two blue circles on a white wall.\n\n"
    tokenizer.train_from_iterator([text] * 8, trainer)
    made: str = tokenizer.to_str()
    return made


def _tokenizer(family: str) -> Any:
    about = _FAMILIES[family]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_pieces()),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=dict(about.tokens),
        model_max_length=LENGTH,
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(about.more_tokens)}, replace_extra_special_tokens=False
    )
    return tokenizer
