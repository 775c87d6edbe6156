"""Capture and replacement of intermediate tensors, to compare models or to override what a module returns.

Several models can be captured at once and one can have tensors replaced; the captured tensors are those of the last
forward of any model. Both use forward hooks, so a model can be traced for inference with them.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class CapturedModelInfo:
    """What to capture of a model, and its captured tensors.

    Args:
        modules_to_capture: names of the modules whose outputs are captured.
        max_tensors: maximum number of tensors kept from `register_tensor`; unlimited if None.
        capture_inputs: whether to capture the modules' inputs too.
    """

    def __init__(
        self, modules_to_capture: Sequence[str], max_tensors: int | None = None, capture_inputs: bool = False
    ) -> None:
        self.modules_to_capture = list(modules_to_capture)
        self.max_tensors = max_tensors
        self.capture_inputs = capture_inputs
        self.hooks: list[RemovableHandle] = []
        self.has_run = False
        self.forget()

    def forget(self) -> None:
        """Drop the captured tensors."""
        self.module_tensors: OrderedDict[str, Tensor] = OrderedDict()
        self.manual_tensors: OrderedDict[str, Tensor] = OrderedDict()
        self.manual_tensors_keys: dict[str, int] = {}


class TensorRegistry:
    """The captured tensors of this process."""

    _instance: ClassVar["TensorRegistry | None"] = None

    def __init__(self) -> None:
        self.enabled = False
        self._infos: WeakKeyDictionary[nn.Module, CapturedModelInfo] = WeakKeyDictionary()
        self.clear()

    @classmethod
    def get_instance(cls) -> "TensorRegistry":
        """Return the registry of this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def clear(self) -> None:
        """Drop the captured tensors and the settings."""
        self.model_info = CapturedModelInfo([], 10)

    def configure(
        self,
        enabled: bool = False,
        modules: Sequence[str] | None = None,
        max_tensors: int | None = None,
        capture_inputs: bool = False,
    ) -> None:
        """Set what to capture from now on; see `CapturedModelInfo`."""
        self.enabled = enabled
        self.model_info = CapturedModelInfo(modules or [], max_tensors, capture_inputs)

    def register_tensor(self, name: Any, tensor: Tensor, neu_module: nn.Module | None = None) -> None:
        """Capture a copy: a module's under its name, replacing the last one; any other as `manual_<name>`, numbered."""
        if not self.enabled:
            return
        info = self.model_info
        if isinstance(name, str) and any(name == it or name.startswith(f"{it}.") for it in info.modules_to_capture):
            info.module_tensors[name] = tensor.detach().clone()
            return
        if info.max_tensors is not None and len(info.manual_tensors) >= info.max_tensors:
            return
        key = f"manual_tensor_{len(info.manual_tensors)}"
        if isinstance(name, str):
            base = f"manual_{name}"
            key = f"{base}_{info.manual_tensors_keys[base]}" if base in info.manual_tensors else base
            info.manual_tensors_keys[base] = info.manual_tensors_keys.get(base, 0) + 1
        info.manual_tensors[key] = tensor.detach().clone()

    def get_captured_tensors_dict(self) -> OrderedDict[str, Tensor]:
        """Return all captured tensors by name: per module inputs, then outputs; then those of `register_tensor`."""
        info = self.model_info
        found: OrderedDict[str, Tensor] = OrderedDict()
        for module in info.modules_to_capture:
            kinds = [f"{module}.inputs"] * info.capture_inputs + [f"{module}.outputs"]
            for kind in kinds:
                names = sorted(it for it in info.module_tensors if it.startswith(kind) or it == module)
                found.update({name: info.module_tensors[name] for name in names})
        found.update(info.manual_tensors)
        return found

    def get_module_tensors(self) -> dict[str, Tensor]:
        """Return the captured tensors of modules."""
        return self.model_info.module_tensors

    def get_manual_tensors(self) -> dict[str, Tensor]:
        """Return the tensors captured by `register_tensor`."""
        return self.model_info.manual_tensors

    def get_manual_tensor_count(self) -> int:
        """Return the number of tensors captured by `register_tensor`."""
        return len(self.model_info.manual_tensors)

    def get_monitored_tensor_count(self) -> int:
        """Return the number of captured tensors of modules."""
        return len(self.model_info.module_tensors)

    def get_total_tensor_count(self) -> int:
        """Return the number of all captured tensors."""
        return self.get_monitored_tensor_count() + self.get_manual_tensor_count()

    def remove_hooks(self) -> None:
        """Remove the hooks of the model whose tensors these are."""
        _remove_hooks(self.model_info)

    def attach(self, model: nn.Module) -> CapturedModelInfo:
        """Apply the settings to a model, replacing its earlier ones."""
        self.detach(model)
        self._infos[model] = self.model_info
        return self.model_info

    def detach(self, model: nn.Module) -> None:
        """Stop capturing a model."""
        info = self._infos.pop(model, None)
        if info is not None:
            _remove_hooks(info)
        self.enabled = len(self._infos) > 0

    def start(self, info: CapturedModelInfo) -> None:
        """Begin a forward of a model: drop the tensors of its last forward."""
        self.model_info = info
        if info.has_run:  # tensors registered before the first forward stay
            info.forget()
        info.has_run = True


