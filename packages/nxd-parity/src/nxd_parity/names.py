"""Names of modules and parameters without the prefixes of what wraps them."""

import re

# DDP and DataParallel `module`, torch.compile, activation checkpoint wrappers, FSDP1, PEFT.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module|base_layer)(?:\.|$)"
)
_ROOTS = ("module.", "base_model.model.")


def plain_name(name: str) -> str:
    """Return the name that a module or parameter has in the model before it was wrapped.

    The prefix `module.` is taken away only at the start, where DDP puts it.
    """
    name = _WRAPPERS.sub("", name).removesuffix(".")
    changed = True
    while changed:
        changed = False
        for root in _ROOTS:
            if name.startswith(root):
                name, changed = name[len(root) :], True
    return "" if f"{name}." in _ROOTS else name
