"""`tr11 launch --scheduler kubernetes`: what it prints, and what it refuses."""

from __future__ import annotations

import yaml

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.launch.kubernetes_schema import KINDS, invalid, section


def test_launch_prints_the_objects_and_makes_nothing(bench: LocalBench) -> None:
    settings = [word for setting in section(bench.folder) for word in ("--set", setting)]
    launch = ("launch", "--scheduler", "kubernetes", "--run", str(bench.card), *settings)
    answer = bench.tr11(*launch, "--dry-run")
    assert answer.code == 0 and answer.err == ""
    assert [(one["kind"], invalid(one)) for one in yaml.safe_load_all(answer.out)] == [
        (kind, []) for kind in KINDS
    ]
    as_json = bench.tr11(*launch, "--dry-run", "--json").json
    assert as_json["objects"] == list(yaml.safe_load_all(answer.out)) and as_json["name"] == "small"
    assert not (bench.folder / "run").exists()
    refused = bench.tr11(*launch)
    assert (
        refused.code == 2 and "add --dry-run and pipe it into `kubectl apply -f -`" in refused.err
    )
    refused = bench.tr11(*launch, "--dry-run", "--array", "1-3")
    assert (
        refused.code == 2
        and "--array: a Kubernetes Job starts its pods again by itself" in refused.err
    )
    bare = bench.tr11("launch", "--scheduler", "kubernetes", "--run", str(bench.card), "--dry-run")
    assert bare.code == 2 and "kubernetes: is missing; add: image" in bare.err
