"""A secret for the workers: the card and the script name the variable, the job reads it, no file
holds its value.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tr11ops.cluster.base import BatchRequest
from tr11ops.launch.plan import render_script, resolved_card
from tr11ops.runcard.card import CardError, load_card
from tr11ops.runcard.load import unset_here, values_here

SMALL = Path(__file__).parents[2] / "data" / "small-card.toml"
SECRET = "hunter2" + "-Tr0ub4dor"
SHAPED = "hf_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3x"
FORMS = [
    ("PGPASSWORD", "$PGPASSWORD", {"PGPASSWORD": SECRET}, "PGPASSWORD"),
    ("PGPASSWORD", "${WORD}", {"WORD": SECRET}, "WORD"),  # by the name that the workers see
    ("WORD", "$DB_PASS", {"DB_PASS": SECRET}, "DB_PASS"),  # by the name that it is read from
    ("WORD", "$PLAIN", {"PLAIN": SHAPED}, "PLAIN"),  # by its form
]


@pytest.mark.parametrize(("name", "value", "held", "variable"), FORMS)
def test_a_secret_stays_a_reference(
    name: str, value: str, held: dict[str, str], variable: str
) -> None:
    card = load_card(SMALL, [f"slurm.environment.{name}={value}"], held)
    assert card.slurm.environment[name] == f"${{{variable}}}"
    text = json.dumps(resolved_card(card))
    assert SECRET not in text and SHAPED not in text
    assert values_here(card.slurm.environment, held)[name] == held[variable]
    assert name not in values_here(card.slurm.environment, {})
    assert unset_here(card.slurm.environment, {}) == (f"{name} from ${variable}",)
    assert unset_here(card.slurm.environment, held) == ()


def test_one_that_is_not_set_here_is_no_fault_of_the_card() -> None:
    card = load_card(SMALL, ["slurm.environment.PGPASSWORD=$DB_PASS"], {})
    assert card.slurm.environment["PGPASSWORD"] == "${DB_PASS}"


def test_what_is_none_is_put_in_as_ever() -> None:
    held = {"CACHE": "/scratch/me", "HF_TOKEN_PATH": "/home/me/token"}
    changes = [
        "slurm.environment.HF_HOME=$CACHE/hf",
        "slurm.environment.HF_TOKEN_PATH=$HF_TOKEN_PATH",
    ]
    card = load_card(SMALL, changes, held)
    assert card.slurm.environment["HF_HOME"] == "/scratch/me/hf"
    assert card.slurm.environment["HF_TOKEN_PATH"] == "/home/me/token"


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        (
            "slurm.environment.URL=db://me:$DB_PASS@host/",
            'write URL = "$DB_PASS" and no more, which is read in the job',
        ),
        ("slurm.comment=$DB_PASS", "keep it in a file of its own that others cannot read"),
        ("run.directory=/scratch/$DB_PASS", "keep it in a file of its own that others cannot read"),
    ],
)
def test_a_secret_in_any_other_place_is_refused(change: str, fix: str) -> None:
    with pytest.raises(CardError) as caught:
        load_card(SMALL, [change], {"DB_PASS": SECRET})
    assert "$DB_PASS is a secret" in str(caught.value) and fix in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("is_set", [True, False])
def test_the_script_reads_it_in_the_job(tmp_path: Path, is_set: bool) -> None:
    card = load_card(
        SMALL, ["slurm.environment.PGPASSWORD=$DB_PASS", "slurm.environment.PRICE=5$$"], {}
    )
    request = BatchRequest(
        script="",
        name="run",
        nodes=1,
        time_limit_seconds=60,
        output="%x-%j.out",
        working_directory=tmp_path,
    )
    script = render_script(
        request,
        variant="main",
        tag="t",
        command=["sh", "-c", 'echo "PRICE=$PRICE" "PGPASSWORD=${PGPASSWORD-none}"'],
        setup=[],
        environment=card.slurm.environment,
    )
    assert SECRET not in script
    place = tmp_path / "script"
    place.write_text(script)
    held = {"PATH": "/usr/bin:/bin", **({"DB_PASS": SECRET} if is_set else {})}
    done = subprocess.run(
        ["bash", str(place)], cwd=tmp_path, capture_output=True, text=True, check=False, env=held
    )
    assert f"PRICE=5$ PGPASSWORD={SECRET if is_set else 'none'}" in done.stdout, done.stderr
    assert ("which this job does not have" in done.stderr) is not is_set