def _remove_hooks(info: CapturedModelInfo) -> None:
    for hook in info.hooks:
        hook.remove()
    info.hooks = []


def enable_tensor_capture(
    model: nn.Module,
    modules_to_capture: Sequence[str] | None = None,
    max_tensors: int | None = None,
    capture_inputs: bool = False,
) -> nn.Module:
    """Capture the outputs of a model's modules from now on; returns the model.

    Args:
        model: the model, which gets forward hooks.
        modules_to_capture: names of modules, as `get_available_modules` lists them.
        max_tensors: see `CapturedModelInfo`.
        capture_inputs: see `CapturedModelInfo`.

    Raises:
        ValueError: the model has no module with such a name.
    """
    names = list(modules_to_capture or ())
    modules = dict(model.named_modules())
    unknown = [name for name in names if not name or name not in modules]
    if unknown:
        raise ValueError(f"The following modules were not found in the model: {unknown}; see get_available_modules")
    registry = TensorRegistry.get_instance()
    registry.configure(enabled=True, modules=names, max_tensors=max_tensors, capture_inputs=capture_inputs)
    info = registry.attach(model)
    registry.enabled = True
    info.hooks.append(model.register_forward_pre_hook(lambda module, args: registry.start(info)))
    for name in names:
        handle = modules[name].register_forward_hook(_recording_hook(name, capture_inputs), with_kwargs=True)
        info.hooks.append(handle)
    return model


def _recording_hook(name: str, capture_inputs: bool) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if capture_inputs:
            _record(f"{name}.inputs", args, module)
            _record(f"{name}.inputs.kwargs", kwargs, module)
        _record(f"{name}.outputs", output, module)

    return hook


def _record(name: str, value: Any, module: nn.Module) -> None:
    if isinstance(value, Tensor):
        TensorRegistry.get_instance().register_tensor(name, value, module)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            _record(f"{name}.{index}", item, module)
    else:
        attributes = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        for key, item in attributes.items():
            if isinstance(value, Mapping) or isinstance(item, Tensor):
                _record(f"{name}.{key}", item, module)


def disable_tensor_capture(model: nn.Module) -> nn.Module:
    """Stop capturing a model and drop the captured tensors; returns the model."""
    restore_model(model)
    TensorRegistry.get_instance().clear()
    return model


def restore_model(model: nn.Module) -> nn.Module:
    """Stop capturing a model and keep the captured tensors; returns the model."""
    TensorRegistry.get_instance().detach(model)
    return model


