"""The signature files: one TOML file a family, read and checked once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tr11ops.diagnose.signature import FaultSignature, Rule, signature_of

FOLDER = Path(__file__).parent / "signatures"
_KEYS = frozenset(
    {
        "id",
        "pattern",
        "role",
        "class",
        "action",
        "node",
        "confidence",
        "meaning",
        "source",
        "lasting",
        "own",
        "restart",
        "ordered",
        "helps",
        "proof",
        "match",
        "no_match",
    }
)
_LOOKUP_KEYS = frozenset({"id", "pattern", "source", "example", "no_match", "group"})
_GROUP_KEYS = frozenset(
    {
        "role",
        "class",
        "action",
        "node",
        "confidence",
        "helps",
        "proof",
        "meaning",
        "codes",
        "others",
    }
)


@cache
def rules() -> tuple[Rule, ...]:
    """Every rule of every family, in the order of the files; within a file the first match counts."""
    return tuple(rule for path in sorted(FOLDER.glob("*.toml")) for rule in read_family(path))


def read_family(path: Path) -> tuple[Rule, ...]:
    """The rules of one file. Raises ValueError that names the file, the signature and what is wrong
    with it.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        return tuple(_rules(path.stem, document))
    except (ValueError, KeyError, TypeError, re.error) as error:
        raise ValueError(f"{path.name}: {error}") from error


def _rules(family: str, document: Mapping[str, Any]) -> Iterator[Rule]:
    source = document.get("source", "")
    for entry in document.get("signature", ()):
        _check_keys(entry, _KEYS)
        signature = signature_of(entry["id"], family, {"source": source, **entry})
        patterns = entry["pattern"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            yield Rule(re.compile(pattern), signature)
    for entry in document.get("lookup", ()):
        _check_keys(entry, _LOOKUP_KEYS)
        yield _lookup(family, {"source": source, **entry})


def _lookup(family: str, entry: Mapping[str, Any]) -> Rule:
    """One pattern for many codes. A group with `others` stands for every code that no group has."""
    codes: dict[str, FaultSignature] = {}
    others: FaultSignature | None = None
    for group in entry["group"]:
        _check_keys(group, _GROUP_KEYS)
        shared = {key: value for key, value in group.items() if key not in {"codes", "others"}}
        shared["source"] = entry["source"]
        for code, meaning in group.get("codes", {}).items():
            example = entry["example"].replace("{code}", code)
            values = {
                **shared,
                "meaning": meaning,
                "match": [example],
                "no_match": entry.get("no_match", []),
            }
            if code.lower() in codes:
                raise ValueError(f"{entry['id']}: code {code} stands twice")
            codes[code.lower()] = signature_of(f"{entry['id']}-{_slug(code)}", family, values)
        if "others" in group:
            example = entry["example"].replace("{code}", group["others"])
            others = signature_of(f"{entry['id']}-others", family, {**shared, "match": [example]})
    return Rule(re.compile(entry["pattern"]), others, codes)


def _check_keys(entry: Mapping[str, Any], known: frozenset[str]) -> None:
    extra = sorted(set(entry) - known)
    if extra:
        raise ValueError(
            f"{entry.get('id', 'a group')}: {', '.join(extra)} is no key of a signature"
        )


def _slug(code: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", code.lower()).strip("-")
