"""A card for containers: what stands on srun's line, what a launch says of an image that cannot run, and
its objects for Kubernetes, with the environment that `tr11 train` reads."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.launch.kubernetes_schema import KINDS, invalid, section
from tests.tr11ops.launch.preflight_bench import Bench
from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.agent.rendezvous import Rendezvous, read_rendezvous
from tr11ops.agent.step import WorkerLaunch, srun_command
from tr11ops.base.observed import Unknown
from tr11ops.launch.container import ContainerFacts
from tr11ops.launch.facts import LaunchRequest
from tr11ops.launch.kubernetes import (
    grace_seconds,
    job_name,
    kubernetes_problems,
    manifest,
    not_carried,
)
from tr11ops.launch.plan import plan_launch
from tr11ops.runcard.card import CardError, RunCard, load_card
from tr11ops.runcard.sections import ContainerSection
from tr11ops.rundir.paths import RunDirectory


def launch(section: dict[str, Any] | None, **changes: Any) -> WorkerLaunch:
    container = None if section is None else ContainerSection(**section)
    return WorkerLaunch(
        1, Path("/run/state/attempts/7"), Path("/run/card.json"), "7", ("x1", "x2"), 8, "10.0.0.1", 6000, container,
        **changes,
    )  # fmt: skip


def before_agent(command: list[str]) -> list[str]:
    """What stands between srun's own options and the node agent's module."""
    return command[command.index("x1,x2") + 1 : command.index("-m")]


PYXIS = {
    "image": "nvcr.io#nvidia/pytorch:25.01",
    "runtime": "pyxis",
    "mounts": ["/scratch", "/data:/corpus:ro"],
}
APPTAINER = {
    "image": "/images/tr11.sif",
    "runtime": "apptainer",
    "mounts": ["/scratch"],
    "python": "/opt/bin/python3",
}


def test_the_agent_runs_in_the_image() -> None:
    assert before_agent(srun_command(launch(PYXIS))) == [
        "--container-image=nvcr.io#nvidia/pytorch:25.01", "--container-mounts=/scratch:/scratch,/data:/corpus:ro",
        "--no-container-entrypoint", "python3",
    ]  # fmt: skip
    assert before_agent(srun_command(launch(APPTAINER, uses_gpus=True))) == [
        "apptainer", "exec", "--nv", "--bind", "/scratch", "/images/tr11.sif", "/opt/bin/python3",
    ]  # fmt: skip
    assert "--nv" not in srun_command(launch(APPTAINER))


def test_without_it_the_line_is_what_it_was() -> None:
    bare, inside = srun_command(launch(None)), srun_command(launch(PYXIS))
    assert before_agent(bare) == [sys.executable]
    assert not [word for word in bare if "container" in word]
    # what ends the step is the same
    assert bare[: bare.index("x1,x2")] == inside[: inside.index("x1,x2")]


def test_the_line_starts_what_it_says(tmp_path: Path) -> None:
    """With a stand-in for Apptainer that runs the command outside any image: order, quoting and
    exit code.
    """
    runtime = tmp_path / "apptainer"
    runtime.write_text(
        '#!/bin/sh\nwhile [ "$1" != /images/tr11.sif ]; do shift; done\nshift\nexec "$@"\n'
    )
    runtime.chmod(0o755)
    command = srun_command(launch({**APPTAINER, "python": "python3"}))
    inner = command[command.index("apptainer") : command.index("tr11ops.agent.node") - 1]
    line = f"{shlex.join(inner)} -c 'import sys; print(sys.argv[1:]); sys.exit(7)' 'a b'"
    assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (7, "['a b']\n")


def card_with(folder: Path, *overrides: str) -> RunCard:
    return load_card(write_card(folder), overrides, {})


def test_the_batch_script_is_the_same_with_and_without(tmp_path: Path) -> None:
    """It stays outside, with its signals."""
    settings = ("slurm.container.image=/i.sif", "slurm.container.runtime=apptainer")
    scripts = []
    for card in (card_with(tmp_path), card_with(tmp_path, *settings)):
        directory = RunDirectory(card.paths, card.kill_switch)
        scripts.append(
            plan_launch(
                card, directory, LaunchRequest(), (), "20260101-000000-00000000"
            ).request.script
        )
    assert scripts[0] == scripts[1]


@pytest.mark.parametrize(
    "setting",
    ["slurm.container.image=a b", "slurm.container.image=$(x)", 'slurm.container.mounts=["relative"]',
     'slurm.container.mounts=["/a:b"]', "slurm.container.runtime=docker"],
)  # fmt: skip
def test_what_no_runtime_takes_is_refused(tmp_path: Path, setting: str) -> None:
    good = ("slurm.container.image=/i.sif", "slurm.container.runtime=apptainer")
    with pytest.raises(CardError):
        card_with(tmp_path, *good, setting)


def test_a_launch_says_what_the_image_lacks(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    image = tmp_path / "tr11.sif"
    image.touch()
    bench.overrides = [
        f"slurm.container.image={image}", "slurm.container.runtime=apptainer", f'slurm.container.mounts=["{tmp_path}"]',
    ]  # fmt: skip
    seen = ContainerFacts(True, True)
    bench.changes = {"scheduler": "slurm", "container": seen}
    assert (
        bench.faults() == [] and f"container: {image} is there; apptainer, 1 mount" in bench.text()
    )
    bench.changes["container"] = ContainerFacts(None, True)
    assert "is an address, which the nodes must reach" in bench.text()
    bench.changes["container"] = ContainerFacts(True, False)
    assert (
        bench.code() == 0
        and "here apptainer is not found; a node without it ends every launch" in bench.text()
    )
    bench.changes["container"] = ContainerFacts(True, Unknown("no answer"))
    assert bench.code() == 0 and "apptainer could not be looked for (no answer)" in bench.text()
    bench.changes["container"] = ContainerFacts(False, True, ("/gone",))
    assert (
        bench.code() == 1
        and f"{image} is not there; build it" in bench.text()
        and "/gone is not there" in bench.text()
    )
    bench.changes = {"scheduler": "local"}
    assert (
        bench.code() == 2 and "runs the workers of Slurm's jobs, and this is none" in bench.text()
    )
    bench.overrides[2] = 'slurm.container.mounts=["/data:/corpus"]'
    bench.changes = {"scheduler": "slurm", "container": seen}
    assert bench.code() == 2 and f'the workers could save nothing; add "{tmp_path}"' in bench.text()
    bench.overrides[0] = "slurm.container.image=tr11.sif"
    assert "tr11.sif is a file; name it in full" in bench.text()


def test_the_files_themselves_are_looked_at(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.overrides = [
        f"slurm.container.image={tmp_path}/none.sif", "slurm.container.runtime=apptainer",
        f'slurm.container.mounts=["{tmp_path}", "{tmp_path}/none:/x"]',
    ]  # fmt: skip
    facts = bench.facts().container
    assert facts is not None and (facts.image_is_there, facts.missing_mounts) == (
        False,
        (f"{tmp_path}/none",),
    )


def card_of(folder: Path, *overrides: str) -> RunCard:
    return load_card(write_card(folder), [*section(folder), *overrides], {})


def objects(card: RunCard) -> dict[str, dict[str, Any]]:
    assert card.kubernetes is not None
    return {one["kind"]: one for one in manifest(card, card.kubernetes)}


@pytest.mark.parametrize(
    "overrides",
    [(), ("slurm.gpus_per_node=8", "slurm.workers_per_node=8", "batch.global_batch_size=32")],
)
def test_all_objects_are_valid_by_the_published_schema(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    found = objects(card_of(tmp_path, *overrides))
    assert list(found) == ["ConfigMap", "Service", "Job"]
    assert {kind: invalid(value) for kind, value in found.items()} == {kind: [] for kind in KINDS}


def test_the_schema_refuses_what_is_wrong(tmp_path: Path) -> None:
    job = objects(card_of(tmp_path))["Job"]
    assert (
        "completionmode"
        in invalid({**job, "spec": {**job["spec"], "completionmode": "Indexed"}})[0]
    )
    assert "is not of type" in invalid({**job, "spec": {**job["spec"], "completions": "2"}})[0]


def test_each_pod_knows_its_node_and_where_node_0_is(tmp_path: Path) -> None:
    found = objects(card_of(tmp_path, "slurm.nodes=2"))
    job, service = found["Job"]["spec"], found["Service"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    rendezvous, said = read_rendezvous(
        None, None, None, {**environment, "JOB_COMPLETION_INDEX": "1"}, 7
    )
    assert (rendezvous, said) == (Rendezvous(2, 1, "small-0.small", 29500), ())
    # the first pod's DNS name: its host name (Job and index) below the headless Service that the
    # pods name
    assert (
        pod["subdomain"]
        == service["metadata"]["name"]
        == found["Job"]["metadata"]["name"]
        == "small"
    )
    assert (
        service["spec"]["clusterIP"] == "None"
        and service["spec"]["publishNotReadyAddresses"] is True
    )
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "small"}
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    mounts = {entry["name"]: entry["mountPath"] for entry in container["volumeMounts"]}
    assert mounts == {"run": str(tmp_path), "card": "/etc/tr11", "shared-memory": "/dev/shm"}
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {entry["metadata"]["namespace"] for entry in found.values()} == {"training"}
    gpus = objects(card_of(tmp_path, "slurm.gpus_per_node=1"))["Job"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert (
        gpus["resources"]["limits"] == {"nvidia.com/gpu": "1"}
        and "limits" not in container["resources"]
    )


def test_what_would_end_the_same_way_is_not_tried_again(tmp_path: Path) -> None:
    card = card_of(
        tmp_path, "resilience.launches_per_attempt=5", "slurm.signal_seconds_before_limit=400"
    )
    job = objects(card)["Job"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # a pod failure policy needs it
    first, second = job["podFailurePolicy"]["rules"]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [2, 3])
    assert (second["action"], second["onPodConditions"][0]["type"]) == (
        "Ignore",
        "DisruptionTarget",
    )
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"], job["podReplacementPolicy"]) == (
        5,
        0,
        "Failed",
    )
    assert "--until-finished" in job["template"]["spec"]["containers"][0]["command"]
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == grace_seconds(card) == 420


def test_the_card_in_the_pods_says_the_same(tmp_path: Path) -> None:
    text = r"a $PATH and a \ and 'quotes'"
    card = card_of(
        tmp_path, f"slurm.environment.WORDS={json.dumps(text.replace('$', '$$'))}", "run.seed=77"
    )
    path = tmp_path / "inside.toml"
    path.write_text(objects(card)["ConfigMap"]["data"]["card.toml"])
    inside = load_card(path, [], {}, directory=Path("/"))
    assert inside.slurm.environment["WORDS"] == text and inside.run.seed == 77
    assert inside.digest == card.digest


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "run.directory=/elsewhere/run",
            "run.directory = '/elsewhere/run': is not below kubernetes.mount",
        ),
        ("checkpoint.load=/old", "checkpoint.load = '/old': is not below kubernetes.mount"),
    ],
)
def test_a_path_that_no_pod_sees_is_refused(tmp_path: Path, override: str, fault: str) -> None:
    assert list(kubernetes_problems(card_of(tmp_path))) == []
    [problem] = kubernetes_problems(card_of(tmp_path, override))
    assert fault in str(problem)


def test_names_are_dns_labels_and_never_shared(tmp_path: Path) -> None:
    named = [
        card_of(tmp_path, f"run.name={name}")
        for name in ("small", "Small", "s.mall", "9lives", "x" * 90)
    ]
    names = [job_name(card) for card in named]
    assert names[0] == "small" and len(set(names)) == len(names)
    assert all(
        len(name) <= 45 and name.replace("-", "").isalnum() and name[0].isalpha() for name in names
    )
    assert job_name(card_of(tmp_path, "run.variant=emb-norm")) == "small-emb-norm"


def test_what_the_job_does_not_carry_is_said(tmp_path: Path) -> None:
    assert list(not_carried(card_of(tmp_path))) == []
    said = list(
        not_carried(card_of(tmp_path, "slurm.spare_nodes=1", 'slurm.setup=["module load x"]'))
    )
    assert [line.partition(":")[0].split()[0] for line in said] == [
        "slurm.setup",
        "slurm.spare_nodes",
    ]


def test_a_card_without_it_keeps_its_hash(tmp_path: Path) -> None:
    """The hash of a card is kept in every run that it made."""
    card = load_card(write_card(tmp_path), [], {})
    value = card.model_dump(mode="json")
    assert (value.pop("kubernetes"), value["slurm"].pop("container")) == (None, None)
    text = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    assert (
        card.digest == hashlib.blake2b(text, digest_size=16).hexdigest() != card_of(tmp_path).digest
    )
