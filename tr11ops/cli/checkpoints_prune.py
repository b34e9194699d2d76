"""`tr11 checkpoints prune`: removes what the card's policy does not keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from tr11ops.base.errors import PruneBusy, Refusal
from tr11ops.base.units import counted, size
from tr11ops.checkpoints.prune import Pruner
from tr11ops.checkpoints.retention import LEAST_KEPT, counts
from tr11ops.checkpoints.screen import decisions_summary, decisions_table
from tr11ops.cli import completion
from tr11ops.cli.checkpoints_keep import find_folder
from tr11ops.cli.common import YesOption, agree, say
from tr11ops.cli.context import JSON, RunContext, emit
from tr11ops.cli.progress import ByteProgress
from tr11ops.rundir.journal import user_name
from trainer.contract.documents import document

if TYPE_CHECKING:
    from tr11ops.checkpoints.prune import PrunePlan, PruneResult, RemovalOutcome

SCHEMA = 1


def prune(
    context: Annotated[RunContext, JSON],
    *,
    keep: Annotated[
        int | None,
        typer.Option("--keep", min=2, metavar="N", help="Newest that stay; else the card's backup.keep_latest."),
    ] = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Also what roll-backs set aside (global_stepN.discarded).")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it goes into the journal.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Show each one that is kept, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and change nothing.")] = False,
    yes: YesOption = False,
) -> None:
    """Remove checkpoints that the card's backup section does not keep, after showing each and why.

    Never the last two complete, nor one that is pinned, in use, or lacks a copy that the card wants and that was read
    back. A removal that was cut off is finished by the next prune. Exit code 1: something would not go.

    Examples:
      tr11 checkpoints prune --dry-run --all
      tr11 checkpoints prune --keep 5 --yes --reason "SCRATCH is full"
    """
    card = context.card
    context.require_mounted()
    pruner = Pruner.of(card, user_name(), reason, keep, set_aside=set_aside)
    _carry_out(pruner, _planned(pruner), everything, dry_run, yes, context.as_json)


def remove(
    context: Annotated[RunContext, JSON],
    steps: Annotated[
        list[str],
        typer.Argument(
            metavar="STEP...", help="Steps, or names of folders beside them.", autocompletion=completion.steps
        ),
    ],
    *,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it goes into the journal.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and change nothing.")] = False,
    yes: YesOption = False,
) -> None:
    """Remove these checkpoints by the rules of prune: never one that is in use, pinned, or lacks a wanted copy.

    Of those rules only backup.keep_latest is set aside: the last two complete ones stay. A superseded or discarded
    folder (see `tr11 checkpoints list`) goes by its whole name, and lacks no copy then. Exit code 1: one stays, and why
    is said.

    Examples:
      tr11 checkpoints remove 31200 --reason "its weights rotted, restored elsewhere"
      tr11 checkpoints remove global_step31300.superseded --dry-run
    """
    context.require_mounted()
    pruner = Pruner.of(context.card, user_name(), reason or "checkpoints remove", LEAST_KEPT)
    catalogue = _planned(pruner).catalogue
    pruner = replace(pruner, only=frozenset(find_folder(catalogue, text) for text in steps))
    plan = _planned(pruner)
    if not plan.victims:
        if context.as_json:
            emit(_plan_document(plan, True), indent=None)
        else:
            _show(plan, True)
        raise typer.Exit(3 if plan.catalogue.read_errors else 1)
    stays = len(plan.victims) < len(plan.decisions)
    _carry_out(pruner, plan, True, dry_run, yes, context.as_json, code=1 if stays else 0)


def _planned(pruner: Pruner) -> PrunePlan:
    try:
        return pruner.plan()
    except OSError as error:
        why = error.strerror or error
        raise Refusal(f"{pruner.folder} cannot be read: {why}; nothing was removed", 3) from None


def _carry_out(
    pruner: Pruner, plan: PrunePlan, everything: bool, dry_run: bool, yes: bool, as_json: bool, code: int = 0
) -> None:
    """Show the plan, ask, and do it; `code` is the exit code when all went well."""
    if not as_json:
        _show(plan, everything)
    doubted = bool(plan.catalogue.read_errors)
    if dry_run or not (plan.victims or plan.leftovers):
        if as_json:
            emit(_plan_document(plan, everything), indent=None)
        for read_error in plan.catalogue.read_errors:
            say(f"tr11: nothing may be removed while this is not known: {read_error}")
        raise typer.Exit(3 if doubted else code)
    agree(_question(plan), yes)
    result = _remove(pruner, plan, as_json)
    if as_json:
        emit(_result_document(plan, result, everything), indent=None)
    else:
        _conclude(result)
    raise typer.Exit(1 if result.failed else 3 if doubted else code)


def _show(plan: PrunePlan, everything: bool) -> None:
    shown = plan.decisions if everything else plan.victims
    if shown:
        print(decisions_table(shown))
    print(decisions_summary(plan.decisions))
    if plan.leftovers:
        print(f"an earlier prune did not end: {', '.join(plan.leftovers)}")


def _question(plan: PrunePlan) -> str:
    if not plan.victims:
        return "Finish what the earlier prune began?"
    count = len(plan.victims)
    return f"Remove {counted(count, 'checkpoint')} ({size(plan.bytes)}) for good?"


def _remove(pruner: Pruner, plan: PrunePlan, quiet: bool) -> PruneResult:
    agreed = {(victim.name, victim.identity) for victim in plan.victims}
    with ByteProgress("removing", plan.bytes, is_quiet=quiet) as progress:

        def tell(outcome: RemovalOutcome) -> None:
            if not quiet or outcome.result == "failed":
                progress.say(_line(outcome))

        try:
            return replace(pruner, progress=progress.advance, tell=tell).run(agreed)
        except KeyboardInterrupt:
            raise Refusal("interrupted; what was begun is finished by the next prune") from None
        except PruneBusy as error:
            raise Refusal(f"nothing was removed: {error}") from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise Refusal(
                f"nothing was removed, because it cannot be recorded: {where}{error.strerror or error}"
            ) from None


def _line(outcome: RemovalOutcome) -> str:
    words = {"removed": "removed", "kept": "kept after all", "failed": "NOT REMOVED"}
    return f"{outcome.name}: {words[outcome.result]}" + (f": {outcome.text}" if outcome.result != "removed" else "")


def _conclude(result: PruneResult) -> None:
    removed = sum(outcome.result == "removed" for outcome in result.outcomes)
    print(f"{removed} removed, {size(result.freed)} freed")
    if result.finished:
        print(f"finished what an earlier prune began: {', '.join(result.finished)}")
    if result.ended_early:
        say(f"tr11: {result.ended_early}")


def _plan_document(plan: PrunePlan, everything: bool) -> dict[str, Any]:
    shown = plan.decisions if everything else plan.victims
    return {
        "schema": SCHEMA,
        "victims": [document(decision) for decision in plan.victims],
        "bytes": plan.bytes,
        "kept": dict(counts(plan.decisions)),
        "decisions": [document(decision) for decision in shown],
        "unfinished": list(plan.leftovers),
        "doubts": list(plan.catalogue.read_errors),
    }


def _result_document(plan: PrunePlan, result: PruneResult, everything: bool) -> dict[str, Any]:
    return {
        **_plan_document(plan, everything),
        "outcomes": [document(outcome) for outcome in result.outcomes],
        "freed": result.freed,
        "finished": list(result.finished),
        "ended_early": result.ended_early,
    }