def get_available_modules(model: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of all modules below the model, whose own name is `prefix`."""
    return [name for name, _ in model.named_modules(prefix=prefix) if name != prefix]


def register_tensor(name: str, tensor: Tensor) -> None:
    """Capture a tensor inside a forward, if capture is enabled; see `TensorRegistry.register_tensor`."""
    TensorRegistry.get_instance().register_tensor(name, tensor)


def get_captured_tensors_dict() -> OrderedDict[str, Tensor]:
    """See `TensorRegistry.get_captured_tensors_dict`."""
    return TensorRegistry.get_instance().get_captured_tensors_dict()


class RuntimeRegister:
    """Tensors that replace outputs of the modules in `module_superset` in this forward, and masks of where."""

    module_superset: ClassVar[list[str]] = []
    _tr_runtime_list: ClassVar[dict[str, Tensor]] = {}
    _tr_mask_list: ClassVar[dict[str, Tensor]] = {}

    @classmethod
    def register_runtime_args(cls, tr_args: Sequence[Tensor], mask_args: Sequence[Tensor]) -> None:
        """Set tensors and masks for all modules, in the order of `module_superset`.

        Raises:
            ValueError: the number of tensors or masks differs from the number of modules.
            TypeError: a replacement is not a tensor.
        """
        count = len(cls.module_superset)
        if not len(tr_args) == len(mask_args) == count:
            raise ValueError(
                f"Expected {count} tf tensors & {count} masks, got {len(tr_args)} and {len(mask_args)}; pass one of "
                "each for every module of module_superset"
            )
        for name, tensor in zip(cls.module_superset, tr_args, strict=True):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"Tensor for '{name}' must be a torch.Tensor, got {type(tensor)}")
        cls._tr_runtime_list = {n: it.detach().clone() for n, it in zip(cls.module_superset, tr_args, strict=True)}
        cls._tr_mask_list = {n: it.detach().clone() for n, it in zip(cls.module_superset, mask_args, strict=True)}

    @classmethod
    def clear_runtime_args(cls) -> None:
        """Drop the tensors and masks."""
        cls._tr_runtime_list = {}
        cls._tr_mask_list = {}

    @classmethod
    def replaced(cls, name: str, output: Tensor) -> Tensor:
        """Return the replacement of a module's output.

        Raises:
            ValueError: there is no replacement for this module.
        """
        tensor, mask = cls._tr_runtime_list.get(name), cls._tr_mask_list.get(name)
        if tensor is None or mask is None:
            raise ValueError(
                f"Need tensor and mask for tensor replacement of {name!r}; pass them as the forward's last arguments"
            )
        return torch.where(mask, tensor, output)


def patch_forward_with_additional_args(model: nn.Module, module_superset: Sequence[str]) -> nn.Module:
    """Make `forward` take a tensor for each module, then a mask for each, after its own arguments.

    The model is changed in place and returned; its forward raises a ValueError for any other number of arguments.
    """
    forward, count = model.forward, len(module_superset)
    num_own = len(inspect.signature(forward).parameters)

    @wraps(forward)
    def patched(*args: Any) -> Any:
        further = args[num_own:]
        if len(further) != 2 * count:
            raise ValueError(
                f"[Tensor replacement] modules: expected {2 * count} trailing replacement args (tensors[{count}] + "
                f"masks[{count}]), got {len(further)}"
            )
        RuntimeRegister.register_runtime_args(tr_args=further[:count], mask_args=further[count:])
        try:
            return forward(*args[:num_own])
        finally:
            RuntimeRegister.clear_runtime_args()

    model.forward = patched
    return model


def modify_model_for_tensor_replacement(model: nn.Module) -> tuple[nn.Module, dict[str, RemovableHandle]]:
    """Replace outputs of the modules in `RuntimeRegister.module_superset` by arguments of the model's forward.

    Returns:
        The model, changed by `patch_forward_with_additional_args`, and the hooks by module.
    """
    patch_forward_with_additional_args(model, RuntimeRegister.module_superset)
    modules = dict(model.named_modules())
    hooks = {
        name: modules[name].register_forward_hook(
            lambda module, args, output, name=name: RuntimeRegister.replaced(name, output)
        )
        for name in RuntimeRegister.module_superset
        if name in modules
    }
    return model, hooks
