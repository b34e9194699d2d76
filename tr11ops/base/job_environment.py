"""What Slurm tells a process of the job around it, by its environment."""

from __future__ import annotations

from collections.abc import Mapping

# from here on up a step's number stands for something else: a batch script, a shell of salloc's
_FIRST_SPECIAL = 0xFFFF_FF00


def step_of(environment: Mapping[str, str]) -> str | None:
    """The number of the step of srun that a process belongs to; None in a batch script and outside a
    job.

    Slurm 22.05 gives a batch script no number; 26.05 gives it -5, and others the same without a sign.
    """
    number = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or ""
    if not number.isdecimal() or int(number) >= _FIRST_SPECIAL:
        return None
    return number
