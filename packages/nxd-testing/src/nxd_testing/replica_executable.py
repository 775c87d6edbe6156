"""One graph on N replicas in this process, with XLA's own collectives between them: jaxlib's CPU client. Needs jaxlib.

torch-xla's CPU client compiles a module of its own for each device, whose collectives never meet.
"""

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


class ReplicaExecutable:
    """A compiled graph.

    Args:
        proto: a serialised `HloModuleProto`, such as torch-xla gives.
        num_replicas: number of replicas that run it at once, those of its replica groups.

    Raises:
        RuntimeError: jaxlib is not installed, or the compiler does not take the graph.
    """

    def __init__(self, proto: bytes, num_replicas: int) -> None:
        self._client, xla = _client_of(num_replicas), _jaxlib("xla_client")
        self._devices = self._client.devices()[:num_replicas]
        options = xla.CompileOptions()
        options.num_replicas, options.num_partitions = num_replicas, 1
        options.device_assignment = xla.DeviceAssignment.create(np.arange(num_replicas).reshape(-1, 1))
        debug_options = options.executable_build_options.debug_options
        debug_options.xla_backend_optimization_level = 0  # half the time to compile, and small tensors do not mind
        debug_options.xla_llvm_disable_expensive_passes = True
        stable_hlo = _jaxlib("_jax").mlir.hlo_to_stablehlo(proto)
        self._executable = self._client.compile_and_load(stable_hlo, _device_list(self._devices), options)

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Run it once.

        Args:
            inputs: per replica, the graph's parameters on the CPU.

        Returns:
            Per replica, the graph's results on the CPU.
        """
        arguments = [self._put(by_replica) for by_replica in zip(*inputs, strict=True)]
        results = self._executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [[_to_torch(by_replica[replica]) for by_replica in results] for replica in range(len(inputs))]

    def _put(self, tensors: Sequence[Tensor]) -> Any:
        """One array of the client's with another value on each replica's device; shape and dtype are the replicas'."""
        xla = _jaxlib("xla_client")
        values = [_to_numpy(tensor) for tensor in tensors]
        kind = SimpleNamespace(shape=values[0].shape, dtype=values[0].dtype, weak_type=False)
        parts = [
            xla.batched_device_put(kind, _replicated([device]), [value], [device], enable_x64=True)
            for value, device in zip(values, self._devices, strict=True)
        ]
        return xla.ArrayImpl(kind, _replicated(self._devices), parts, True, _skip_checks=True)


_clients: dict[int, Any] = {}


def _client_of(num_devices: int) -> Any:
    if num_devices not in _clients:
        _clients[num_devices] = _jaxlib("_jax").get_tfrt_cpu_client(num_devices=num_devices)
    return _clients[num_devices]


def _jaxlib(module: str) -> Any:
    try:
        return importlib.import_module(f"jaxlib.{module}")
    except ImportError as error:
        raise RuntimeError(
            "running a graph on replicas needs jaxlib, which is not installed; install jaxlib"
        ) from error


def _device_list(devices: Sequence[Any]) -> Any:
    return _jaxlib("_jax").DeviceList(tuple(devices))


def _replicated(devices: Sequence[Any]) -> Any:
    xla = _jaxlib("xla_client")
    return xla.GSPMDSharding(_device_list(devices), xla.HloSharding.replicate())


def _to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype != torch.bfloat16:
        return tensor.detach().contiguous().numpy()
    bfloat16 = importlib.import_module("ml_dtypes").bfloat16  # which jaxlib needs
    return tensor.detach().contiguous().view(torch.int16).numpy().view(bfloat16)


def _to_torch(array: Any) -> Tensor:
    shared: Tensor = torch.from_dlpack(_jaxlib("_jax").buffer_to_dlpack_managed_tensor(array))
    return shared.clone()
