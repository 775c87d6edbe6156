"""The devices that a plan can be made for: their FLOP/s, memory and bandwidths.

The documents named below were cited from memory, and nothing here was measured: check them before a decision depends on
a number, and override it with `find_device(..., flops=...)` or the flags of `nxd plan`.

A device is what one rank runs on: a GPU, a NeuronCore (on Trainium2 a logical one, which is two), or a process.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from types import MappingProxyType

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Nominal numbers of one device.

    Attributes:
        name: the device's name, for messages.
        memory_bytes: size of its memory.
        flops: peak FLOP/s of dense matrix products, by dtype ("bfloat16", "float32").
        memory_bandwidth: bytes/s between its memory and its arithmetic units.
        intra_host_bandwidth: bytes/s that it sends to other devices on its host.
        inter_host_bandwidth: bytes/s that it sends to other hosts: its share of the host's network.
        devices_per_host: number of devices that share a host.

    Raises:
        ValueError: a number is not positive or not finite.
    """

    name: str
    memory_bytes: float
    flops: Mapping[str, float]
    memory_bandwidth: float
    intra_host_bandwidth: float
    inter_host_bandwidth: float
    devices_per_host: int

    def __post_init__(self) -> None:
        single = [field.name for field in fields(self) if field.name not in ("name", "flops")]
        numbers = {name: getattr(self, name) for name in single}
        numbers |= {f"flops of {dtype}": rate for dtype, rate in self.flops.items()}
        wrong = [f"{name}={number}" for name, number in numbers.items() if not 0 < number < math.inf]
        if wrong:
            raise ValueError(f"device {self.name}: {', '.join(wrong)} must be positive and finite")

    def flops_of(self, dtype: str) -> float:
        """Return the peak FLOP/s for a dtype.

        Raises:
            ValueError: the device lists no FLOP/s for this dtype.
        """
        if dtype not in self.flops:
            raise ValueError(f"device {self.name} has no FLOP/s for {dtype}; use one of {', '.join(self.flops)}")
        return self.flops[dtype]


def trn1() -> Device:
    """One of the 32 NeuronCores-v2 of a trn1.32xlarge.

    A Trainium chip has two, 32 GiB at 820 GiB/s, 190 TFLOP/s (bfloat16) and 47.5 TFLOP/s (float32); the host has 800
    Gb/s of EFA (AWS Neuron documentation, "Trainium Architecture" and "Trn1/Trn1n Architecture"). Trainium has four
    NeuronLink-v2 links, and Inferentia2 has two with 192 GiB/s per chip, so 384 GiB/s is a derived number.
    """
    return Device(
        name="trn1",
        memory_bytes=16 * GIB,
        flops={"bfloat16": 95e12, "float32": 23.75e12},
        memory_bandwidth=410 * GIB,
        intra_host_bandwidth=192 * GIB,
        inter_host_bandwidth=800e9 / 8 / 32,
        devices_per_host=32,
    )


def trn2() -> Device:
    """One of the 64 logical NeuronCores (two physical NeuronCores-v3 each) of a trn2.48xlarge.

    A Trainium2 chip has four, 96 GiB at 2.9 TB/s, 667 TFLOP/s (bfloat16), 181 TFLOP/s (float32) and 1.28 TB/s of
    NeuronLink-v3 (AWS Neuron documentation, "Trainium2 Architecture"); the host has 3.2 Tb/s of EFA (Amazon EC2, page
    of Trn2 instances).
    """
    return Device(
        name="trn2",
        memory_bytes=24 * GIB,
        flops={"bfloat16": 667e12 / 4, "float32": 181e12 / 4},
        memory_bandwidth=2.9e12 / 4,
        intra_host_bandwidth=1.28e12 / 4,
        inter_host_bandwidth=3.2e12 / 8 / 64,
        devices_per_host=64,
    )


def inf2() -> Device:
    """One of the 24 NeuronCores-v2 of an inf2.48xlarge.

    An Inferentia2 chip has two, 32 GiB at 820 GiB/s, 190 TFLOP/s (bfloat16), 47.5 TFLOP/s (float32) and 192 GiB/s of
    NeuronLink-v2 (AWS Neuron documentation, "Inf2 Architecture"); the host has 100 Gb/s of network (Amazon EC2, page of
    Inf2 instances).
    """
    return Device(
        name="inf2",
        memory_bytes=16 * GIB,
        flops={"bfloat16": 95e12, "float32": 23.75e12},
        memory_bandwidth=410 * GIB,
        intra_host_bandwidth=96 * GIB,
        inter_host_bandwidth=100e9 / 8 / 24,
        devices_per_host=24,
    )


def h100() -> Device:
    """One of the 8 H100 SXM of a host.

    80 GB at 3.35 TB/s, 989 TFLOP/s (bfloat16, dense), 67 TFLOP/s (float32), NVLink with 900 GB/s for both directions
    together (NVIDIA H100 data sheet); 400 Gb/s of network per GPU (NVIDIA DGX H100 data sheet).
    """
    return Device(
        name="h100",
        memory_bytes=80e9,
        flops={"bfloat16": 989e12, "float32": 67e12},
        memory_bandwidth=3.35e12,
        intra_host_bandwidth=450e9,
        inter_host_bandwidth=400e9 / 8,
        devices_per_host=8,
    )


def cpu() -> Device:
    """One of 4 processes on a laptop or a small server.

    Round numbers of no particular machine: 4 GiB, 100 GFLOP/s, 10 GB/s of memory bandwidth, messages at 2 GB/s, and
    10 Gb/s of network shared by all.
    """
    return Device(
        name="cpu",
        memory_bytes=4 * GIB,
        flops={"bfloat16": 100e9, "float32": 100e9},
        memory_bandwidth=10e9,
        intra_host_bandwidth=2e9,
        inter_host_bandwidth=10e9 / 8 / 4,
        devices_per_host=4,
    )


DEVICES = MappingProxyType({make.__name__: make for make in (trn1, trn2, inf2, h100, cpu)})


def find_device(name: str, **numbers: float | None) -> Device:
    """Return the device with this name, with some of its numbers replaced.

    Args:
        name: one of `DEVICES`, in any case.
        **numbers: fields of `Device` to replace where not None; `flops` applies to every dtype.

    Raises:
        ValueError: there is no such device, or a number is not positive.
    """
    if name.lower() not in DEVICES:
        near = get_close_matches(name.lower(), DEVICES, n=1)
        raise ValueError(
            f"unknown device {name!r}; "
            + (f"did you mean {near[0]!r}? " if near else "")
            + f"Use one of {', '.join(DEVICES)}; for other hardware, name the closest one and override its numbers"
        )
    device = DEVICES[name.lower()]()
    given = {key: number for key, number in numbers.items() if number is not None}
    if "flops" in given:
        given["flops"] = dict.fromkeys(device.flops, given["flops"])  # type: ignore[assignment]
    return replace(device, **given) if given else device  # type: ignore[arg-type]
