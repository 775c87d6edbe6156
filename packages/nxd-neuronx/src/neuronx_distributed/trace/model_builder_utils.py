"""`neuronx_distributed.trace.model_builder_utils`: what the old builder kept of a trace."""

from nxd_neuronx.not_here import not_here

(
    CompilationArtifacts,
    LayoutTransformerArtifacts,
    ModelBuilderConstants,
    ModelParamInfo,
    ProvidedArgInfo,
    TraceArtifacts,
    WLOArtifacts,
    generate_key,
) = not_here(
    __name__,
    "hlo",
    "CompilationArtifacts",
    "LayoutTransformerArtifacts",
    "ModelBuilderConstants",
    "ModelParamInfo",
    "ProvidedArgInfo",
    "TraceArtifacts",
    "WLOArtifacts",
    "generate_key",
)

__all__ = [
    "CompilationArtifacts",
    "LayoutTransformerArtifacts",
    "ModelBuilderConstants",
    "ModelParamInfo",
    "ProvidedArgInfo",
    "TraceArtifacts",
    "WLOArtifacts",
    "generate_key",
]
