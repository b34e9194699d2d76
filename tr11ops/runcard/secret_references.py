"""Secrets that a card gives to its workers: it names the variable, and each process that needs it
reads it itself.

`[slurm.environment]` may say `PGPASSWORD = "$DB_PASS"`. The resolved card and the batch script then
hold `${DB_PASS}`, never its value: both are copied, and readable by the run's group. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.contract.secret_names import is_secret_name, reference_of
from trainer.contract.secret_shapes import has_secret

SECTION = ("slurm", "environment")


def kept_reference(key: tuple[str | int, ...], value: str, variables: Mapping[str, str]) -> str:
    """What stays in the card of a variable for the workers whose value is one reference to a
    secret; "" of all else.

    It is one by either name, or by the form of what the variable holds here.
    """
    variable = ""
    if key[:2] == SECTION and len(key) == 3:
        variable = reference_of(value)
    if not variable:
        return ""
    is_secret = (
        is_secret_name(str(key[2]))
        or is_secret_name(variable)
        or has_secret(variables.get(variable, ""))
    )
    if is_secret:
        return f"${{{variable}}}"
    return ""


def references(environment: Mapping[str, str]) -> dict[str, str]:
    """Of the card's variables those that are references, each with the variable that it is read
    from.
    """
    return {
        name: variable for name, value in environment.items() if (variable := reference_of(value))
    }


def unset_here(environment: Mapping[str, str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """What of the card's variables is read from one that a process with `variables` lacks, as `NAME
    from $VARIABLE`.
    """
    read = sorted(references(environment).items())
    return tuple(f"{name} from ${variable}" for name, variable in read if variable not in variables)


def values_here(environment: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The card's variables as a process with `variables` has them; a reference to one that it lacks
    is left out.
    """
    read = references(environment)
    plain = {name: value for name, value in environment.items() if name not in read}
    return plain | {
        name: variables[variable] for name, variable in read.items() if variable in variables
    }
