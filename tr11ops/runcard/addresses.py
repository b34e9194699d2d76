"""Lists of mail addresses that a card takes from the environment: `recipients = ["$TR11_ALERT_RECIPIENTS"]`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.config.card import Problem

ADDRESS_KEYS = (("alerts", "recipients"), ("alerts", "rota"))
_WHOLE_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


def expand_addresses(
    tables: Mapping[str, Any], environment: Mapping[str, str], keep_undefined: bool
) -> tuple[dict[str, Any], list[Problem]]:
    """The tables with each address that is one `$NAME` replaced by the addresses in it, split at commas.

    An undefined variable is left for the card's other variables to be reported with; `keep_undefined` drops it, since
    it can be no address. One that names no address is a problem.
    """
    result, problems = dict(tables), []
    for section, key in ADDRESS_KEYS:
        table = result.get(section)
        if not isinstance(table, dict) or not isinstance(table.get(key), list):
            continue
        entries: list[Any] = []
        for entry in table[key]:
            match = _WHOLE_VARIABLE.fullmatch(entry) if isinstance(entry, str) else None
            name = (match[1] or match[2]) if match else ""
            if not match or (name not in environment and not keep_undefined):
                entries.append(entry)
            elif name in environment:
                found = [part.strip() for part in environment[name].split(",") if part.strip()]
                entries += found
                if not found:
                    fix = f"export {name}=ana@site.org,ben@site.org, or --set '{section}.{key}=[]'"
                    problems.append(Problem(f"{section}.{key}", entry, "names no mail address", fix))
        result[section] = {**table, key: entries}
    return result, problems
