"""Environment variables that change what is computed or compiled, often long after somebody set them."""

from collections.abc import Mapping

from nxd_trainer.doctor.finding import Finding, ok, warning, wrong

# What each does to a job, where that is easily forgotten.
SURPRISES = {
    "XLA_USE_BF16": "all float32 tensors are bfloat16 on the device; use a bfloat16 model instead",
    "XLA_DOWNCAST_BF16": "float32 becomes bfloat16 and float64 float32 on the device; use a bfloat16 model instead",
    "NEURON_EXTRACT_GRAPHS_ONLY": "graphs are only compiled, and all results are zeros; unset it to train",
    "NEURON_CC_FLAGS": "flags change what is compiled and which cached graphs are found",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for; unset it to train",
}
READ_HERE = ("NXD_DEVICE", "NXD_CPU_MODE", "NXD_LOG_LEVEL", "PJRT_DEVICE")


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """What is set, and a finding for each variable that is likely to surprise."""
    name = "environment"
    findings = []
    devices = environment.get("NXD_DEVICE", "")
    if environment.get("NXD_CPU_MODE") == "1" and devices not in ("", "cpu"):
        found = f"NXD_CPU_MODE=1 and NXD_DEVICE={devices}"
        findings.append(wrong(name, found, "they contradict each other, and NXD_CPU_MODE wins; unset one"))
    if "NEURON_RT_NUM_CORES" in environment and "NEURON_RT_VISIBLE_CORES" in environment:
        found = "NEURON_RT_NUM_CORES and NEURON_RT_VISIBLE_CORES are both set"
        findings.append(warning(name, found, "the runtime takes NEURON_RT_VISIBLE_CORES; unset the other"))
    for variable, effect in SURPRISES.items():
        value = environment.get(variable, "")
        if value not in ("", "0"):
            findings.append(warning(name, f"{variable}={value}", effect))
    listed = ", ".join(f"{variable}={environment[variable]}" for variable in READ_HERE if variable in environment)
    return findings or [ok(name, listed or "nothing is set that these packages read")]
