"""A folder with a little text, and rows of numbered tokens that show where each token of a batch comes from."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from nxd_data import Corpus, PackedSequences, pack_corpus
from nxd_data.corpus import CorpusIndex


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "second.txt").write_text("zwei")
    (folder / "a.txt").write_text("one\r\ntwo\n")
    return folder


@pytest.fixture
def numbered() -> Callable[..., tuple[PackedSequences, PackedSequences]]:
    """`numbered(num_pieces, sequence_length, held_out_fraction)`: token i of the row is i."""

    def pack(
        num_pieces: int, *, sequence_length: int = 4, held_out_fraction: float = 0.0
    ) -> tuple[PackedSequences, PackedSequences]:
        tokens = np.arange(num_pieces * sequence_length + 1, dtype=np.uint32)
        index = CorpusIndex(
            digest="",
            dtype="uint32",
            num_tokens=len(tokens),
            num_documents=1,
            num_bytes=len(tokens),
            vocab_size=len(tokens),
            end_of_document=0,
            skipped={},
        )
        return pack_corpus(Corpus(tokens, index), sequence_length=sequence_length, held_out_fraction=held_out_fraction)

    return pack


MARKED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<end>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture
def make_chat_tokenizer(tmp_path) -> Callable[[str | None], Path]:
    """`make_chat_tokenizer(chat_template)`: the folder of a small tokenizer, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")

    def make(chat_template: str | None) -> Path:
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<end>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(["the cat sat on the mat", "the dog sat on the cat"], trainer)
        folder = tmp_path / "tokenizer"
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
        fast.chat_template = chat_template
        fast.save_pretrained(folder)
        return folder

    return make
