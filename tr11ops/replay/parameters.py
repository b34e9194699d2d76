"""What a replay assumes of the training, the scheduler and the people: each with where it is from."""

from __future__ import annotations

from trainer.contract.record import Record

HOUR = 3600.0


class Parameters(Record):
    """The times of a simulated training and its cluster, in seconds where nothing else is said.

    Of the training:

    - `step`, one iteration: 105, the 176-billion training on 48 nodes.
    - `save`, how long a save stops the steps: 40, the same (2.3 TB).
    - `written`, from a save's begin until it is complete: None, it stops the steps until then.
    - `adapts`: whether tr11 saves as often as the faults call for (`adapt_save_interval`).
    - `interval`, iterations between two saves: 100, the same, "the most that a crash may cost".
    - `evaluation`, and the iterations between two: 720 each 1000, the same (29 data sets).
    - `start_up`, from a launch to its first load: 240, that training's "a few minutes a job".
    - `free_checkpoints`, how many fit where they lie: None, as many as in `free_bytes`: 110e12, below
      which the 176-billion run's disk was short.
    - `load`: 60, a checkpoint read at 1.5 times the rate of its save, as on an H100.

    Of the scheduler, measured on Slurm 22.05 with one machine as 4 to 52 nodes:

    - `next_task`, from a task's end to the next one's start where nodes are free: 1.4.
    - `relaunch`, from a failed launch to the next in the same allocation: 0.1.
    - `lost_after`, until a silent node counts as down: 300, SlurmdTimeout of a usual site, and 6.
    - `time_limit`: 360,000, the 100 hours of the original's array tasks.
    - `leaves_before`, the limit: 600, as the original's exit duration.

    Of the faults:

    - `ends_within`, from a worker's error to the end of the launch: 10, half of
      `resilience.end_within_seconds`, which is when the others are ended.
    - `silent_for`, until ranks that wait for a lost peer give up: 600, NCCL's default in PyTorch.
    - `drained_after`, until the site's own checks take a bad node out: 300, a usual
      HealthCheckInterval. What runs there runs on.

    Of people:

    - `person`, until someone acts on a mail that asks for it: 7200. An assumption: minutes by day,
      hours at night.
    - `looks`, between two passes of the watchdog: 3600, the card's interval.

    `quiet_looks`: so many times longer it waits while it trains and nothing has happened for two
    looks, for the next ones would see the same.
    """

    step: float = 105.0
    save: float = 40.0
    written: float | None = None
    adapts: bool = False
    interval: int = 100
    evaluation: float = 720.0
    evaluation_interval: int = 1000
    start_up: float = 240.0
    load: float = 60.0
    free_bytes: int = 110_000_000_000_000
    free_checkpoints: float | None = None
    next_task: float = 1.4
    relaunch: float = 0.1
    lost_after: float = 306.0
    time_limit: float = 100 * HOUR
    leaves_before: float = 600.0
    ends_within: float = 10.0
    silent_for: float = 600.0
    drained_after: float = 300.0
    person: float = 2 * HOUR
    looks: float = HOUR
    quiet_looks: int = 6

    @property
    def last_save(self) -> float:
        """How long a task stays for the save at its end."""
        return max(self.save, self.written or 0.0)


# Saves in the background, as tr11's trainer makes them: written in the original's 40 s. They stop the
# steps for 0.13 of that, the worst that was measured (0.08 to 0.13, on processors); forecast for a
# GPU is far less.
IN_BACKGROUND = Parameters(save=5.2, written=40.0, adapts=True)


class Layout(Record):
    """The nodes of a replay: how many train, how many more the partition has (`spares`), and how many
    of these an attempt holds beside those that train.
    """

    nodes: int = 48
    spares: int = 4
    held: int = 2

    @property
    def all(self) -> int:
        """Nodes of the partition."""
        return self.nodes + self.spares

    @property
    def allocated(self) -> int:
        """Nodes of one attempt."""
        return self.nodes + self.held
