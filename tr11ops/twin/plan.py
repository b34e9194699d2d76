"""What a twin is: its shape, its folders, and the configuration texts that follow. Pure; nothing is
touched here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from tr11ops.base.errors import TwinError
from trainer.contract.documents import document
from trainer.contract.record import JsonObject, Record

UNIX_SOCKET_PATH_LIMIT = 107  # bytes of sun_path in sockaddr_un, less the closing zero
_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,30}[a-z0-9])?")
_SETTING = re.compile(r"[A-Za-z]\w{1,60}=[^\s#][^\r\n#]{0,500}")
# keys of slurm.conf by which a twin is what it is, and is found again
_OWN_KEYS = frozenset(
    {
        "clustername",
        "slurmctldhost",
        "slurmctldport",
        "slurmuser",
        "slurmduser",
        "authtype",
        "authinfo",
        "credtype",
        "communicationparameters",
        "statesavelocation",
        "slurmdspooldir",
        "slurmctldpidfile",
        "slurmdpidfile",
        "slurmctldlogfile",
        "slurmdlogfile",
        "slurmdparameters",
        "nodename",
        "partitionname",
        "grestypes",
        "jobcomptype",
        "jobcomploc",
        "include",
    }
)
_NODE_PREFIX = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z-])?")


class TwinPlan(Record):
    """The shape of a twin: `nodes` GPU nodes in one partition, `cpu_nodes` without GPUs in another.

    Two plans that are equal give interchangeable twins. Raises TwinError when a value cannot work.
    """

    name: str = "default"
    nodes: int = 52
    gpus: int = 8  # per GPU node
    cpu_nodes: int = 1
    # per node, as announced to the scheduler; the machine's real count does not matter
    cpus: int = 64
    memory_megabytes: int = 500_000  # per node, as announced
    node_prefix: str = "jean-zay-iam"
    cpu_node_prefix: str = "jean-zay-pp"
    partition: str = "gpu_p5"
    cpu_partition: str = "compil"
    max_time_minutes: int = 100 * 60
    cpu_max_time_minutes: int = 20 * 60
    accounting: bool = False
    hub: bool = False
    store: bool = False
    slurmd_timeout_seconds: int = 60
    minimum_job_age_seconds: int = 300
    kill_wait_seconds: int = 5
    unkillable_step_timeout_seconds: int = 60
    message_timeout_seconds: int = 10
    # `Key=Value` of slurm.conf, in place of the twin's own or beside it: how a site differs
    slurm_settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise TwinError(
                f"twin name {self.name!r}: use 1 to 32 of a-z, 0-9, '-' and '_', such as 'default'"
            )
        for key in ("node_prefix", "cpu_node_prefix"):
            if not _NODE_PREFIX.fullmatch(getattr(self, key)):
                raise TwinError(
                    f"{key} {getattr(self, key)!r}: use letters, digits and '-', not ending in a digit"
                )
        if self.node_prefix == self.cpu_node_prefix:
            raise TwinError(
                f"node_prefix and cpu_node_prefix are both {self.node_prefix!r}: give them different names"
            )
        for key in ("partition", "cpu_partition"):
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", getattr(self, key)):
                raise TwinError(f"{key} {getattr(self, key)!r}: use letters, digits, '-' and '_'")
        if self.partition == self.cpu_partition:
            raise TwinError(
                f"partition and cpu_partition are both {self.partition!r}: give them different names"
            )
        for setting in self.slurm_settings:
            if not _SETTING.fullmatch(setting):
                raise TwinError(
                    f"setting {setting!r}: write it as in slurm.conf, such as PrivateData=jobs"
                )
            key = setting.partition("=")[0]
            if key.lower() in _OWN_KEYS:
                raise TwinError(f"setting {setting!r}: a twin has its own {key}; leave it out")
        for key, low, high in (
            ("nodes", 1, 999),
            ("gpus", 0, 64),
            ("cpu_nodes", 0, 99),
            ("cpus", 1, 1024),
            ("memory_megabytes", 1, 10**8),
            ("max_time_minutes", 1, 10**6),
            ("cpu_max_time_minutes", 1, 10**6),
            ("slurmd_timeout_seconds", 5, 65_533),
            ("minimum_job_age_seconds", 2, 65_533),
            ("kill_wait_seconds", 1, 65_533),
            ("unkillable_step_timeout_seconds", 1, 65_533),
            ("message_timeout_seconds", 2, 100),
        ):
            if not low <= getattr(self, key) <= high:
                raise TwinError(
                    f"{key} is {getattr(self, key)}: it must lie between {low} and {high}"
                )

    @property
    def gpu_node_names(self) -> tuple[str, ...]:
        """Names of the GPU nodes, in order, such as jean-zay-iam01."""
        return _names(self.node_prefix, self.nodes)

    @property
    def cpu_node_names(self) -> tuple[str, ...]:
        """Names of the nodes without GPUs, in order."""
        return _names(self.cpu_node_prefix, self.cpu_nodes)

    @property
    def node_names(self) -> tuple[str, ...]:
        """All nodes, GPU nodes first."""
        return self.gpu_node_names + self.cpu_node_names

    @property
    def cluster(self) -> str:
        """Slurm's name of it."""
        return f"twin_{self.name.replace('-', '_')}"

    @property
    def ports_needed(self) -> int:
        """One for the controller, one for each node, one for each of accounting daemon, hub and
        object store.
        """
        return 1 + len(self.node_names) + int(self.accounting) + int(self.hub) + int(self.store)

    @property
    def memory_needed_megabytes(self) -> int:
        """Twice what the daemons take without any job: 6 MB a node (measured), the controller, the
        database.
        """
        return 2 * (6 * len(self.node_names) + 50 + (250 if self.accounting else 0))

    def to_json(self) -> JsonObject:
        """As plain values, for the twin's record."""
        return document(self)

    @classmethod
    def from_json(cls, value: JsonObject) -> TwinPlan:
        """The inverse of `to_json`. Raises TwinError for a record that another version wrote."""
        unknown = set(value) - set(cls.__struct_fields__)
        if unknown:
            raise TwinError(
                f"the twin's record has keys that this tr11 does not know: {sorted(unknown)}"
            )
        settings = tuple(value.get("slurm_settings") or ())
        return cls(**{**value, "slurm_settings": settings})


