"""The run card's sections that say how a run is watched (alerts, findings' bounds, file systems,
periodic jobs) and what is copied away.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from tr11ops.base.units import bytes_of
from tr11ops.runcard.sections import TimeLimit, Word
from trainer.config.base import Days, Hours, SmallCount
from trainer.config.card import Section
from trainer.contract.secret_names import is_secret_name
from trainer.contract.secret_shapes import has_secret

MailAddress = Annotated[str, Field(pattern=r"^[^@\s,]+@[^@\s,]+$")]
Size = Annotated[str, Field(pattern=r"^\d{1,9}(\.\d{1,3})? ?([KMGTP]i?)?B$")]
Percent = Annotated[float, Field(gt=0, le=100)]


class AlertsSection(Section):
    """[alerts]: who hears of trouble, and when. Delivery URLs hold secrets, so they are in files of
    their own.
    """

    recipients: list[MailAddress] = Field(default=[])
    """mail addresses that get alerts; with a rota, what no one on it has acknowledged; "$NAME" may
    hold several, with commas
    """

    rota: list[MailAddress] = Field(default=[])
    """people on call, in turn; alerts go to who is on duty, then to the next"""

    rota_days: float = Field(default=7, gt=0, le=366)
    """how long each one of the rota is on duty"""

    rota_start: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    """first day of the first of the rota, YYYY-MM-DD"""

    time_zone: str = Field(default="UTC", pattern=r"^[A-Za-z0-9_+/-]{1,64}$")
    """of all times of day here, e.g. Europe/Paris"""

    quiet_hours: str | None = Field(
        default=None, pattern=r"^([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d$"
    )
    """22:00-07:00: only what is critical is sent then, the rest when they end"""

    escalate_minutes: list[Annotated[float, Field(gt=0, le=10_080)]] = Field(default=[30, 60])
    """when a critical alert that no one acknowledged goes to the next of the rota, at last to all"""

    repeat_hours: Hours = 24
    """an alert that is open and not acknowledged is sent again after this"""

    resolve_after: int = Field(default=2, gt=0, le=100)
    """looks in a row that must be free of a fault before the all-clear"""

    digest_time: str = Field(default="08:00", pattern=r"^(([01]\d|2[0-3]):[0-5]\d)?$")
    """of the daily summary; "": no summary"""

    sender: MailAddress | None = None
    """mail address"""

    smtp_host: str = Field(default="localhost", pattern=r"^[A-Za-z0-9.:_-]{1,255}$")
    """mail server"""

    smtp_port: int = Field(default=25, gt=0, le=65535)
    """of the mail server"""

    serve_url: str | None = Field(default=None, pattern=r"^https?://[^\s<>\"'?#]{1,500}$")
    """public address of `tr11 serve`; each mail about an alert then has a link to answer by"""

    delivery_seconds: float = Field(default=30, gt=0, le=600)
    """most that one delivery may take"""

    urls_file: str | None = None
    """file with one delivery URL a line; readable by you alone"""

    dead_man_url_file: str | None = None
    """file with the URL that is called after each look that really saw the run"""

    interval_minutes: int = Field(default=5, gt=0, le=1440)
    """between two looks at the run"""

    @property
    def has_recipients(self) -> bool:
        """Whether an alert reaches someone."""
        return bool(self.recipients or self.rota or self.urls_file)


class OperationSection(Section):
    """[operation]: whose run it is, and what its GPUs cost; lists of several runs show it."""

    team: str | None = Field(default=None, pattern=r"^[^\s\x00-\x1f][^\x00-\x1f]{0,39}$")
    """runs are summed up by it; default: slurm.account"""

    gpu_hour_price: float | None = Field(default=None, ge=0, le=10**6)
    """of one GPU for an hour; default: no price is shown"""

    currency: str = Field(default="EUR", pattern=r"^[A-Z]{3}$")
    """of the price, three letters"""


class WatchSection(Section):
    """[watch]: from when something counts as a fault, and what the watchdog may do about it by
    itself.
    """

    act: bool = False
    """the periodic watchdog acts within the budgets; false: it only tells"""

    resubmit_array: str = Field(default="1-3", pattern=r"^[0-9,-]{1,100}$")
    """what is submitted when nothing runs and nothing waits"""

    resubmissions_per_day: SmallCount = 4
    """most of them in 24 hours"""

    exclusions_per_day: SmallCount = 4
    """most nodes excluded in 24 hours"""

    cancellations_per_day: SmallCount = 4
    """most jobs cancelled in 24 hours"""

    longest_queue_minutes: float = Field(default=60, gt=0, le=525_600)
    """a first task that waits longer than this for nodes of its own"""

    stall_iterations: float = Field(default=10, ge=3, le=10_000)
    """learned iteration times without a new iteration, while training"""

    least_silence_minutes: float = Field(default=2, gt=0, le=10_080)
    """while training, a shorter silence is no fault, however short an iteration is"""

    slow_percent: float = Field(default=3, gt=0, le=90)
    """below the median throughput of the last 100 iterations"""

    tasks_left: SmallCount = 2
    """fewer queued tasks than this: the end is in sight"""

    clock_skew_seconds: float = Field(default=30, gt=0, le=86_400)
    """between two machines' clocks"""

    scratch_purge_days: Days | None = None
    """the site deletes files that no one has touched for this long"""

    @property
    def resubmissions(self) -> int:
        """How often in 24 hours the periodic watchdog may submit again; 0: it only looks."""
        if self.act:
            return self.resubmissions_per_day
        return 0


