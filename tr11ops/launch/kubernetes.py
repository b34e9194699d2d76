"""A card as Kubernetes objects: an indexed Job whose pods are the nodes of one training. Pure.

Each pod runs `tr11 train` with the environment that names its node. What restarts what:

- A pod that ends with 2 (refused) or 3 (held: it would end the same way again) fails the whole Job at once.
- A pod that the cluster takes away (drain, preemption) does not count.
- Any other end counts against its index. All pods of an attempt end together, since a training needs every node, so an
  index that has used its retries up (`resilience.launches_per_attempt`) ends the Job: maxFailedIndexes is 0.
- `--until-finished`: a pod succeeds only when the training is finished or a person has stopped it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from tr11ops.launch.rehearse import card_text
from tr11ops.runcard.card import PATH_KEYS, RunCard
from tr11ops.runcard.exit_duration import seconds_to_end
from tr11ops.runcard.load import Key
from tr11ops.runcard.sections import CheckScript, KubernetesSection
from trainer.config.card import Problem
from trainer.contract.attempt import EXIT_HELD, EXIT_REFUSED
from trainer.contract.record import JsonObject

PORT = 29500
CARD_FOLDER = "/etc/tr11"
CARD_FILE = "card.toml"
HEAD = "Written by `tr11 launch --scheduler kubernetes`."  # of the card as the pods read it
LONGEST_NAME = 45  # a pod's host name is it, a dash and the index, 63 characters in all
LEAST_GRACE_SECONDS = 120
CONTAINER = "trainer"
_UNSEEN = frozenset({"credentials_file", "urls_file", "dead_man_url_file"})


def kubernetes_problems(card: RunCard) -> Iterator[Problem]:
    """Why a card cannot become a Job."""
    section = card.kubernetes
    if section is None:
        fix = 'add: image = "...", volume_claim = "...", mount = "/..." below [kubernetes]'
        yield Problem("kubernetes", None, "is missing", fix)
        return
    if card.trains_nothing:
        yield Problem(
            "rehearsal", None, "trains nothing, and runs on a twin alone", "use another card"
        )
    for key, path in _paths(card):
        if not PurePosixPath(path).is_relative_to(section.mount):
            rule = f"is not below kubernetes.mount ({section.mount}), so that no pod sees it"
            yield Problem(key, path, rule, "name it as the pods see it, in full")


def _words(key: Key) -> tuple[str, str]:
    return str(key[0]), str(key[1])


def _paths(card: RunCard) -> Iterator[tuple[str, str]]:
    """The files that a training reads or writes."""
    for section, key in sorted(set(map(_words, PATH_KEYS))):
        if section in {"backup", "hub", "alerts", "filesystems", "perms"} or key in _UNSEEN:
            continue  # of commands that are typed elsewhere
        value = getattr(getattr(card, section, None), key, None)
        for entry in value if isinstance(value, list) else [value]:
            path = entry.script if isinstance(entry, CheckScript) else entry
            if path:
                yield f"{section}.{key}", str(path)


def not_carried(card: RunCard) -> Iterator[str]:
    """What the card says and the Job does not: one line each."""
    if card.slurm.setup:
        yield "slurm.setup is for a job's shell: what it does belongs into the image"
    if card.slurm.spare_nodes:
        yield "slurm.spare_nodes: Kubernetes replaces a pod itself, the Job has no spares"
    if card.slurm.container is not None:
        yield "slurm.container is for Slurm: the Job uses kubernetes.image"
    if card.slurm.options:
        yield "slurm.options are for sbatch: the Job has none of them"


def job_name(card: RunCard) -> str:
    """The Job's and the Service's name: run and variant, as a DNS label."""
    if card.run.variant == "main":
        text = card.run.name
    else:
        text = f"{card.run.name}-{card.run.variant}"
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if plain == text and len(plain) <= LONGEST_NAME and plain[0].isalpha():
        return plain
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]  # two runs never share a name
    return f"{f'run-{plain}'[: LONGEST_NAME - 7].strip('-')}-{digest}"


def manifest(card: RunCard, section: KubernetesSection) -> list[JsonObject]:
    """The objects, in the order in which they are made: the card, the Service that names the pods,
    the Job.
    """
    name = job_name(card)
    labels = {"app.kubernetes.io/name": "tr11", "app.kubernetes.io/instance": name}
    meta = {"name": name, "namespace": section.namespace, "labels": labels}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta,
            "data": {CARD_FILE: card_text(card, HEAD)},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {
                "clusterIP": "None",
                # pods find each other before any of them is ready
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": name},
                "ports": [{"name": "meeting", "port": PORT}],
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": meta,
            "spec": _job(card, section, name, labels),
        },
    ]


def _job(
    card: RunCard, section: KubernetesSection, name: str, labels: Mapping[str, str]
) -> JsonObject:
    rules = [
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": CONTAINER,
                "operator": "In",
                "values": [EXIT_REFUSED, EXIT_HELD],
            },
        },
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "completionMode": "Indexed",
        "completions": card.slurm.nodes,
        "parallelism": card.slurm.nodes,
        "backoffLimitPerIndex": card.resilience.launches_per_attempt,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",  # a new pod of an index only when the old one is gone
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": dict(labels)}, "spec": _pod(card, section, name)},
    }


def _pod(card: RunCard, section: KubernetesSection, name: str) -> JsonObject:
    slurm = card.slurm
    # The index, which is the node's rank, is in JOB_COMPLETION_INDEX: the Job controller sets it.
    variables = {
        "MASTER_ADDR": f"{name}-0.{name}",
        "MASTER_PORT": str(PORT),
        "NNODES": str(slurm.nodes),
    }
    resources: JsonObject = {"requests": {"cpu": str(slurm.cpus_per_task)}}
    if slurm.gpus_per_node:
        resources["limits"] = {section.gpu_resource: str(slurm.gpus_per_node)}
    container = {
        "name": CONTAINER,
        "image": section.image,
        "command": [
            "tr11",
            "train",
            "--run",
            f"{CARD_FOLDER}/{CARD_FILE}",
            "--wait",
            "30m",
            "--until-finished",
        ],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": resources,
        "volumeMounts": [
            {"name": "run", "mountPath": section.mount},
            {"name": "card", "mountPath": CARD_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": grace_seconds(card),
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": section.volume_claim}},
            {"name": "card", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def grace_seconds(card: RunCard) -> int:
    """Between SIGTERM and SIGKILL: a step, an evaluation and a save with time to spare, then the
    end of all workers.
    """
    early = card.slurm.signal_seconds_before_limit or 0
    return math.ceil(
        max(LEAST_GRACE_SECONDS, early, seconds_to_end(card)) + card.resilience.end_within_seconds
    )
