"""From files of text, rows or tokens to batches of token ids: sources, tokenizers, a cache, packing, mixtures, loaders.

Every order depends only on seeds and counts, never on the number of ranks, and nothing here communicates:
ranks get their positions as plain numbers.
"""

from nxd_data.chat import ChatTemplate
from nxd_data.conversations import (
    Conversations,
    build_conversations,
    cut_conversations,
    describe_conversations,
    image_folder,
    open_conversations,
)
from nxd_data.corpus import Corpus, build_corpus, open_corpus
from nxd_data.image_processor import ImageProcessor
from nxd_data.loader import Batch, HeldOutLoader, TrainLoader
from nxd_data.messages import Conversation, read_conversation
from nxd_data.preferences import PairSequences, PreferenceEncoder, cut_preferences
from nxd_data.prefetch import TrainBatches, concatenate, held_out_batches, read_ahead
from nxd_data.sequences import (
    MixedSequences,
    PackedSequences,
    Sequences,
    TokenRows,
    mix,
    pack_corpus,
    read_weights,
)
from nxd_data.sources import files_left_out, find_tables, find_text_files, find_tokens
from nxd_data.streaming import StreamLoader, StreamSource, stream_files, stream_hub
from nxd_data.tables import hub_files
from nxd_data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Tokenizer",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "load_tokenizer",
    "find_text_files",
    "find_tables",
    "find_tokens",
    "hub_files",
    "files_left_out",
    "build_corpus",
    "open_corpus",
    "Corpus",
    "read_conversation",
    "Conversation",
    "ChatTemplate",
    "build_conversations",
    "open_conversations",
    "Conversations",
    "image_folder",
    "ImageProcessor",
    "pack_corpus",
    "PackedSequences",
    "cut_conversations",
    "describe_conversations",
    "PreferenceEncoder",
    "cut_preferences",
    "PairSequences",
    "Sequences",
    "read_weights",
    "mix",
    "MixedSequences",
    "TrainLoader",
    "stream_files",
    "stream_hub",
    "StreamSource",
    "StreamLoader",
    "TokenRows",
    "HeldOutLoader",
    "Batch",
    "TrainBatches",
    "held_out_batches",
    "concatenate",
    "read_ahead",
]