def _names(prefix: str, count: int) -> tuple[str, ...]:
    width = max(2, len(str(count)))
    return tuple(f"{prefix}{number:0{width}d}" for number in range(1, count + 1))


def _bracketed(prefix: str, count: int) -> str:
    names = _names(prefix, count)
    if count == 1:
        return names[0]
    return f"{prefix}[{names[0][len(prefix) :]}-{names[-1][len(prefix) :]}]"


class TwinFolders(Record):
    """Where everything of one twin lies. All of it is below `root`, which `down` removes."""

    root: Path

    @property
    def slurm_conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.root / "slurmdbd.conf"

    @property
    def record(self) -> Path:
        """The plan, the ports and the twin's own mark: written before anything starts."""
        return self.root / "twin.json"

    @property
    def processes(self) -> Path:
        """One JSON line for each daemon started: role, pid, start time."""
        return self.root / "processes.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def job_completions(self) -> Path:
        """The text file of jobcomp/filetxt: one line for each job that ended."""
        return self.root / "logs" / "jobcomp.txt"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def munge(self) -> Path:
        return self.root / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.root / "munge" / "socket"

    @property
    def gpus(self) -> Path:
        """Links to /dev/null which stand for the devices of every node."""
        return self.root / "gpus"

    @property
    def database(self) -> Path:
        return self.root / "database"

    @property
    def database_socket(self) -> Path:
        return self.root / "database" / "socket"

    def check(self, plan: TwinPlan) -> None:
        """Raises TwinError when Slurm's sockets below `root` would have longer paths than a socket
        address holds.
        """
        name = max(plan.node_names, key=len)
        # slurmstepd listens on SPOOL/NODE/NODE_JOB.STEP, both numbers up to ten digits
        longest = self.spool / name / f"{name}_{2**32 - 1}.{2**32 - 1}"
        excess = len(bytes(longest)) - UNIX_SOCKET_PATH_LIMIT
        if excess > 0:
            raise TwinError(
                f"the folder {self.root} is {excess} characters too long for Slurm's socket paths: "
                "name a shorter one with --dir"
            )
        if re.search(r"[\s#%,='\"\\\[\]]", str(self.root)):
            raise TwinError(
                f"the folder {self.root} has characters that slurm.conf cannot hold: choose another --dir"
            )


