"""The keys of a recipe on a command line: `--train.steps 100`, `--train.steps=100` or `train.steps=100`."""

import os
from collections.abc import Collection, Sequence

_TRUE_OR_FALSE = ("true", "false", "0", "1")


def take_settings(
    arguments: Sequence[str], flags: Collection[str], switches: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Split the arguments into those without the recipe's keys, and these keys as `key=value`.

    A key may be given as `--train.steps 100`, `--train.steps=100` or `train.steps=100`, and a boolean one also as
    `--data.chat`. Unknown keys are kept: the recipe knows best which key was meant.
    """
    remaining: list[str] = []
    settings: list[str] = []
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and name in flags and not equals and name != "help" and waiting:
            remaining += [argument, waiting.pop()]  # its value may look like a setting, as a layout does
        elif argument.startswith("--") and name not in flags:
            if name in switches and not equals and (not waiting or waiting[-1].lower() not in _TRUE_OR_FALSE):
                value = "true"
            elif not equals and waiting and not waiting[-1].startswith("--"):
                value = waiting.pop()
            settings.append(f"{name}={value}")
        elif equals and not argument.startswith("-") and not os.path.exists(argument):
            settings.append(argument)
        else:
            remaining.append(argument)
    return remaining, settings