class FilesystemSection(Section):
    """[[filesystems]]: one file system or quota that is watched; one table for each."""

    name: Word
    """as it appears in alerts, e.g. SCRATCH"""

    source: Literal["idrquota", "lfs", "quota", "df", "du"]
    """who knows how full it is"""

    path: str | None = None
    """folder on it; needed by lfs, df and du"""

    arguments: list[Word] = Field(default=[])
    """given to the source, e.g. ["-w", "-p", "six"]"""

    bytes_limit: Size | None = None
    """where the source knows no quota, e.g. "400 TiB\""""

    inodes_limit: int | None = Field(default=None, gt=0, le=10**15)
    """where the source knows no quota"""

    bytes_percent: Percent = 85
    """full beyond this share of the bytes"""

    inodes_percent: Percent = 85
    """full beyond this share of the inodes"""

    least_free: Size | None = None
    """full below this, whatever the share, e.g. "100 TiB\""""

    forecast_days: Days = 14
    """told when it will be full sooner than this"""

    @property
    def most_bytes(self) -> int | None:
        """`bytes_limit` as a number."""
        return _bytes(self.bytes_limit)

    @property
    def least_free_bytes(self) -> int | None:
        """`least_free` as a number."""
        return _bytes(self.least_free)


def _bytes(size: str | None) -> int | None:
    if size is None:
        return None
    return bytes_of(size)


