"""The programs that train a run, as the node's agent starts them: tr11's own trainer, the twin's
stand-in for it, and any other trainer, whose keeper keeps the run directory in its name.

Each takes the same places, and keeps the same contract with the files of the run directory.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Protocol

from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json


class NodePlaces(Record):
    """How many nodes and workers there are, which are this node's, and where the first one is met."""

    nodes: int
    node_rank: int
    workers: int
    address: str
    port: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers

    @property
    def first_rank(self) -> int:
        """Of this node's workers; the node's heartbeat goes by it."""
        return self.first_rank_of(self.node_rank)

    def first_rank_of(self, node_rank: int) -> int:
        return node_rank * self.workers

    @property
    def options(self) -> list[str]:
        """torchrun's options of a static rendezvous: the node list is known, so nothing has to be
        negotiated.
        """
        return [
            f"--nnodes={self.nodes}",
            f"--node-rank={self.node_rank}",
            f"--nproc-per-node={self.workers}",
            f"--master-addr={self.address}",
            f"--master-port={self.port}",
        ]

    @staticmethod
    def add_options(parser: ArgumentParser) -> None:
        """The same options, for a program that stands in torchrun's place."""
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--node-rank", type=int, default=0)
        parser.add_argument("--nproc-per-node", type=int, default=1)
        parser.add_argument("--master-addr", default="127.0.0.1")
        parser.add_argument("--master-port", type=int, default=29500)

    @classmethod
    def of(cls, options: Namespace) -> NodePlaces:
        """From what `add_options` has read."""
        return cls(
            options.nnodes,
            options.node_rank,
            options.nproc_per_node,
            address=options.master_addr,
            port=options.master_port,
        )


class NodeTrainer(Protocol):
    """A program that trains."""

    def command(self, card: Path, attempt: Path, places: NodePlaces) -> list[str]:
        """What is started on a node. `card`: the resolved one; `attempt`: `state/attempts/JOBID`."""


class OwnTrainer(Record):
    """The trainer of this project, under its launcher."""

    def command(self, card: Path, attempt: Path, places: NodePlaces) -> list[str]:
        return [
            *_module("trainer.control.launcher"),
            *places.options,
            "--max-restarts=0",
            "--tee=3",
            f"--log-dir={attempt / 'torchrun' / str(places.node_rank)}",
            "-m",
            "trainer",
            str(card),
        ]


class InItsPlace(Record):
    """A module that is its own launcher, and is given the card: the stand-in, the keeper."""

    module: str

    def command(self, card: Path, attempt: Path, places: NodePlaces) -> list[str]:
        return [*_module(self.module), *places.options, str(card)]


STAND_IN = InItsPlace("tr11ops.twin.stand_in")
KEEPER = InItsPlace("tr11ops.trainers.keeper")


def trainer_of(card: Path) -> NodeTrainer:
    """The trainer of a resolved card (JSON); our own where it cannot be read: it says what is wrong
    with it.
    """
    try:
        value: JsonObject = read_json(card) or {}
    except (OSError, ValueError):
        value = {}
    if isinstance(value.get("trainer"), dict):
        return KEEPER
    if value.get("rehearsal") is not None:
        return STAND_IN
    return OwnTrainer()


def _module(name: str) -> list[str]:
    return [sys.executable, "-u", "-m", name]
