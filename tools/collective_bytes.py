"""The bytes that a rank sends in a training step on XLA, by layout, beside the least that it must send.

    PJRT_DEVICE=CPU python tools/collective_bytes.py

Takes some minutes on two cores, needs torch-xla and no device, and leaves nothing behind. The step is that of
`tests-integration/xla`, which runs it on replicas and holds it to the same numbers. Here one rank of each layout
records its graph in a process of its own, and nothing is run. Bytes are counted in its HLO, by the rings' count.
"""

import multiprocessing
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests-integration/xla"))


def recorded_step(name: str) -> str:
    """The graph of the second step of a layout's first rank, as text; in a process that has no mesh yet."""
    os.environ |= {"NXD_DEVICE": "xla", "PJRT_DEVICE": "CPU"}
    import torch.distributed as dist  # noqa: PLC0415  (torch-xla reads the environment)
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, PLC0415  (registers the transport "fake")
    from nxd_doctor.graphs.capture import record_steps  # noqa: PLC0415
    from nxd_state import step_boundary  # noqa: PLC0415
    from training_steps import LAYOUTS, make_llama, make_trainee, take_step  # noqa: PLC0415

    world_size, layout = LAYOUTS[name]
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=world_size)
    trainee = make_trainee(layout, make_llama)

    def step() -> None:
        take_step(trainee, layout, 0)
        step_boundary()

    _, [graph] = record_steps(step, 2)  # the first also makes the optimizer's state
    return graph.text


def main() -> None:
    """Print the table, as Markdown."""
    from nxd_doctor.graphs import find_collectives, parse_hlo  # noqa: PLC0415
    from step_bytes import least_bytes, sent_bytes  # noqa: PLC0415
    from training_steps import LAYOUTS  # noqa: PLC0415

    print("| layout | ranks | collectives | bytes in the HLO | least bytes |")
    print("|---|---:|---|---:|---:|")
    context = multiprocessing.get_context("spawn")
    for name, (world_size, layout) in LAYOUTS.items():
        with context.Pool(1) as pool:  # a process can play one rank of one layout
            text = pool.apply(recorded_step, (name,))
        kinds = [it.kind for it in find_collectives(parse_hlo(text), world_size=world_size)]
        shown = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        print(
            f"| {name} | {world_size} | {shown} | {sent_bytes(text, world_size)} | {least_bytes(layout, world_size)} |"
        )


if __name__ == "__main__":
    main()
