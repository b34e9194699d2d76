"""Run cards: loading, overrides, variables, paths, the shipped cards, and one clear line for each
fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tr11ops.base.units import format_time_limit
from tr11ops.runcard.card import (
    PATH_KEYS,
    RunCard,
    card_from_resolved,
    find_card,
    load_card,
    parse_attempts,
    parse_time_limit,
    resolved,
    shipped_cards,
    shipped_folder,
)
from tr11ops.runcard.docs import card_reference
from tr11ops.runcard.rules import card_warnings
from trainer.config.card import CardError, load_trainer_config

SMALL = Path(__file__).parents[2] / "data" / "small-card.toml"
DEMO = shipped_folder() / "demo.toml"
MAIN = shipped_folder() / "tr11-176B-ml.toml"
SITE = {
    f"six_ALL_CCFR{name}": f"/site/ccfr{name.lower()}"
    for name in ("WORK", "WORKSF", "SCRATCH", "STORE")
}
SITE["TR11_ALERT_RECIPIENTS"] = "ana@site.org,ben@site.org"


def fault(*overrides: str, path: Path = SMALL) -> str:
    """The one line that refuses the card with these overrides."""
    with pytest.raises(CardError) as caught:
        load_card(path, overrides, {})
    text = str(caught.value)
    assert "\n" not in text, text
    place, _, said = text.partition(" ")
    assert place in {f"{path}:", "--set"}
    return said


# -------------------------------------------------------------------------- what a sound card gives
def test_demo_card() -> None:
    card = load_card(DEMO, [], {})
    assert card.world_size == 8
    assert (card.parallel.tensor, card.parallel.pipeline, card.data_parallel_degree) == (2, 2, 2)
    assert card.gradient_accumulation_steps(0) == 1
    assert card.gradient_accumulation_steps(10**6) == card.batch.global_batch_size // (
        card.batch.micro_batch_size * 2
    )
    assert card.kill_switch == Path.cwd() / "demo-run" / "kill-switch"
    assert card_warnings(card) == []


def test_main_card_is_the_final_training() -> None:
    card = load_card(MAIN, [], SITE)
    assert (card.world_size, card.data_parallel_degree, card.total_iterations) == (384, 8, 115_311)
    assert (card.gradient_accumulation_steps(0), card.gradient_accumulation_steps(10_000_000)) == (
        24,
        128,
    )
    assert card.time_limit_seconds == 360_000
    assert card.paths.main_log == Path(
        "/site/ccfrscratch/checkpoints/tr11-176B-ml/tr11-176B-ml-logs/logs/main/main_log.txt"
    )
    assert card_warnings(card) == []


def test_half_the_nodes_change_the_allocation_alone() -> None:
    whole, half = (
        load_card(shipped_folder() / f"tr11-176B-ml{end}.toml", [], SITE) for end in ("", "-24n")
    )
    assert (half.slurm.nodes, half.data_parallel_degree, half.gradient_accumulation_steps(0)) == (
        24,
        4,
        48,
    )
    assert half.model_dump(exclude={"slurm"}) == whole.model_dump(exclude={"slurm"})


def test_the_rehearsal_shares_nothing_with_the_main_run() -> None:
    rehearsal, main = (
        load_card(shipped_folder() / "setup-test-n2.toml", [], SITE),
        load_card(MAIN, [], SITE),
    )
    assert rehearsal.world_size == 16
    assert rehearsal.paths.root != main.paths.root
    assert rehearsal.kill_switch != main.kill_switch
    assert rehearsal.run.name != main.run.name
    assert rehearsal.slurm.master_port != main.slurm.master_port
    assert rehearsal.schedule == main.schedule and rehearsal.batch == main.batch


@pytest.mark.parametrize("name", shipped_cards())
def test_the_trainer_reads_what_is_resolved(name: str, tmp_path: Path) -> None:
    card = load_card(find_card(name, {}, tmp_path), [], SITE)
    path = tmp_path / "card.json"
    path.write_text(json.dumps(resolved(card)), encoding="utf-8")
    read = load_trainer_config(path)
    assert read.model_dump() == card.model_dump(include=set(type(read).model_fields))
    again = card_from_resolved(json.loads(path.read_text(encoding="utf-8")), str(path))
    assert again == card and again.digest == card.digest
    assert resolved(card)["derived"]["card_hash"] == card.digest


def test_the_digest_follows_every_setting_and_nothing_else(tmp_path: Path) -> None:
    card = load_card(SMALL, [], {})
    assert load_card(SMALL, ["batch.micro_batch_size=4"], {}).digest == card.digest
    moved = tmp_path / "other.toml"
    moved.write_text("# a comment\n" + SMALL.read_text(encoding="utf-8"), encoding="utf-8")
    elsewhere = load_card(
        moved, [f"run.directory={card.run.directory}", f"data.prefixes={card.data.prefixes}"], {}
    )
    assert elsewhere.model_copy(update={"tokenizer": card.tokenizer}).digest == card.digest
    assert load_card(SMALL, ["run.seed=43"], {}).digest != card.digest
    assert load_card(SMALL, ["slurm.time_limit=5"], {}).digest != card.digest


# ---------------------------------------------------------------------- overrides, variables, paths
@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("slurm.nodes=2", lambda card: card.world_size, 4),
        ("batch.train_samples=1_000_000", lambda card: card.batch.train_samples, 1_000_000),
        ("run.variant=2", lambda card: card.run.variant, "2"),
        ("run.variant=cl-2", lambda card: card.run.variant, "cl-2"),
        ("slurm.time_limit=30", lambda card: card.time_limit_seconds, 1800),
        ("slurm.time_limit=0-01:00:00", lambda card: card.time_limit_seconds, 3600),
        ("batch.ramp=none", lambda card: card.batch.ramp, None),
        ("batch.ramp.samples=960", lambda card: card.batch.ramp.samples, 960),
        ("slurm.environment.FOO=1", lambda card: card.slurm.environment["FOO"], "1"),
        ("slurm.options.exclusive=true", lambda card: card.slurm.options, {"exclusive": True}),
        (
            "slurm.options.licenses=scratch:1",
            lambda card: card.slurm.options,
            {"licenses": "scratch:1"},
        ),
        ("slurm.options.nice=5", lambda card: card.slurm.options, {"nice": 5}),
        ("slurm.environment.FOO=a = b", lambda card: card.slurm.environment["FOO"], "a = b"),
        (
            'data.prefixes=["/a", "b"]',
            lambda card: card.data.prefixes,
            ["/a", str(Path.cwd() / "b")],
        ),
        (
            "model.activation_checkpointing=false",
            lambda card: card.model.activation_checkpointing,
            False,
        ),
        ("precision.dtype=fp32", lambda card: card.precision.dtype, "fp32"),
    ],
)
def test_overrides(override: str, read: Callable[[RunCard], object], value: object) -> None:
    assert read(load_card(SMALL, [override], {})) == value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("slurm.nods=4", "slurm.nods: is not a known key; did you mean 'slurm.nodes'?"),
        ("slrm.nodes=4", "slrm.nodes: is not a known key; did you mean 'slurm'?"),
        ("nodes=4", "--set = 'nodes': must be section.key=value; e.g. --set slurm.nodes=24"),
        (
            "slurm.nodes",
            "--set = 'slurm.nodes': must be section.key=value; e.g. --set slurm.nodes=24",
        ),
        ("run.name.first=x", "run.name.first: run.name is not a table; drop the rest"),
        ("slurm.nodes=four", "slurm.nodes = 'four': input should be a valid integer"),
    ],
)
def test_bad_overrides(override: str, words: str) -> None:
    assert fault(override).startswith(words)


@pytest.mark.parametrize(
    ("lines", "overrides", "key"),
    [
        ("", ['alerts.imap_host="mail.example.org"'], "alerts.imap_host"),
        ("", ["alerts.imap_tls=false", "alerts.imap_port=143"], "alerts.imap_port"),
        ('imap_host = "m"\nimap_folder = "INBOX"', [], "alerts.imap_host"),
        ('imap_credentials_file = "pass"', [], "alerts.imap_credentials_file"),
    ],
)
def test_a_removed_key_is_one_line_that_says_what_to_do_instead(
    tmp_path: Path, lines: str, overrides: list[str], key: str
) -> None:
    path = tmp_path / "tr11.toml"
    path.write_text(f"{SMALL.read_text()}\n[alerts]\n{lines}\n")
    with pytest.raises(CardError) as refused:
        load_card(path, overrides, {})
    (line,) = str(refused.value).splitlines()
    assert (
        f"{key}: was removed from the card; remove it; acknowledge by the link in the mail "
        "(alerts.serve_url), with `tr11 alerts ack`" in line
    )
    assert "mail.example.org" not in line and "did you mean" not in line


def test_a_kept_card_of_an_older_version_is_read_without_removed_keys() -> None:
    card = load_card(SMALL, [], {})
    kept = resolved(card)
    kept["alerts"] |= {
        "imap_host": None,
        "imap_port": 993,
        "imap_tls": True,
        "imap_folder": "INBOX",
    }
    assert card_from_resolved(kept, "card.json") == card


def test_variables_and_paths(tmp_path: Path) -> None:
    overrides = [
        "run.directory=$BASE/${NAME}-run",
        "run.kill_switch=~/stop",
        "data.cache=cache",
        "slurm.setup=['echo $SLURM_JOB_ID', 'cd /']",
        "slurm.environment.PRICE=5$$",
    ]
    card = load_card(
        SMALL, overrides, {"BASE": "/big", "NAME": "x", "HOME": "/home/me"}, directory=tmp_path
    )
    assert card.run.directory == "/big/x-run"
    assert card.kill_switch == Path("/home/me/stop")
    assert card.data.cache == str(tmp_path / "cache")
    assert card.data.prefixes[0].startswith(str(SMALL.parent))
    assert card.slurm.setup == ["echo $SLURM_JOB_ID", "cd /"]
    assert card.slurm.environment["PRICE"] == "5$"


OWN_LISTS = {
    "data.prefixes",
    "filesystems.path",
    "perms.folders",
    "resilience.check_scripts",
    "resilience.check_scripts.script",
}
NEEDED = {"run.directory"}
OF_ANOTHER_TRAINER = {key for key in map(".".join, PATH_KEYS) if key.startswith("trainer.")}


@pytest.mark.parametrize(
    "key", sorted({".".join(key) for key in PATH_KEYS} - OWN_LISTS - NEEDED - OF_ANOTHER_TRAINER)
)
def test_an_empty_path_is_none_and_not_the_current_folder(key: str) -> None:
    """`alerts.urls_file=` was read as the folder `.`, and mails said that no address in it can be
    used.
    """
    wanted = load_card(SMALL, [f"{key}=none"], {})
    assert load_card(SMALL, [f"{key}="], {}) == wanted
    assert load_card(SMALL, [f"{key}=$NOTHING"], {"NOTHING": ""}) == wanted


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("run.directory=", "run.directory"),
        ("data.prefixes=['']", "data.prefixes.0"),
        ("perms.folders=['']", "perms.folders.0"),
        ("resilience.check_scripts=['']", "resilience.check_scripts.0"),
        ("resilience.check_scripts=[{script=''}]", "resilience.check_scripts.0.script"),
    ],
)
def test_an_empty_path_where_one_is_needed_is_refused_in_one_line(
    override: str, named: str
) -> None:
    (line,) = [line for line in fault(override).splitlines() if "empty" in line]
    assert line.startswith(f"{named} = '': is empty, and a path is needed")


def test_undefined_variables_are_named_once_each() -> None:
    with pytest.raises(CardError) as caught:
        load_card(MAIN, [], {})
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert "run.directory" in lines[0] and "$six_ALL_CCFRSCRATCH is not defined" in lines[0]
    assert load_card(MAIN, [], {}, keep_undefined=True).run.directory.endswith(
        "checkpoints/tr11-176B-ml"
    )


# ----------------------------------------------------------------------------- which card
def test_which_card(tmp_path: Path) -> None:
    with pytest.raises(
        CardError,
        match=r"no tr11.toml here .*; write one with `tr11 init`, use --run PATH, or a shipped card: .*demo, ",
    ):
        find_card(None, {}, tmp_path)
    (tmp_path / "tr11.toml").write_text("")
    (tmp_path / "mine.toml").write_text("")
    assert find_card(None, {}, tmp_path) == tmp_path / "tr11.toml"
    assert find_card(None, {"TR11_RUN": "mine.toml"}, tmp_path) == tmp_path / "mine.toml"
    assert find_card("demo", {"TR11_RUN": "mine.toml"}, tmp_path) == DEMO
    assert find_card("demo.toml", {}, tmp_path) == DEMO
    (tmp_path / "demo.toml").write_text("")
    assert find_card("demo.toml", {}, tmp_path) == tmp_path / "demo.toml"
    with pytest.raises(
        CardError,
        match=r"--run = 'dmo': is neither a file nor a shipped card; did you mean 'demo'\?",
    ):
        find_card("dmo", {}, tmp_path)
    with pytest.raises(CardError, match="--run = '': is empty; give a path, or leave --run out"):
        # an unset variable of a script is not a choice
        find_card("", {"TR11_RUN": "demo"}, tmp_path)
    with pytest.raises(
        CardError, match=r"'a/b.toml': is neither a file .*; write one with `tr11 init -o PATH`, "
    ):
        find_card(None, {"TR11_RUN": "a/b.toml"}, tmp_path)


# ----------------------------------------------------------------------------- refusals
PARTS = ("parallel.virtual_stages=2", "model.layers=6", "batch.ramp=none")  # sound


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.hidden_size=130"], "model.hidden_size = 130: must be divisible by model.attention_heads (4); use"),
        (["model.layers=3"], "model.layers = 3: model.layers + 2 must be divisible by parallel.pipeline (2); use 2"),
        (
            [*PARTS, "model.layers=4"],
            "model.layers = 4: model.layers + 2 must be divisible by parallel.pipeline x parallel.virtual_stages (4); "
            "use 2 or 6",
        ),
        (
            [*PARTS, "model.layers=2"],
            "parallel.virtual_stages = 2: leaves a part of a stage without a transformer block; use fewer parts or",
        ),
        ([*PARTS, "parallel.pipeline=1"], "parallel.virtual_stages = 2: needs parallel.pipeline above 1; use 1"),
        (
            [*PARTS, "parallel.partition=uniform"],
            "parallel.virtual_stages = 2: needs a partition that counts blocks, not uniform; use parallel.partition",
        ),
        (
            [*PARTS, "checkpoint.format=deepspeed"],
            "parallel.virtual_stages = 2: cannot be saved with checkpoint.format = deepspeed, where a stage's layers",
        ),
        (
            [*PARTS, "batch.global_batch_size=8"],
            "batch.global_batch_size = 8: gives each replica fewer micro batches than stages (2), for "
            "parallel.virtual_stages; use 16 or more",
        ),
        (
            [*PARTS, "batch.ramp={ start = 8, increment = 8, samples = 480 }"],
            "batch.ramp.start = 8: gives each replica fewer micro batches than stages (2)",
        ),
        (
            ["optimizer.lamb_norms=local"],
            "optimizer.lamb_norms = 'local': belongs to optimizer.type = \"lamb\"; leave it out",
        ),
        (
            ["optimizer.type=lamb", "optimizer.embedding_alpha=2.0"],
            "optimizer.embedding_alpha = 2.0: belongs to optimizer.lamb_variant = \"embedding-lr\"; leave it out",
        ),
        (["slurm.nodes=3"], "parallel = 'tensor 2 x pipeline 2': the number of workers (6 = nodes x"),
        (["batch.ramp=none", "batch.global_batch_size=36"], "batch.global_batch_size = 36: must be divisible by"),
        (["run.exit_duration_minutes=9"], "run.exit_duration_minutes = 9.0: must be below slurm.time_limit"),
        (["slurm.time_limit=1 hour"], "slurm.time_limit = '1 hour': a time limit is MM, MM:SS, HH:MM:SS, D-HH"),
        (["slurm.signal_seconds_before_limit=300"], "slurm.signal_seconds_before_limit = 300: must be below"),
        (["slurm.workers_per_node=none"], "slurm.workers_per_node: is missing, and slurm.gpus_per_node is 0"),
        (["slurm.gpus_per_node=1"], "slurm.workers_per_node = 2: must not exceed slurm.gpus_per_node (1)"),
        *(
            ([f"slurm.environment.{name}=hunter2"], f"slurm.environment.{name}: looks like a secret")
            for name in ("HF_TOKEN", "PGPASSWORD", "GITHUB_PAT", "OPENAI_KEY", "AZURE_STORAGE_KEY", "SMTP_PASS", "DB_DSN")
        ),
        (
            ["slurm.environment.GLOO_SOCKET_IFNAME==ib0"],
            "slurm.environment.GLOO_SOCKET_IFNAME = '=ib0': must name network interfaces with commas between them",
        ),
        (["slurm.environment.A-B=x"], "slurm.environment.A-B: is not a name that a shell accepts"),
        (["slurm.partition=a b"], "slurm.partition = 'a b': must look like"),
        (["data.split=1,1"], "data.split = '1,1': must be three shares such as 949,50,1"),
        (["data.weights=[0.5, 0.5]"], "data.weights = [0.5, 0.5]: needs one entry per data.prefixes (1); add"),
        (["data.weights=[1e308, 1e308]", "data.prefixes=['a', 'b']"], "data.weights = [1e+308, 1e+308]: must not be"),
        (["parallel.partition=type:["], "parallel.partition = 'type:[': is not a regular expression"),
        (["batch.train_samples=4"], "batch.train_samples = 4: is less than one global batch"),
        (["slurm.options.partition=x"], "slurm.options.partition = 'x': is not passed through: tr11 sees to --partition"
         " itself; use slurm.partition"),
        (["slurm.options.exclu=x"], "slurm.options.exclu = 'x': is not passed through: tr11 sees to --exclude itself"),
        (["slurm.options.wait=true"], "slurm.options.wait = true: is not passed through: tr11 sees to --wait itself"),
        (["slurm.options.gres=gpu:a100:8"], "slurm.options.gres = 'gpu:a100:8': asks for 8 GPUs a node,"
         " slurm.gpus_per_node for 0; make the two equal"),
        (["run.directory=''"], "run.directory = '': is empty, and a path is needed"),
        (["backup.url=gs://me:pw@bucket"], "backup.url: holds a password"),
        (["model.layers=9223372036854775808"], "model.layers = 'an integer of 64 bits': does not fit in 64 bits"),
    ],
)  # fmt: skip
def test_one_line_for_each_fault(overrides: list[str], line: str) -> None:
    assert fault(*overrides).startswith(line)


def test_all_faults_at_once() -> None:
    overrides = ["model.hidden_size=130", "slurm.nods=3", "slurm.time_limit=x", "data.split=no"]
    with pytest.raises(CardError) as caught:
        load_card(SMALL, overrides, {})
    assert [problem.key for problem in caught.value.problems] == [
        "slurm.nods",
        "slurm.time_limit",
        "model.hidden_size",
        "data.split",
    ]


def test_a_key_of_the_wrong_kind_hides_no_other_rule(tmp_path: Path) -> None:
    """Kinds, unknown keys, values no schema should meet, missing keys, and rules between keys: all
    in one go.
    """
    card = tmp_path / "card.toml"
    text = SMALL.read_text().replace("[schedule]", "[x]")
    card.write_text(
        text + '[logging]\ninterval = "often"\ntensorboard_queue = 99999999999999999999\n'
    )
    with pytest.raises(CardError) as caught:
        load_card(card, ["model.hidden_size=130", "slurm.nodes=many", "data.weights=[1, 2]"], {})
    lines = [str(problem) for problem in caught.value.problems]
    keys = [line.split(":")[0].split(" =")[0] for line in lines]
    assert keys == [
        "logging.tensorboard_queue", "schedule", "logging.interval", "slurm.nodes", "x", "model.hidden_size",
        "data.weights",
    ]  # fmt: skip
    assert "is required and missing" in lines[1]


def test_rules_that_need_a_faulty_key_say_nothing(tmp_path: Path) -> None:
    """What follows from a wrong number is not told: it may be right when the number is."""
    with pytest.raises(CardError) as caught:
        load_card(
            SMALL,
            ["model.attention_heads=0", "model.hidden_size=131", "slurm.workers_per_node=-1"],
            {},
        )
    assert [problem.key for problem in caught.value.problems] == [
        "model.attention_heads",
        "slurm.workers_per_node",
    ]


@pytest.mark.parametrize(
    "key",
    ["slurm.time_limit", "backup.time_limit", "cron.hourly_time_limit", "cron.daily_time_limit"],
)
@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("20h", "20:00:00"), ("2 days", "48:00:00"), ("90m", "01:30:00"), ("1h30m", "01:30:00"), ("1.5 h", "01:30:00"),
        ("1 day and 12 hours", "36:00:00"), ("45 s", "00:00:45"), ("soon", "100:00:00"), ("5 parsecs", "100:00:00"),
        ("1h x", "100:00:00"), ("0h", "100:00:00"),
    ],
)  # fmt: skip
def test_a_span_as_people_write_it_is_suggested_as_slurm_does(
    key: str, text: str, written: str
) -> None:
    shown = "MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
    assert fault(f"{key}={text}") == f'{key} = {text!r}: a time limit is {shown}; write "{written}"'


def test_a_card_need_not_say_when_to_save(tmp_path: Path) -> None:
    card = tmp_path / "card.toml"
    card.write_text(SMALL.read_text().replace("[checkpoint]\ninterval = ", "[debug]\n# "))
    assert "[checkpoint]" not in card.read_text()
    found = load_card(card)
    assert (found.checkpoint.interval, found.checkpoint.interval_minutes) == (None, 60)
    assert card_from_resolved(resolved(found), "resolved") == found
    assert load_card(SMALL, ["checkpoint.interval=none"]).checkpoint.interval_minutes == 60
    assert load_card(SMALL).checkpoint.interval_minutes is None


def test_files_that_are_no_cards(tmp_path: Path) -> None:
    card = tmp_path / "card.toml"
    with pytest.raises(CardError, match=r"card.toml: file: does not exist; name a card"):
        load_card(card)
    with pytest.raises(CardError, match="is a folder"):
        load_card(tmp_path)
    with pytest.raises(CardError, match="is not a regular file"):
        load_card(Path("/dev/zero"))
    card.write_bytes(b"[run]\nname = '\xff\xfe'\n")
    with pytest.raises(CardError, match=r"is not UTF-8 text \(line 2\)"):
        load_card(card)
    card.write_text("[run]\nname = demo\n")
    with pytest.raises(CardError, match=r"is not TOML: .*line 2"):
        load_card(card)
    card.write_text("")
    with pytest.raises(CardError, match="run: is required and missing; add it to the card"):
        load_card(card)
    card.write_text("run = 3\n")
    with pytest.raises(
        CardError, match=r"run = 3: must be a table; write \[run\] and its keys below it"
    ):
        load_card(card)


def test_a_card_saved_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    card = tmp_path / "card.toml"
    card.write_bytes(b"\xef\xbb\xbf" + SMALL.read_bytes().replace(b"\n", b"\r\n"))
    plain = tmp_path / "plain.toml"
    plain.write_bytes(SMALL.read_bytes())
    assert load_card(card).digest == load_card(plain).digest


# ---------------------------------------------------------- warnings, Slurm's small languages, docs
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["run.exit_duration_minutes=none", "slurm.signal_seconds_before_limit=none"],
            "without a last checkpoint",
        ),
        (
            ["slurm.time_limit=5", "run.exit_duration_minutes=4.5"],
            "leaves 0.5 minutes before the time limit, less than a",
        ),
        (
            ["slurm.time_limit=20:00:00", "run.exit_duration_minutes=1190"],
            "less than one evaluation may take; use 1185",
        ),
        (
            ["model.hidden_size=14336", "model.attention_heads=112"],
            "is large for 14336 columns: a 104B training diverged right after its warm-up, twice, and again with another "
            "seed; use 0.0048 (sqrt(1/3h)) or 0.0053 (sqrt(2/5h))",
        ),
    ],
)
def test_warnings(overrides: list[str], words: str) -> None:
    (warning,) = card_warnings(load_card(SMALL, overrides, {}))
    assert words in str(warning)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("100:00:00", 360_000),
        ("4-04:00:00", 360_000),
        ("1-0", 86_400),
        ("1-2:30", 95_400),
    ],
)
def test_time_limits(text: str, seconds: int) -> None:
    assert parse_time_limit(text) == seconds
    assert parse_time_limit(format_time_limit(seconds)) == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "00:00:00", "infinite", "-5", "1:2:3:4", "1-", "1.5", "٣", "9" * 400]
)
def test_no_time_limits(text: str) -> None:
    with pytest.raises(ValueError, match="a time limit"):
        parse_time_limit(text)


@pytest.mark.parametrize(
    ("text", "shown", "indices"),
    [
        ("1-3", "1-3%1", (1, 2, 3)),
        ("1-10%1", "1-10%1", tuple(range(1, 11))),
        ("4", "4%1", (4,)),
        ("0,5-9:2", "0,5-9:2%1", (0, 5, 7, 9)),
    ],
)
def test_arrays(text: str, shown: str, indices: tuple[int, ...]) -> None:
    array = parse_attempts(text)
    assert (str(array), array.indices, array.throttle, len(array)) == (
        shown,
        indices,
        1,
        len(indices),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1-10%2", "must run one task at a time"),
        ("1-10%", "must run one task at a time"),
        ("5-1", "the range 5-1 is empty; use 1-5"),
        ("1-9:0", "the range 1-9:0 is empty; use 1-9"),
        ("1,1", "names a task twice"),
        ("1-3,2", "names a task twice"),
        ("", "is not an array"),
        ("a-b", "is not an array"),
        ("1-999999999", "has more than"),
        ("1-9999," * 3 + "1", "has more than"),
        ("9" * 5000, "is not an array"),
    ],
)
def test_no_arrays(text: str, words: str) -> None:
    with pytest.raises(CardError) as caught:
        parse_attempts(text)
    assert words in str(caught.value) and str(caught.value).startswith("command line: --array = ")


def test_the_reference_is_up_to_date() -> None:
    folder = Path(__file__).parents[3] / "docs" / "reference"
    pages = [folder / "run-card.md", *(folder / "card").iterdir()]
    written = {str(page.relative_to(folder)): page.read_text(encoding="utf-8") for page in pages}
    assert written == card_reference(), "run: python -m tr11ops.runcard.docs docs/reference"


def test_the_reference_begins_with_a_whole_card(tmp_path: Path) -> None:
    text = re.search(r"```toml\n(.*?)```", card_reference()["run-card.md"], re.DOTALL)
    assert text and len(text[1].splitlines()) <= 10
    (tmp_path / "tr11.toml").write_text(text[1], encoding="utf-8")
    card = load_card(tmp_path / "tr11.toml", [], {})
    assert card.data_parallel_degree == 16 and card_warnings(card) == []


def test_every_key_is_described() -> None:
    text = "\n".join(card_reference().values())
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.endswith("|  |")] == []


def test_prefixes_inside_groups_become_absolute(tmp_path):
    from tr11ops.runcard.load import make_absolute

    groups = ["a: 1 0:1 x/one, 2 0:0.5 /abs/two", "not a group"]
    tables = {"data": {"train_group": "train: 0.5 0:1 data/x", "valid_groups": groups}}
    made = make_absolute(tables, frozenset(), lambda _: tmp_path, "")
    assert made["data"]["train_group"] == f"train: 0.5 0:1 {tmp_path}/data/x"
    assert made["data"]["valid_groups"] == [
        f"a: 1 0:1 {tmp_path}/x/one, 2 0:0.5 /abs/two",
        "not a group",
    ]


def test_what_the_command_line_gave_is_said_to_be_from_there(tmp_path: Path) -> None:
    """Also where a rule between keys refuses it, and of a table in it; the card's own is the card's."""
    path = tmp_path / "card.toml"
    path.write_text(SMALL.read_text())
    given = [
        "slurm.nodes=0",
        "slurm.nodez=2",
        "resilience.adapt_save_interval=true",
        'slurm.exclude=["a", 3]',
    ]
    with pytest.raises(CardError) as refused:
        load_card(path, given, {})
    lines = str(refused.value).splitlines()
    assert all(line.startswith("--set ") for line in lines), lines
    assert any(line.startswith("--set slurm.nodes = 0: ") for line in lines)
    assert any(line.startswith("--set slurm.exclude.1 = 3: ") for line in lines)
    assert any("adapt_save_interval = true: needs" in line for line in lines), "as TOML has it"
    path.write_text(path.read_text().replace("[slurm]", "[slurm]\nspare_nodes = -1"))
    with pytest.raises(CardError) as refused:
        load_card(path, ["slurm.spare=2"], {})
    assert sorted(line.partition(" ")[0] for line in str(refused.value).splitlines()) == [
        "--set",
        f"{path}:",
    ]
