"""What a recipe's vision-language model takes besides tokens: its processor, the names of its inputs, and packing."""

import inspect
from pathlib import Path

from nxd_data import ImageProcessor
from nxd_data.image_processor import has_processor
from nxd_engine.training_config import ModelSpec

from nxd_trainer.forward import DTYPES
from nxd_trainer.recipe import Recipe

# Types whose rows keep documents with images apart where positions restart; a test compares each. Others do not: the
# images of Gemma 3 attend in both directions whatever the positions are, as the prompts of PaliGemma do; tokens of
# Mllama attend to the images of a row, and the linear attention of Qwen3.5 goes on over the borders.
PACKED_VISION_TYPES = (
    "qwen2_5_vl", "qwen3_vl", "glm4v", "mistral3", "llava_next", "internvl", "idefics3", "aya_vision",
    "cohere2_vision", "granite4_vision",
)  # fmt: skip
# Their language models, if these are of a type of their own; others must be of `PACKED_TYPES`.
PACKED_TEXT_TYPES = ("qwen2_5_vl_text", "qwen3_vl_text", "glm4v_text", "cohere2", "granite4_vision_text")


def image_processor_of(recipe: Recipe, model: ModelSpec) -> ImageProcessor | None:
    """Return the processor of the images in a recipe's conversations; None if the model takes none."""
    processor = _load_processor(recipe, model)
    if processor is None or not _taken_by(processor, model):
        return None
    if recipe.data.packing:
        inner = getattr(model.make(), "model", None)
        processor.rope_index = getattr(inner, "get_rope_index", None)
    return processor


def image_input_names(recipe: Recipe, model: ModelSpec) -> list[str]:
    """Return the names of a model's inputs for images, and for types of tokens; nothing if it takes none."""
    processor = _load_processor(recipe, model)
    return [] if processor is None else _taken_by(processor, model)


def _taken_by(processor: ImageProcessor, model: ModelSpec) -> list[str]:
    taken = inspect.signature(model.make().forward).parameters
    return [name for name in processor.input_names if name in taken]


def _load_processor(recipe: Recipe, model: ModelSpec) -> ImageProcessor | None:
    if recipe.model.is_own_llama or recipe.model.use_of_towers == "left_out":
        return None
    path = Path(model.description.tokenizer or "")
    folder = path if path.is_dir() else path.parent
    if not recipe.data.chat or recipe.dpo.beta or not has_processor(folder):
        return None
    try:
        return ImageProcessor(folder, DTYPES[recipe.train.dtype])
    except ValueError:  # which rows with images raise again; others do not need it
        return None
