"""What a configuration is to be used for."""

from __future__ import annotations

import enum


class Command(enum.Enum):
    """A command of the command line that runs an experiment."""

    TRAIN = "train"
    SFT = "sft"