class TwinPorts(Record):
    """The TCP ports of a twin of this shape: consecutive, from `first`."""

    plan: TwinPlan
    first: int

    @property
    def controller(self) -> int:
        return self.first

    def node(self, index: int) -> int:
        """Port of the node at `index` in `TwinPlan.node_names`."""
        return self.first + 1 + index

    @property
    def accounting(self) -> int:
        """Port of slurmdbd."""
        return self.node(len(self.plan.node_names))

    @property
    def hub(self) -> int:
        return self.accounting + int(self.plan.accounting)

    @property
    def store(self) -> int:
        """Port of the object store."""
        return self.hub + int(self.plan.hub)


class TwinSite(Record):
    """One twin: its shape, its folders and ports, and the mark of its processes."""

    plan: TwinPlan
    folders: TwinFolders
    ports: TwinPorts
    mark: str


def twin_record(site: TwinSite) -> JsonObject:
    """What is written beside slurm.conf: by it the twin is found again, and known as one
    (`cluster.rehearsal`).
    """
    return {
        "plan": site.plan.to_json(),
        "first_port": site.ports.first,
        "mark": site.mark,
        "cluster": site.plan.cluster,
        "nodes": list(site.plan.node_names),
    }


def slurm_conf(
    site: TwinSite, user: str, slurm_version: tuple[int, int], without: Collection[str] = ()
) -> str:
    """The text of slurm.conf, run as `user`; `slurm_version` is such as (22, 5). `without`: GPU
    nodes to leave out.
    """
    plan = site.plan
    folders = site.folders
    ports = site.ports
    lines = [
        f"ClusterName={plan.cluster}",
        "SlurmctldHost=localhost(127.0.0.1)",
        f"SlurmctldPort={ports.controller}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folders.munge_socket}",
        "CredType=cred/munge",
        # daemons listen on the loopback interface alone
        "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
        f"StateSaveLocation={folders.state}",
        f"SlurmdSpoolDir={folders.spool}/%n",
        f"SlurmctldPidFile={folders.run}/slurmctld.pid",
        f"SlurmdPidFile={folders.run}/%n.pid",
        f"SlurmctldLogFile={folders.logs}/slurmctld.log",
        f"SlurmdLogFile={folders.logs}/%n.log",
        "SlurmdParameters=config_overrides",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "GresTypes=gpu",
        "ReturnToService=2",
        f"SlurmdTimeout={plan.slurmd_timeout_seconds}",
        f"MinJobAge={plan.minimum_job_age_seconds}",
        f"KillWait={plan.kill_wait_seconds}",
        f"UnkillableStepTimeout={plan.unkillable_step_timeout_seconds}",
        f"MessageTimeout={plan.message_timeout_seconds}",
        "InactiveLimit=0",
        "MailProg=/bin/true",
        "EnforcePartLimits=ALL",
        "MaxArraySize=10001",
        "MaxJobCount=20000",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=5,bf_continue",
        "PriorityType=priority/basic",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={folders.job_completions}",
    ]
    if slurm_version >= (23, 11):  # from there on switch/none is the absence of the key
        lines.remove("SwitchType=switch/none")
    if plan.accounting:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=127.0.0.1",
            f"AccountingStoragePort={ports.accounting}",
            f"AccountingStoragePass={folders.munge_socket}",
            "AccountingStorageEnforce=safe",  # limits hold, as at a site that grants hours
            "JobAcctGatherType=jobacct_gather/linux",
        ]
    else:
        lines += [
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
        ]
    lines = _with_settings(lines, plan.slurm_settings)
    node = f"NodeHostname=localhost NodeAddr=127.0.0.1 CPUs={plan.cpus} RealMemory={plan.memory_megabytes}"
    gres = ""
    if plan.gpus:
        gres = f" Gres=gpu:{plan.gpus}"
    gpu_nodes = _bracketed(plan.node_prefix, plan.nodes)
    if without:
        left = [
            (index, name) for index, name in enumerate(plan.gpu_node_names) if name not in without
        ]
        lines += [f"NodeName={name} Port={ports.node(index)}{gres} {node}" for index, name in left]
        gpu_nodes = ",".join(name for _, name in left)
    else:
        lines.append(
            f"NodeName={gpu_nodes} Port={_port_range(ports.node(0), plan.nodes)}{gres} {node}"
        )
    lines.append(
        f"PartitionName={plan.partition} Nodes={gpu_nodes} Default=YES State=UP "
        f"MaxTime={plan.max_time_minutes} DefaultTime={min(60, plan.max_time_minutes)}"
    )
    if plan.cpu_nodes:
        cpu_nodes = _bracketed(plan.cpu_node_prefix, plan.cpu_nodes)
        lines.append(
            f"NodeName={cpu_nodes} Port={_port_range(ports.node(plan.nodes), plan.cpu_nodes)} {node}"
        )
        lines.append(
            f"PartitionName={plan.cpu_partition} Nodes={cpu_nodes} State=UP "
            f"MaxTime={plan.cpu_max_time_minutes} DefaultTime={min(60, plan.cpu_max_time_minutes)}"
        )
    return "\n".join(lines) + "\n"


