"""The parts: each module has `rows(device)`, which yields a `Row` as soon as it knows one."""
