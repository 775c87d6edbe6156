"""Recording and replacing what the modules of a model return: to compare a model with another, or force its course.

Several models can be recorded, and one replaced; the records are those of the last forward of any. Both work by forward
hooks, so a model can be traced for inference with them.
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
    """What is recorded of a model, and what has been.

    Args:
        modules_to_capture: names of modules whose outputs are recorded.
        max_tensors: maximum number of tensors kept from `register_tensor`; unlimited if None.
        capture_inputs: record these modules' inputs as well.
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
        """Drop the records."""
        self.module_tensors: OrderedDict[str, Tensor] = OrderedDict()
        self.manual_tensors: OrderedDict[str, Tensor] = OrderedDict()
        self.manual_tensors_keys: dict[str, int] = {}


class TensorRegistry:
    """The records of this process."""

    _instance: ClassVar["TensorRegistry | None"] = None

    def __init__(self) -> None:
        self.enabled = False
        self._infos: WeakKeyDictionary[nn.Module, CapturedModelInfo] = WeakKeyDictionary()
        self.clear()

    @classmethod
    def get_instance(cls) -> "TensorRegistry":
        """The one registry of this process."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def clear(self) -> None:
        """Forget the records, and what is to be recorded."""
        self.model_info = CapturedModelInfo([], 10)

    def configure(
        self,
        enabled: bool = False,
        modules: Sequence[str] | None = None,
        max_tensors: int | None = None,
        capture_inputs: bool = False,
    ) -> None:
        """Say what is to be recorded from now on; see `CapturedModelInfo`."""
        self.enabled = enabled
        self.model_info = CapturedModelInfo(modules or [], max_tensors, capture_inputs)

    def register_tensor(self, name: Any, tensor: Tensor, neu_module: nn.Module | None = None) -> None:
        """Record a copy: of a module by its name, as it is called last; any other under `manual_<name>`, numbered."""
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
        """All records by name: module after module, inputs before outputs, then those of `register_tensor`."""
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
        """Records of modules."""
        return self.model_info.module_tensors

    def get_manual_tensors(self) -> dict[str, Tensor]:
        """Records of `register_tensor`."""
        return self.model_info.manual_tensors

    def get_manual_tensor_count(self) -> int:
        """Number of these."""
        return len(self.model_info.manual_tensors)

    def get_monitored_tensor_count(self) -> int:
        """Number of records of modules."""
        return len(self.model_info.module_tensors)

    def get_total_tensor_count(self) -> int:
        """Number of all records."""
        return self.get_monitored_tensor_count() + self.get_manual_tensor_count()

    def remove_hooks(self) -> None:
        """Take the hooks off the model whose records these are."""
        _remove_hooks(self.model_info)

    def attach(self, model: nn.Module) -> CapturedModelInfo:
        """Make what is to be recorded that of a model, in the place of what was before."""
        self.detach(model)
        self._infos[model] = self.model_info
        return self.model_info

    def detach(self, model: nn.Module) -> None:
        """Record this model no more."""
        info = self._infos.pop(model, None)
        if info is not None:
            _remove_hooks(info)
        self.enabled = len(self._infos) > 0

    def start(self, info: CapturedModelInfo) -> None:
        """A forward of a model begins: records are its own now, without those of its last forward."""
        self.model_info = info
        if info.has_run:  # what was registered before the first is kept with it
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
    """Record what modules of a model return, from now on.

    Args:
        model: is given forward hooks.
        modules_to_capture: names, of `get_available_modules`.
        max_tensors: as for `CapturedModelInfo`.
        capture_inputs: as above.

    Returns:
        The model itself.

    Raises:
        ValueError: the model has no module of a name.
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
    """Stop recording a model, and forget the records; returns the model."""
    restore_model(model)
    TensorRegistry.get_instance().clear()
    return model


def restore_model(model: nn.Module) -> nn.Module:
    """Stop recording a model, and keep the records; returns the model."""
    TensorRegistry.get_instance().detach(model)
    return model


def get_available_modules(model: nn.Module, prefix: str = "") -> list[str]:
    """Names of all modules below the model, which is called `prefix` itself."""
    return [name for name, _ in model.named_modules(prefix=prefix) if name != prefix]


def register_tensor(name: str, tensor: Tensor) -> None:
    """Record a tensor inside a forward, if recording is on; see `TensorRegistry.register_tensor`."""
    TensorRegistry.get_instance().register_tensor(name, tensor)


def get_captured_tensors_dict() -> OrderedDict[str, Tensor]:
    """The records; see `TensorRegistry.get_captured_tensors_dict`."""
    return TensorRegistry.get_instance().get_captured_tensors_dict()


class RuntimeRegister:
    """What the modules of `module_superset` are to return in the current forward: tensors, and masks of where."""

    module_superset: ClassVar[list[str]] = []
    _tr_runtime_list: ClassVar[dict[str, Tensor]] = {}
    _tr_mask_list: ClassVar[dict[str, Tensor]] = {}

    @classmethod
    def register_runtime_args(cls, tr_args: Sequence[Tensor], mask_args: Sequence[Tensor]) -> None:
        """Set them for all modules, in the order of `module_superset`.

        Raises:
            ValueError: another number of tensors or masks.
            TypeError: something that is no tensor.
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
        """Forget them."""
        cls._tr_runtime_list = {}
        cls._tr_mask_list = {}

    @classmethod
    def replaced(cls, name: str, output: Tensor) -> Tensor:
        """What a module returns instead of `output`.

        Raises:
            ValueError: there is nothing for it.
        """
        tensor, mask = cls._tr_runtime_list.get(name), cls._tr_mask_list.get(name)
        if tensor is None or mask is None:
            raise ValueError(
                f"Need tensor and mask for tensor replacement of {name!r}; pass them as the forward's last arguments"
            )
        return torch.where(mask, tensor, output)


def patch_forward_with_additional_args(model: nn.Module, module_superset: Sequence[str]) -> nn.Module:
    """Have `forward` take, after its own arguments, a tensor for each module and then a mask for each.

    Args:
        model: changed in place.
        module_superset: names of the modules.

    Returns:
        The model itself; its forward raises ValueError for another number of arguments.
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
    """Have the modules of `RuntimeRegister.module_superset` return what the model's forward is given for them.

    Returns:
        The model itself, see `patch_forward_with_additional_args`, and the hooks by module.
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
