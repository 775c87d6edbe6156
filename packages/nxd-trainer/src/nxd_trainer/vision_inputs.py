"""What a recipe's vision-language model takes besides tokens: its processor, the names of its inputs, and packing."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
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
_TEXT_ALONE = "the model takes text alone; use a vision-language model, or leave the images out"


@dataclass(frozen=True)
class VisionInputs:
    """What a model takes for images."""

    names: Sequence[str] = ()  # its inputs for images, and for types of tokens; empty if it takes none
    processor: ImageProcessor | None = None  # the processor of the images; None if it takes none
    refusal: str = ""  # why it takes none, and what to do


@dataclass(frozen=True)
class RecipeModel(ModelSpec):
    """The model of a recipe.

    Attributes:
        vision: what it takes for images.
    """

    vision: VisionInputs = VisionInputs()


def vision_inputs_of(recipe: Recipe, model: ModelSpec) -> VisionInputs:
    """Load the processor of the images in a recipe's conversations, and find the inputs that its model takes."""
    if recipe.model.use_of_towers == "left_out":
        return VisionInputs(
            refusal="model.towers=left_out builds nothing that reads them; set model.towers to frozen or train, or "
            "leave the images out"
        )
    path = Path(model.description.tokenizer or "")
    folder = path if path.is_dir() else path.parent
    if recipe.model.is_own_llama or not recipe.data.chat or recipe.dpo.beta or not has_processor(folder):
        return VisionInputs(refusal=_TEXT_ALONE)
    try:
        processor = ImageProcessor(folder, DTYPES[recipe.train.dtype])
    except ValueError as error:  # text alone does not need it
        return VisionInputs(refusal=str(error))
    module = model.make()
    taken = inspect.signature(module.forward).parameters
    names = [name for name in processor.input_names if name in taken]
    if not names:
        return VisionInputs(refusal=_TEXT_ALONE)
    if recipe.data.packing:
        processor.rope_index = getattr(getattr(module, "model", None), "get_rope_index", None)
    return VisionInputs(names, processor)


def check_images_are_read(vision: VisionInputs, with_images: Sequence[str]) -> None:
    """Raise ValueError if sources, by name, have images that the model does not take."""
    if vision.processor is None and with_images:
        raise ValueError(f"{with_images[0]} has images, but {vision.refusal}")
