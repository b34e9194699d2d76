"""`tr11 launch --scheduler kubernetes --dry-run`: the objects that `kubectl apply -f -` takes, on standard output."""

from __future__ import annotations

import os
from typing import Any

import typer

from tr11ops.base.errors import Refusal
from tr11ops.cli.common import card_path, say
from tr11ops.cli.context import RunContext, emit
from tr11ops.launch.kubernetes import job_name, kubernetes_problems, manifest, not_carried
from tr11ops.runcard.card import CardError, load_card

MANIFEST_SCHEMA = 1


def show_manifest(context: RunContext, given: list[str], nodes: int | None, dry_run: bool) -> None:
    """Print the objects of a card. `given`: options that a Job has no use for. Raises CardError, Refusal."""
    if given:
        text = f"{given[0]}: a Kubernetes Job starts its pods again by itself and has no array, queue or node list"
        raise Refusal(f"{text}; leave it out", exit_code=2)
    if not dry_run:
        text = "tr11 writes the objects and does not talk to a cluster"
        raise Refusal(f"{text}: add --dry-run and pipe it into `kubectl apply -f -`", exit_code=2)
    path = card_path(context.run)
    sizes = [] if nodes is None else [f"slurm.nodes={nodes}"]
    card = load_card(path, [*context.overrides, *sizes], os.environ)
    problems = list(kubernetes_problems(card))
    if problems or card.kubernetes is None:
        raise CardError(str(path), problems)
    objects = manifest(card, card.kubernetes)
    for line in not_carried(card):
        say(f"tr11: {line}")
    if context.as_json:
        emit({"schema": MANIFEST_SCHEMA, "name": job_name(card), "objects": objects})
        return
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # the library has no types
        """Writes what occurs twice twice, as a person would, and texts of several lines as such."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    def written(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, written)
    typer.echo(yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120), nl=False)
