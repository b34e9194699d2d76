"""The labels of the corpus of logs: legal words, files that exist, and root-cause lines that say
what they should.
"""

import gzip
import re
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "data" / "diagnose"
LABELS: dict[str, dict[str, Any]] = {
    name: label
    for path in sorted(
        FOLDER.glob("*.toml")
    )  # labels.toml, and heldout.toml of those made after the engine
    for name, label in tomllib.loads(path.read_text()).items()
}
VERDICTS = set(
    """gpu_hardware nccl_network nccl_timeout cuda_oom host_oom dataloader storage checkpoint_mismatch numerics
    slurm_time_limit slurm_preempted slurm_node_fail slurm_user_cancel slurm_submit slurm_auth rendezvous user_code
    hub_auth gcs clean_exit unknown""".split()
)
ACTIONS = {
    "exclude_and_resubmit",
    "resubmit",
    "fix_config",
    "fix_storage",
    "rollback_and_skip",
    "page",
    "none",
}
KEYS = {
    "files",
    "verdict",
    "action",
    "accepted_verdicts",
    "accepted_actions",
    "rank",
    "gpu",
    "node",
    "origin",
}
KEYS |= {"source", "made", "why", "root_cause", "accepted_lines"}


def lines_of(name: str) -> list[str]:
    data = (FOLDER / name).read_bytes()
    return (
        (gzip.decompress(data) if name.endswith(".gz") else data)
        .decode(errors="replace")
        .split("\n")
    )


def test_labels_are_well_formed() -> None:
    for name in LABELS:
        check(name)


def check(name: str) -> None:
    label = LABELS[name]
    assert set(label) <= KEYS, name
    assert {label["verdict"], *label.get("accepted_verdicts", [])} <= VERDICTS, name
    assert {label["action"], *label.get("accepted_actions", [])} <= ACTIONS, name
    assert label["origin"] in {"real", "rebuilt", "quoted"} and label["made"] and label["why"], name
    assert (label["origin"] == "quoted") <= label.get("source", "").startswith("https://"), name
    lengths = {file: len(lines_of(file)) - 1 for file in label["files"]}
    if "root_cause" not in label:
        assert label["verdict"] in {"unknown", "clean_exit"}, name
        return
    cause = label["root_cause"]
    assert cause["file"] in lengths, name
    assert cause["text"] in lines_of(cause["file"])[cause["line_number"] - 1], name
    for file, accepted in label.get("accepted_lines", {}).items():
        assert all(1 <= number <= lengths[file] for number in accepted), name


def test_every_file_has_a_label_and_none_has_two() -> None:
    labelled = [file for label in LABELS.values() for file in label["files"]]
    assert sorted(labelled) == sorted(
        path.name for path in FOLDER.iterdir() if path.suffix in {".log", ".gz"}
    )


BLIND = FOLDER / "blind"


def test_corpus_names_no_machine_of_its_makers() -> None:
    private = re.compile(r"/tmp/diagnose|\bhf_[A-Za-z0-9]{20,}|pytest-of-")
    for path in sorted(path for path in FOLDER.rglob("*") if path.is_file()):
        text = (
            path.read_text()
            if path.suffix == ".toml"
            else "\n".join(lines_of(str(path.relative_to(FOLDER))))
        )
        assert not private.search(text), path.name
        # the home of a public report, in the sets of strangers, is no maker's
        is_a_strangers = BLIND in path.parents and path.parent != BLIND
        assert "/root/" not in text or is_a_strangers, path.name


def test_corpus_stays_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 10_200_000
