"""Names of NeuronX Distributed whose work is done elsewhere, or nowhere: importing them works, calling them explains.

Scripts import many names and call few of them. So a name that only makes sense inside the old runtime is here an
object that can be imported and passed on, and that says at the call what it was and what to use.
"""

from typing import Any, NoReturn

_AREAS = {
    "hlo": (
        "works on HLO programs of the old XLA runtime, which are not made here",
        "neuronx_distributed.trace.parallel_model_trace or ModelBuilder, which compile, save and load models",
    ),
    "nki": (
        "launches an NKI kernel, which only the Neuron compiler can build",
        "the torch functions of neuronx_distributed.kernels and nxd_layers, which a compiler fuses",
    ),
    "validation": (
        "compares logits by the tolerances of the old runtime",
        "torch.testing.assert_close, or nxd parity --hf for a model of transformers",
    ),
    "mx": (
        "lays weights out in the microscaling formats as only NKI kernels read them",
        "quantization.convert with int8 or fp8 weights",
    ),
    "dcp": (
        "handles ZeRO-1 states in a folder of their own, apart from the model",
        "save_checkpoint and load_checkpoint with optimizer=, which work at any layout, or nxd ckpt convert",
    ),
    "s3": (
        "paced the retries of the old S3 uploader",
        "s3fs, through save_checkpoint to an s3:// URL, which retries by itself",
    ),
    "experts": (
        "feeds the kernels of mixtures of experts, or checks what these can take",
        "nxd_layers.experts, or MoE and ExpertMLPs of neuronx_distributed.modules.moe, which need no such choice",
    ),
    "experts of a rank": (
        "lays experts out in another way for prompts than for single tokens",
        "expert_model_parallel_size= of initialize_model_parallel, which is one layout for both",
    ),
    "quantized experts": (
        "holds the experts of a layer in int8 or fp8, which is not done here",
        "quantization.convert, which quantizes linear layers, and leaves experts as they are",
    ),
    "kernel of a sequence": (
        "is the autograd function of the kernel",
        "nki_ring_attn_func, which calls nxd_layers.context.context_parallel_attention",
    ),
    "fx": (
        "is a step of the old pipeline's partitioning, which is one call here",
        "NxDPPModel, or nxd_pipeline.manual_partition",
    ),
}


class NotHere:
    """Stands for a name that is not implemented here.

    Attributes:
        name: with its module.
        area: why, a key of the areas of this file.
        reason: the same in words.
        instead: what to use.
    """

    def __init__(self, name: str, area: str) -> None:
        self.name = name
        self.area = area
        self.reason, self.instead = _AREAS[area]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Explain.

        Raises:
            NotImplementedError: always, in one line: what the name was, why it is not here, what to use.
        """
        raise NotImplementedError(f"{self.name} {self.reason}; use {self.instead}")

    def __getattr__(self, name: str) -> "NotHere":
        """A member, such as `apply` of an autograd function: not here either."""
        if name.startswith("__"):
            raise AttributeError(name)
        return NotHere(f"{self.name}.{name}", self.area)

    def __repr__(self) -> str:
        return f"<{self.name}: not here>"


def not_here(module: str, area: str, *names: str) -> tuple[NotHere, ...]:
    """One `NotHere` for each of a module's names, in their order."""
    return tuple(NotHere(f"{module}.{name}", area) for name in names)
