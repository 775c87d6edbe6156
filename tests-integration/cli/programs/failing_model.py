"""A small model for `model.factory`, on one of whose ranks something happens, as the variable FAULT says.

FAULT is FAULT:PLACE:CALL, such as SIGKILL:forward:21: in the 21st call of a decoder layer's forward, or of os.fsync, on
rank 1, the fault happens: "raise" for an exception, "none" for nothing, else the name of a signal that the rank sends
to itself. When, in seconds since 1970, is then in the file `fault_time` of the working directory.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def failing(function: Callable[..., Any], fault: str, fails_in: int) -> Callable[..., Any]:
    calls = 0

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_in:
            Path("fault_time").write_text(str(time.time()))
        if calls == fails_in and fault == "raise":
            raise RuntimeError("made to fail")
        if calls == fails_in:
            os.kill(os.getpid(), getattr(signal, fault))
        return function(*args, **kwargs)

    return call


def make() -> LlamaForCausalLM:
    fault, place, call = os.environ["FAULT"].split(":")
    fails = os.environ.get("RANK") == "1" and fault != "none"
    if fails and place == "forward":
        LlamaDecoderLayer.forward = failing(LlamaDecoderLayer.forward, fault, int(call))
    if fails and place == "fsync":
        os.fsync = failing(os.fsync, fault, int(call))
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