class CronSection(Section):
    """[cron]: the periodic jobs, and where the scheduler runs those that live on it."""

    skip: list[Word] = Field(default=[])
    """names of periodic jobs that are not run"""

    partition: Word | None = None
    """for periodic jobs; else one without GPUs"""

    account: Word | None = None
    """who pays for them"""

    constraint: Word | None = None
    """node feature asked for"""

    quality_of_service: Word | None = None
    """QoS"""

    hourly_time_limit: TimeLimit = "00:30:00"
    """of one round of the hourly jobs"""

    daily_time_limit: TimeLimit = "02:00:00"
    """of one round of the daily jobs"""

    daily_time: str = Field(default="04:00", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    """when the daily jobs run, in alerts.time_zone"""

    filesystem_hours: Hours = 24
    """between two looks at the file systems"""

    node_check_hours: Hours = 6
    """between two checks of nodes that are due"""


# ----------------------------------------------------------------------------- what is copied away
# The run card's sections that say what is copied away: logs to the hub, checkpoints to archives,
# and what may go.
# \w is all of Unicode, which costs 70 ms in each start of a command
REPOSITORY = r"^[A-Za-z0-9_.-]{1,96}/[A-Za-z0-9_.-]{1,96}$"
Step = Annotated[int, Field(gt=0, le=10**9)]
Every = Annotated[int, Field(ge=0, le=10**9)]  # so many steps; 0: none
_KINDS_OF_TOKEN = ("anon", "google_default", "cloud")  # not one itself


class HubSection(Section):
    """[hub]: the hub repository that logs and TensorBoard events are mirrored to, and the one for
    the model.
    """

    repository: str | None = Field(default=None, pattern=REPOSITORY)
    """OWNER/NAME; default: nothing is mirrored"""

    patterns: list[str] = Field(default=["tensorboard/*/*tfevents*", "logs/*/*.txt"], min_length=1)
    """files below NAME-logs"""

    interval_minutes: int = Field(default=60, gt=0, le=10_080)
    """between two synchronisations"""

    credentials_file: str | None = None
    """JSON with the bot's user, mail and token"""

    endpoint: str | None = Field(
        default=None, pattern=r"^https?://[^\s@/?#]+(/[^\s@?#]*)?$", repr=False
    )
    """a hub of one's own; no credentials"""

    private: bool = True
    """of a repository that is made: only members see it"""

    publish_status: bool = True
    """status.json goes along, without node and user names: tr11 status --remote reads it"""

    model_repository: str | None = Field(default=None, pattern=REPOSITORY)
    """OWNER/NAME that tr11 upload publishes models to"""

    license: str | None = Field(default=None, pattern=r"^[a-z0-9.-]{1,64}$")
    """on the model's card"""

    languages: list[Annotated[str, Field(pattern=r"^[a-z]{2,8}$")]] = Field(default=[])
    """on the model's card: en, fr, ..."""


class BackupSection(Section):
    """[backup]: which checkpoints are kept, and where their copies go."""

    store: str | None = None
    """folder of the archive file system"""

    url: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9+.-]*://[^\s@?#]+$", repr=False)
    """bucket, e.g. gs://NAME/PATH; no credentials"""

    options: dict[str, str | int | float | bool] = Field(default={}, repr=False)
    """how fsspec opens the url, e.g. {endpoint_url = "http://host:4443"}; no secrets"""

    credentials_file: str | None = None
    """of the url, e.g. a service account's JSON; default: what the library finds itself"""

    keep_latest: int = Field(default=15, ge=2, le=100_000)
    """newest checkpoints never deleted"""

    store_interval: Every = 1000
    """steps copied whole to the store: its multiples; 0 = none"""

    store_format: Literal["files", "tar"] = "files"
    """tar: one file for a checkpoint, where inodes are scarce"""

    full_interval: Every = 10_000
    """steps copied whole to the url: its multiples; 0 = none"""

    full_steps: list[Step] = Field(default=[])
    """more steps that are copied whole to the url"""

    weights_interval: Every = 3000
    """steps whose weights go to the url unless whole there; 0 = none"""

    spike_steps: list[Step] = Field(default=[])
    """steps around spikes whose weights go to the url's checkpoints-spikes-weights"""

    milestone_percent: float = Field(default=10, ge=0, le=100)
    """one whole checkpoint is kept for each such share of the training; 0 = none"""

    data: bool = False
    """data sets and tokenizer of the card are copied too, and verified like checkpoints"""

    logs: bool = True
    """logs and TensorBoard events are copied too"""

    interval_hours: Hours = 24
    """between two rounds of the periodic job"""

    prune: bool = False
    """each round ends with tr11 checkpoints prune; false: a person does it"""

    parallel: int = Field(default=8, gt=0, le=256)
    """files on their way at once"""

    megabytes_per_second: float = Field(default=0, ge=0, le=10**6)
    """most that is sent, all files together; 0 = no limit"""

    reread_days: Days = 30
    """every byte of the archives is read again within this time"""

    confirm_hours: Hours = 48
    """a copy behind a network counts for prune if it was listed so lately"""

    partition: Word | None = None
    """of a round that is a job; default: [cron] partition"""

    account: Word | None = None
    """who pays for it; default: [cron] account"""

    constraint: Word | None = None
    """node feature asked for; default: [cron] constraint"""

    quality_of_service: Word | None = None
    """QoS; default: [cron] quality_of_service"""

    time_limit: TimeLimit = "20:00:00"
    """of a round that is a job"""

    @property
    def copies_checkpoints(self) -> bool:
        """Whether some step must be copied to an archive that the card has."""
        return bool(
            (self.store and self.store_interval)
            or (self.url and (self.full_interval or self.weights_interval))
        )

    @property
    def has_store(self) -> bool:
        return self.store is not None

    @property
    def has_url(self) -> bool:
        return self.url is not None

    @field_validator("options")
    @classmethod
    def _no_secrets(
        cls, options: dict[str, str | int | float | bool]
    ) -> dict[str, str | int | float | bool]:
        for name, value in options.items():
            is_shaped = isinstance(value, str) and has_secret(value)
            if value not in _KINDS_OF_TOKEN and (is_secret_name(name) or is_shaped):
                raise ValueError(
                    f"{name} may hold a secret, and cards are shared: use backup.credentials_file"
                )
            if isinstance(value, str) and "@" in value:
                raise ValueError(
                    f"{name} may hold a password, and cards are shared: use backup.credentials_file"
                )
        return options