def _with_settings(lines: Sequence[str], settings: Sequence[str]) -> list[str]:
    """The lines of slurm.conf with these in place of those of the same keys, or behind them."""
    keys = {setting.partition("=")[0].lower() for setting in settings}
    kept = [line for line in lines if line.partition("=")[0].lower() not in keys]
    return [*kept, *settings]


def _port_range(first: int, count: int) -> str:
    if count == 1:
        return str(first)
    return f"[{first}-{first + count - 1}]"


def gres_conf(site: TwinSite) -> str:
    """The text of gres.conf: each GPU is a link to /dev/null.

    Slurm refuses a bare count of GPUs, and sets CUDA_VISIBLE_DEVICES only for character devices.
    """
    plan = site.plan
    folders = site.folders
    lines = ["AutoDetect=off"]
    if plan.gpus:
        if plan.gpus == 1:
            files = f"{folders.gpus}/gpu0"
        else:
            files = f"{folders.gpus}/gpu[0-{plan.gpus - 1}]"
        lines.append(f"NodeName={_bracketed(plan.node_prefix, plan.nodes)} Name=gpu File={files}")
    return "\n".join(lines) + "\n"


def cgroup_conf(slurm_version: tuple[int, int]) -> str:
    """The text of cgroup.conf: Slurm from 23.11 on would otherwise look for a cgroup tree of its
    own.
    """
    if slurm_version >= (23, 11):
        return "CgroupPlugin=disabled\n"
    return "CgroupAutomount=no\n"


def slurmdbd_conf(site: TwinSite, user: str) -> str:
    """The text of slurmdbd.conf; the database is reached through its socket (environment
    MYSQL_UNIX_PORT).
    """
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={site.folders.munge_socket}",
        "DbdHost=localhost",
        "DbdAddr=127.0.0.1",
        f"DbdPort={site.ports.accounting}",
        f"SlurmUser={user}",
        f"LogFile={site.folders.logs}/slurmdbd.log",
        f"PidFile={site.folders.run}/slurmdbd.pid",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        "StorageUser=root",
        "StorageLoc=slurm_accounting",
        "CommitDelay=1",
    ]
    return "\n".join(lines) + "\n"
