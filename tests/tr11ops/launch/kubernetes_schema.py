"""Kubernetes objects against the published schema, and the section of a card that they are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).parents[2] / "data" / "kubernetes" / "schema-1.33.json"
KINDS = {
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "Service": "io.k8s.api.core.v1.Service",
    "Job": "io.k8s.api.batch.v1.Job",
}


def section(folder: Path) -> list[str]:
    return [
        "kubernetes.image=registry.example/tr11:1", "kubernetes.volume_claim=scratch", f"kubernetes.mount={folder}",
        "kubernetes.namespace=training",
    ]  # fmt: skip


def invalid(value: dict[str, Any]) -> list[str]:
    """What the published schema says against an object; it knows every key, and takes no other."""
    from jsonschema import Draft202012Validator

    definitions = json.loads(SCHEMA.read_text())["$defs"]
    schema = {"$ref": f"#/$defs/{KINDS[value['kind']]}", "$defs": definitions}
    return [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(value)
    ]
