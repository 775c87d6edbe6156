"""A model's own image processor: what it makes of an image, and the tokens that it puts in the place of one.

This is the only module that loads processors of transformers. They are taken from the model's folder, without code
from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nxd_data.joined_inputs import find_dims, join

Spans = list[tuple[int, int]]  # starts and ends in a text

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Inputs with a number for each token, by which models tell images from text.
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")

_CROSS_MASK = "cross_attention_mask"
_MOST_BYTES = 1 << 24  # of a chat template
_PROBE_SIZES = ((70, 120, 3), (150, 60, 3))  # height, width and colors


def has_processor(folder: Path) -> bool:
    """Whether a folder has an image processor."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


class ImageProcessor:
    """The processor in a model's folder.

    Args:
        folder: the folder, with a `processor_config.json` or `preprocessor_config.json`.
        dtype: dtype of pixels, that of the model's weights.

    Attributes:
        token: the token that chat templates write for an image.
        feature_token: the token in whose places the model puts the features of an image; often the same.
        rope_index: the model's `get_rope_index`, for packed rows of a model whose positions have several dimensions.

    Raises:
        ValueError: there is no processor, it needs code or a package that is missing, or it has no token for images.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self._folder, self._dtype = folder, dtype
        self.rope_index: Callable[..., Any] | None = None
        if not has_processor(folder):
            raise ValueError(
                f"{folder} has no image processor ({' or '.join(PROCESSOR_FILES)}), so its model takes text alone; use "
                "a vision-language model, or leave images out"
            )
        try:
            transformers = import_module("transformers")
            # With trust_remote_code unset, transformers would ask at the terminal.
            self._processor: Any = transformers.AutoProcessor.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # readers of many formats raise many types
            raise ValueError(
                f"the image processor of {folder} cannot be loaded: {_reason(error)}; images need "
                "pip install 'nxd-data[vision]'"
            ) from error
        self.token: str = getattr(self._processor, "image_token", None) or ""
        if not self.token or not hasattr(self._processor, "get_text_with_replacements"):
            raise ValueError(
                f"the processor of {folder}, {type(self._processor).__name__}, has no token in the place of an image, "
                "which is not supported"
            )
        ids = np.ravel(getattr(self._processor, "image_token_ids", None) or self._processor.image_token_id)
        self.feature_token = str(self._processor.tokenizer.convert_ids_to_tokens(int(ids[0])))
        tokens = {
            self.feature_token: "an image",
            getattr(self._processor, "video_token", None): "a video",
            getattr(self._processor, "audio_token", None): "audio",
        }
        # Tokens that no text may have, with what they stand for.
        self._reserved = {token: kind for token, kind in tokens.items() if token and token != self.token}

    def check_text(self, text: str, num_images: int) -> None:
        """Raise ValueError unless a text has `token` once for each image, and no other token of images or sounds."""
        for token, kind in self._reserved.items():
            if token in text:
                raise ValueError(f"its text spells {token!r}, which stands for {kind}; remove this token")
        found = text.count(self.token)
        if found and not num_images:
            raise ValueError(
                f"its text spells {self.token!r}, which stands for an image, but it has no images; remove this token, "
                "or give images"
            )
        if found != num_images:
            raise ValueError(
                f"its {num_images} images become {found} times {self.token!r} in the text; remove this token from the "
                "texts, or use a chat template that renders images"
            )

    @property
    def input_names(self) -> list[str]:
        """The names of the model's inputs for images, and for types of tokens."""
        of_images = (*self._processor.image_processor.model_input_names, _CROSS_MASK, *TOKEN_TYPES)
        return [name for name in dict.fromkeys(self._processor.model_input_names) if name in of_images]

    def replacement(self, image: Any) -> str:
        """Return the text that stands for an image in the place of `token`.

        Args:
            image: a `PIL.Image`, RGB.

        Raises:
            ValueError: the processor refuses the image.
        """
        processed = self._process([image], return_text_replacement_offsets=True)
        [offsets] = processed.get("text_replacement_offsets") or [[]]
        return str(offsets[0]["replacement"]) if offsets else self.token

    def expand(self, text: str, replacements: Sequence[str]) -> tuple[str, Spans, Spans]:
        """Replace the image tokens of a text in order.

        Returns:
            The text, the spans of the tokens in the given text, and those of what replaced them.
        """
        [expanded], [offsets] = self._processor.get_text_with_replacements([text], list(replacements))
        return expanded, [tuple(it["span"]) for it in offsets], [tuple(it["new_span"]) for it in offsets]

    def prompt(self, text: str, images: Sequence[Any], *, add_special_tokens: bool = False) -> dict[str, Tensor]:
        """Return `input_ids` `[1, tokens]` and the model's other inputs for a prompt.

        Args:
            text: the prompt, with `token` for each image.
            images: its images in order, each a `PIL.Image`, RGB.
            add_special_tokens: whether the tokenizer adds those that texts begin with.

        Raises:
            ValueError: the numbers of tokens and images differ, or the processor refuses an image.
        """
        self.check_text(text, len(images))
        processed = self._process(images, text, return_tensors="pt", add_special_tokens=add_special_tokens)
        names = ["input_ids", *self.input_names]
        return {name: torch.as_tensor(processed[name]) for name in names if name in processed}

    def image_inputs(self, images: Sequence[Sequence[Any]], input_ids: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the model's inputs for the images of a batch; nothing if it has none.

        Args:
            images: `[batch]` the images of each row, in order, each a `PIL.Image`, RGB. They are taken one by one, so
                a sequence that decodes them when they are taken has few in memory, unless the processor needs all.
            input_ids: the batch's ids `[batch, seq]`.

        Returns:
            Tensors by name, as the model's forward takes them. Most models take the images of all rows in order, so
            the first dimension is not the batch's.

        Raises:
            ValueError: the processor refuses an image.
        """
        if not any(images):
            return {}
        if _CROSS_MASK in self._processor.model_input_names:
            return self._rows_with_cross_attention(images, input_ids)
        return self._joined_tensors(images)

    def token_types(self, input_ids: NDArray[np.int64], learned: NDArray[np.bool_]) -> dict[str, Tensor]:
        """Return the types of tokens that the model takes, by name; most models take none.

        Args:
            input_ids: the batch's ids `[batch, seq]`.
            learned: `[batch, seq]`, whether the loss counts the token after each.
        """
        names = [name for name in TOKEN_TYPES if name in self._processor.model_input_names]
        if not names:
            return {}
        if self._processor.return_mm_token_type_ids:
            types = torch.tensor(self._processor.create_mm_token_type_ids(input_ids.tolist()))
        else:  # the answer is of the second type; the rest attends in both directions
            said = np.maximum.accumulate(np.concatenate([np.zeros_like(learned[:, :1]), learned[:, :-1]], axis=1), 1)
            types = torch.tensor(said.astype(np.int64))
        return dict.fromkeys(names, types)

    def positions(
        self,
        input_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        starts: Sequence[Sequence[int]],
        inputs: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return the positions of packed rows whose documents are positioned apart; nothing without `rope_index`.

        Args:
            input_ids: the batch's ids `[batch, seq]`.
            positions: positions of the tokens in their documents `[batch, seq]`.
            starts: `[batch]` the first tokens of each row's images.
            inputs: the inputs of images and types of tokens of the batch.

        Returns:
            `position_ids` `[4, batch, seq]`: the given ones, and the model's own in time, height and width.
        """
        if self.rope_index is None:
            return {}
        found = torch.tensor(positions).expand(4, *positions.shape).clone()
        ids, types, grids = torch.tensor(input_ids), inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
        image = 0
        for row, of_row in enumerate(starts):
            borders = [*np.flatnonzero(positions[row] == 0).tolist(), positions.shape[1]]
            for start, end in pairwise(borders):
                count = sum(start <= first < end for first in of_row)
                if count and grids is not None:
                    own, _ = self.rope_index(
                        ids[row : row + 1, start:end],
                        mm_token_type_ids=types[row : row + 1, start:end],
                        image_grid_thw=grids[image : image + count],
                    )
                    found[1:, row, start:end] = own[:, 0]
                image += count
        return {"position_ids": found}

    def _joined_tensors(self, rows: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        images, count = (image for row in rows for image in row), sum(map(len, rows))
        if count == 1 or self._dims is None:
            return self._tensors(list(images))
        return join([self._tensors([image]) for image in images], self._dims)

    @cached_property
    def _dims(self) -> dict[str, int] | None:
        """The dimensions by which the inputs of images are joined; None if they must be made together."""
        pillow = import_module("PIL.Image")
        random = np.random.default_rng(0)
        probes = [pillow.fromarray(random.integers(0, 256, size, dtype=np.uint8)) for size in _PROBE_SIZES]
        try:
            return find_dims([self._tensors([it]) for it in probes], self._tensors(probes))
        except ValueError:  # which the images themselves may not have
            return None

    def _tensors(self, images: Sequence[Any]) -> dict[str, Tensor]:
        processed = self._process(images, return_tensors="pt")
        names = [name for name in self.input_names if name not in TOKEN_TYPES and name in processed]
        tensors = {name: torch.as_tensor(processed[name]) for name in names}
        return {name: it.to(self._dtype) if it.is_floating_point() else it for name, it in tensors.items()}

    def _process(self, images: Sequence[Any], text: str | None = None, **options: Any) -> Mapping[str, Any]:
        """Process images as those of one text, by default of their tokens alone."""
        try:
            processed: Mapping[str, Any] = self._processor(
                text=[self.token * len(images) if text is None else text], images=[list(images)], **options
            )
        except Exception as error:  # processors raise many types for sizes that they do not take
            sizes = ", ".join(f"{image.width}x{image.height}" for image in images[:3])
            raise ValueError(
                f"the image processor of {self._folder} refuses an image of {sizes} pixels: {_reason(error)}"
            ) from error
        return processed

    def _rows_with_cross_attention(
        self, images: Sequence[Sequence[Any]], input_ids: NDArray[np.int64]
    ) -> dict[str, Tensor]:
        """Return inputs whose rows are those of the batch, with the tiles that each token attends to (Mllama)."""
        most = max(map(len, images))
        batch: dict[str, Tensor] = {}
        tiles = np.zeros((len(images), most), dtype=np.int64)  # of each image
        for number, row in enumerate(images):
            for name, value in (self._tensors(row) if row else {}).items():
                if name == _CROSS_MASK:  # of a text of image tokens alone
                    tiles[number, : len(row)] = value[0].amax(0).sum(1).numpy()
                    continue
                whole = batch.setdefault(name, torch.zeros(len(images), most, *value.shape[2:], dtype=value.dtype))
                whole[number, : len(row)] = value[0]
        batch["aspect_ratio_mask"][..., 0] = 1  # as in transformers: one tile of an absent image attends to itself
        helpers = import_module("transformers.models.mllama.processing_mllama")
        token = self._processor.image_token_id
        dense = helpers.convert_sparse_cross_attention_mask_to_dense(
            [helpers.get_cross_attention_token_mask(row.tolist(), token) for row in input_ids],
            num_tiles=[row[row > 0].tolist() for row in tiles],
            max_num_tiles=self._processor.image_processor.max_image_tiles,
            length=input_ids.shape[1],
        )
        return batch | {_CROSS_MASK: torch.tensor(dense)}


def _reason(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


def template_of_processor(folder: Path) -> str | None:
    """Return the chat template that older checkpoints keep with the processor alone; None if there is none."""
    if (folder / "chat_template.jinja").is_file():  # the tokenizer has it, too
        return None
    for name in ("chat_template.json", "processor_config.json"):
        file = folder / name
        if file.is_file() and file.stat().st_size < _MOST_BYTES:
            try:
                found = json.loads(file.read_bytes()).get("chat_template")
            except (ValueError, RecursionError, AttributeError):
                continue  # transformers reports it
            if isinstance(found, str):
                return found
    return None
