"""Text generation with traced language models: a sharded cache, prefill and decode programs, sampling, and batching."""

from nxd_trace.generation.cache import CacheLayer, CacheView, KeyValueCache
from nxd_trace.generation.decoder import Decoder, HuggingFaceDecoder
from nxd_trace.generation.engine import GenerationEngine
from nxd_trace.generation.generator import Completion, Generator, compile_generator
from nxd_trace.generation.prompt_inputs import PromptInputs, PromptInputShapes
from nxd_trace.generation.sampling import (
    SamplingSettings,
    TokenLogprobs,
    choose_token,
    next_token_probabilities,
    penalized_logits,
)
from nxd_trace.generation.sequence import RunningSequence, unpad_prompts

__all__ = [
    "compile_generator",
    "Generator",
    "Completion",
    "SamplingSettings",
    "TokenLogprobs",
    "unpad_prompts",
    "PromptInputs",
    "PromptInputShapes",
    # for a model of your own
    "Decoder",
    "HuggingFaceDecoder",
    "KeyValueCache",
    "CacheLayer",
    "CacheView",
    # for a loop of your own
    "GenerationEngine",
    "RunningSequence",
    "choose_token",
    "next_token_probabilities",
    "penalized_logits",
]
