"""`python -m tr11ops.twin.stand_in CARD.json`: the launcher of a node's stand-in workers, in
torchrun's place.

One light process a worker, forked from this one, which has imported everything already: hundreds
fit on one machine. What it prints of its workers, how it ends them and what it returns is as
torchrun does it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tr11ops.cluster.rehearsal import REHEARSAL_FIX, rehearsal_refusal
from tr11ops.trainers.trainer import NodePlaces
from trainer.contract.attempt import EXIT_REFUSED, AttemptIdentity
from trainer.contract.paths import RunPaths
from trainer.control.lifecycle import StopDecision, without_collections, write_end_marker


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tr11ops.twin.stand_in", description=__doc__)
    parser.add_argument("card", type=Path, help="resolved card (JSON)")
    NodePlaces.add_options(parser)
    options = parser.parse_args(arguments)
    rule = rehearsal_refusal(os.environ)
    if rule:
        refused = f"{rule}; {REHEARSAL_FIX}"
        print(f"tr11: refused: {refused}", file=sys.stderr, flush=True)
        if options.node_rank == 0:
            _record_refusal(options.card, refused)
        return EXIT_REFUSED

    with without_collections():
        from tr11ops.twin.stand_in.launcher import launch
        from trainer.config.card import CardError

    try:
        return launch(options.card, NodePlaces.of(options))
    except CardError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_REFUSED


def _record_refusal(card: Path, refused: str) -> None:
    """The end marker of a refusal, so that no later array task tries again. Nothing when the card
    cannot be read.
    """
    from trainer.config.card import CardError, load_trainer_config

    try:
        paths: RunPaths = load_trainer_config(card).paths
        attempt = AttemptIdentity.from_environment(os.environ, paths)
        write_end_marker(
            paths,
            attempt,
            StopDecision("refused", False, refused),
            iteration=0,
            checkpoint_step=None,
        )
    except (CardError, OSError) as error:
        print(f"tr11: the refusal could not be recorded: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
