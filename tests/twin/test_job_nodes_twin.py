"""The nodes of a job that is no run's, looked at from its batch script, on a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.waiting import end_of_file, until
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.twin.twin import Twin

TR11 = Path(sys.executable).parent / "tr11"
SCRIPT = f"""#!/bin/bash
ask="{TR11} nodes check --script ./fan.sh"
$ask --json > all.json; echo "all=$?"
GOOD=$($ask --need 2 --print good); echo "two=$?"
srun --nodes 2 --ntasks 2 --nodelist $GOOD bash -c 'echo ran:$SLURMD_NODENAME'
$ask --need 3 --print good; echo "three=$?"
srun --nodes 2 --ntasks 2 --exclude=$($ask --print bad) bash -c 'echo kept:$SLURMD_NODENAME'
"""


def test_a_foreign_job_goes_on_with_its_good_nodes(
    twin: Twin, slurm: SlurmScheduler, tmp_path: Path
) -> None:
    """Three nodes, one of which a script of the site's calls bad. No card, no run, nothing left."""
    first, bad, last = twin.plan.gpu_node_names[:3]
    own = tmp_path / "fan.sh"
    own.write_text(f'#!/bin/bash\n[ "$SLURMD_NODENAME" != {bad} ] || {{ echo "fan 3"; exit 1; }}\n')
    own.chmod(0o755)
    out = _run(twin, slurm, tmp_path, SCRIPT, 3)
    said = end_of_file(out)
    found = json.loads((tmp_path / "all.json").read_text())
    assert (found["good"], found["bad"], found["unknown"]) == ([first, last], [bad], []), said
    assert found["gpus_per_node"] == 8 and "all=1" in said and "two=0" in said and "three=1" in said
    gpus = [one for one in found["nodes"][0]["checks"] if one["name"] == "gpu-count"]
    assert [one["result"] for one in gpus] == ["unknown"], "no node of a twin has nvidia-smi"
    for word in ("ran", "kept"):
        assert sorted(line for line in said.splitlines() if line.startswith(f"{word}:")) == [
            f"{word}:{first}",
            f"{word}:{last}",
        ], said
    assert f"{bad}: bad: script:fan.sh: fan 3" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.json", "fan.sh", out.name]
    assert all(node.is_usable for node in slurm.nodes()), "nothing was drained"


def test_a_node_that_does_not_answer_is_unknown(
    twin: Twin, slurm: SlurmScheduler, tmp_path: Path
) -> None:
    """What hangs on one node alone is no proof against it."""
    first, silent = twin.plan.gpu_node_names[:2]
    own = tmp_path / "fan.sh"
    own.write_text(f'#!/bin/bash\n[ "$SLURMD_NODENAME" != {silent} ] || exec sleep 600\n')
    own.chmod(0o755)
    script = f"#!/bin/bash\n{TR11} nodes check --script ./fan.sh --timeout 4 --json > all.json\necho code=$?\n"
    out = _run(twin, slurm, tmp_path, script, 2)
    found = json.loads((tmp_path / "all.json").read_text())
    assert (found["good"], found["bad"], found["unknown"]) == ([first], [], [silent])
    assert "code=3" in end_of_file(out)


def _run(twin: Twin, slurm: SlurmScheduler, folder: Path, script: str, nodes: int) -> Path:
    """Run a batch script on the first nodes; returns its log."""
    number = slurm.submit(
        BatchRequest(
            script, "foreign", nodes, 900, str(folder / "foreign.out"), folder,
            gpus_per_node=8, partition=twin.plan.partition,
            exclude=twin.plan.gpu_node_names[nodes:],
        )
    )  # fmt: skip

    def is_over() -> bool:
        job = slurm.job(number)
        return job is not None and job.state.is_final

    until(is_over, context=lambda: end_of_file(folder / "foreign.out"))
    return folder / "foreign.out"
