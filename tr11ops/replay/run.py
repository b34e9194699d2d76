"""The run of a replay: its card, its run directory with production's own records in it, and its jobs."""

from __future__ import annotations

from pathlib import Path

from tr11ops.replay.scheduler import USER, SimulatedScheduler
from tr11ops.replay.world import World
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.rundir.exclusion import NodeStanding
from tr11ops.rundir.exclusions import read_version
from tr11ops.rundir.paths import RunDirectory, Submission
from trainer.contract.files import make_shared

BATCH_PER_NODE = 840  # of which each of a node's GPUs, up to 8, can have as many
MOST_ITERATIONS = 10_000_000  # no replay comes to its training's end
CARD = """\
[run]
name = "replay"
directory = "{root}"
exit_duration_minutes = {minutes}

[slurm]
nodes = {nodes}
spare_nodes = {held}
least_spare_nodes = 0
gpus_per_node = 8
workers_per_node = 8
partition = "replay"
time_limit = "{limit}"

[parallel]
tensor = 8

[model]
layers = 70
hidden_size = 14336
attention_heads = 112
sequence_length = 2048

[batch]
micro_batch_size = 1
global_batch_size = {batch}
train_samples = {samples}

[schedule]
learning_rate = 6e-5

[checkpoint]
interval = {interval}

[data]
prefixes = ["/replay/corpus"]

[tokenizer]
path = "/replay/tokenizer"
padded_vocabulary_size = 250_880

[backup]
store = "{root}-archive"
interval_hours = 6
prune = true

[resilience]
adapt_save_interval = {adapts}

[alerts]
recipients = ["on-call@site.example"]
digest_time = ""

[watch]
act = true
"""


def replay_card(folder: Path, world: World, overrides: tuple[str, ...] = ()) -> RunCard:
    """The card of a replayed run, whose directory is below `folder`; `overrides` as `--set` takes
    them. Raises CardError.
    """
    times = world.parameters
    layout = world.layout
    hours, seconds = divmod(int(times.time_limit), 3600)
    text = CARD.format(
        root=folder / "run",
        minutes=(times.time_limit - times.leaves_before) / 60,
        nodes=layout.nodes,
        held=layout.held,
        limit=f"{hours:02d}:{seconds // 60:02d}:{seconds % 60:02d}",
        interval=times.interval,
        adapts=str(times.adapts).lower(),
        batch=BATCH_PER_NODE * layout.nodes,
        samples=BATCH_PER_NODE * layout.nodes * MOST_ITERATIONS,
    )
    path = folder / "replay.toml"
    path.write_text(text, encoding="utf-8")
    return load_card(path, overrides, {})


class SimulatedRun:
    """A run with its directory and its jobs. `last_trained`: when its last step was made, in seconds
    since the epoch, and `trained_in`: in which job.
    """

    def __init__(self, world: World, folder: Path, overrides: tuple[str, ...] = ()) -> None:
        self.world = world
        self.card = replay_card(folder, world, overrides)
        self.directory = RunDirectory(self.card.paths, self.card.kill_switch)
        self.needed = self.card.slurm.least_nodes
        self.most = self.card.slurm.allocated_nodes
        self.last_trained = world.now
        self.trained_in = ""
        self.scheduler = SimulatedScheduler(world, self.card.run.name, world.parameters.time_limit)
        self._excluded: frozenset[str] = frozenset()
        self.submissions = 0
        make_shared(self.card.paths.root)
        make_shared(self.card.paths.logs)

    def submit(self, tasks: int) -> None:
        """Launch an array, as a person or the watchdog does."""
        self.submissions += 1
        tag = f"20220311-000000-{self.submissions:08x}"
        listed = tuple(entry.node for entry in read_version(self.directory.exclusions).exclusions)
        number = self.scheduler.queue(tasks, self.needed, self.directory.comment(tag), listed)
        self.directory.write_submission(
            Submission(
                tag,
                number,
                scheduler="slurm",
                time=self.world.now,
                user=USER,
                host="login",
                run=self.card.run.name,
                variant=self.card.run.variant,
                array=f"1-{tasks}%1",
                nodes=self.most,
                card_hash=self.card.digest,
                excluded=listed,
                chain="array",
            )
        )

    def note_exclusions(self) -> None:
        """Count the nodes that are newly kept out of the run."""
        listed = read_version(self.directory.exclusions).exclusions
        barred = {entry.node: entry for entry in listed if entry.state != NodeStanding.SUSPECT}
        for node in barred.keys() - self._excluded:
            since = barred[node].since or self.world.now
            self.world.account.excluded += 1
            self.world.account.innocent += self.world.is_innocent(node, since)
        self._excluded = frozenset(barred)
