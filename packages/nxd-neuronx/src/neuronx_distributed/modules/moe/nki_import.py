"""`neuronx_distributed.modules.moe.nki_import`: what imported kernels."""

from nxd_neuronx.not_here import not_here

(
    NKIImport,
    import_nki,
    import_nki_beta2,
) = not_here(
    __name__,
    "experts",
    "NKIImport",
    "import_nki",
    "import_nki_beta2",
)

__all__ = [
    "NKIImport",
    "import_nki",
    "import_nki_beta2",
]
