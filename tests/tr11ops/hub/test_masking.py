"""Secrets that a training printed: masked in what is sent, byte for byte, in every round alike, and
told once.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.tr11ops.hub.sync_cases import EVENTS, LOG, REPOSITORY, Mirror, record
from tr11ops.base.errors import HubPermanentError, PublicRepository
from tr11ops.hub.masking import KEY_LINES, Masks, MaskSearch, whole_events
from tr11ops.hub.sync import preview
from tr11ops.hub.sync_round import read_found, write_confirmed, write_revoked
from tr11ops.observe.observations import CopyStatus
from tr11ops.observe.operation_files import read_copy
from tr11ops.rundir.journal import read_journal

HF = b"hf_" + b"AbCdEfGhIj0123456789" + b"KlMnOpQrStUvWx"
AWS = b"wJalrXUtnFEMI/K7MDENG" + b"/bPxRfiCYEXAMPLEKEY"
JWT = (
    b"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
)
BODY = [
    b"MIIEpAIBAAKCAQEAvGq1z0H7bZb1Z3p2kQ9sJm4Xr8TtYvWc5NdLfEo6HuPaBiRg"[shift:] + b"ab"
    for shift in range(9)
]
PEM = b"\n".join(
    [
        b"-----BEGIN RSA PRIVATE " + b"KEY-----",
        *BODY,
        b"dGhlIGVuZA==",
        b"-----END RSA PRIVATE " + b"KEY-----",
    ]
)
SECRETS = {
    "Hugging Face token": (b"logging in with " + HF + b", done", HF),
    "quoted token": (rb"'\n" + HF + b"'", HF),
    "AWS access key": (b"key AKIA" + b"IOSFODNN7EXAMPLE ok", b"AKIA" + b"IOSFODNN7EXAMPLE"),
    "AWS secret key": (b"AWS_SECRET_ACCESS_KEY=" + AWS, AWS),
    "AWS secret key in JSON": (b'{"SecretAccessKey": "' + AWS + b'"}', AWS),
    "AWS secret key in a file": (b"aws_secret_access_key = " + AWS, AWS),
    "AWS pair": (b"('AKIA" + b"IOSFODNN7EXAMPLE', '" + AWS + b"')", AWS),
    "password in an address": (b"cloning https://user:hunter22@host/x.git", b"user:hunter22"),
    "token in an address": (b"cloning https://sometoken123@host/x.git", b"sometoken123"),
    "JSON web token": (b"got " + JWT + b" back", JWT),
    "GitHub": (b"ghp_" + b"0123456789abcdefghijABCDEFGHIJ012345", b"ghp_" + b"0123456789abcdefghijABCDEFGHIJ012345"),
    "header": (b"> Authorization: Bearer abc.def-0123456789", b"abc.def-0123456789"),
    "environment": (b"WANDB_API_KEY=0123456789abcdef0123", b"0123456789abcdef0123"),
    "dictionary": (b"environ({'WANDB_API_KEY': '0123456789abcdef0123'})", b"0123456789abcdef0123"),
    "password": (b'connecting with password: "correct-horse" now', b"correct-horse"),
    "a value that begins like none": (b"password=true-love-99", b"true-love-99"),
    "a key that begins like none": (b"SECRET_KEY=none-of-your-business", b"none-of-your-business"),
    "signed": (b"GET https://s/x?X-Amz-Signature=00ff00ff00ff00ff&a=1", b"00ff00ff00ff00ff"),
    "azure": (b"AccountName=x;AccountKey=c2VjcmV0c2VjcmV0c2VjcmV0;E=1", b"c2VjcmV0c2VjcmV0c2VjcmV0"),
}  # fmt: skip
HARMLESS = [
    b" iteration 12/ 100 | consumed samples: 24 | consumed tokens: 48 | lm loss: 2.3E+00 | grad norm: 0.1 |",
    b"  pad_token ....................................... None", b"eos token: <|endoftext|>", b"api_key: None",
    b"loading hf_transformers and hf_config.json", b"task-0123456789012345678901", b"secret: null", b"s3://bucket/a@b",
    b"commit 0123456789abcdef0123456789abcdef01234567", b"HF_TOKEN_PATH=/gpfs/home/token", b"see https://host/a?b=c",
    b"basic tokenizer", b"password_file: /gpfs/home/password", b"MASTER_ADDR=node-1 MASTER_PORT=6000", b"secret sharing",
    b"password: required, see the card", b"api_key=false;", b"SECRET_KEY=***",
]  # fmt: skip


def masked(data: bytes, end: int | None = None, is_events: bool = False) -> bytes:
    end = len(data) if end is None else end
    masks = MaskSearch(is_events).until(lambda offset, length: data[offset : offset + length], end)
    return Masks(masks).over(data[:end], 0)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_masked_and_nothing_else(name):
    line, secret = SECRETS[name]
    shown = masked(b"before\n" + line + b"\nafter\n")
    assert secret not in shown and len(shown) == len(line) + 14
    assert shown.startswith(
        b"before\n" + line[: line.index(secret)].replace(b"AKIA" + b"IOSFODNN7EXAMPLE", b"*" * 20)
    )
    assert shown.endswith(line[line.index(secret) + len(secret) :] + b"\nafter\n")


@pytest.mark.parametrize("line", HARMLESS)
def test_what_is_no_secret_stays(line):
    assert masked(line + b"\n") == line + b"\n"


@pytest.mark.parametrize("prefix", [b"", b"[2022-05-01 12:00:00] 3: ", b"    "])
def test_a_private_key_is_masked_with_lines_of_others_between(prefix):
    step = HARMLESS[0]
    lines = [prefix + line for line in PEM.split(b"\n")]
    shown = masked(b"\n".join([*lines[:5], step, *lines[5:], step, b"the end"]) + b"\n")
    assert not any(line in shown for line in [*BODY, b"dGhlIGVuZA=="])
    assert shown.count(step) == 2 and shown.endswith(b"the end\n") and b"BEGIN RSA" in shown


@pytest.mark.parametrize("name", [b"OPENSSH ", b"EC ", b"ENCRYPTED ", b""])
@pytest.mark.parametrize(("before", "after"), [(b"-----", b"-----"), (b"---- ", b" ----")])
def test_a_private_key_of_any_kind_is_masked(name, before, after):
    """The second form is that of SSH2."""
    word = name + b"PRIVATE " + b"KEY"
    shown = masked(
        b"\n".join(
            [
                before + b"BEGIN " + word + after,
                *BODY,
                before + b"END " + word + after,
                b"the end\n",
            ]
        )
    )
    assert not any(line in shown for line in BODY) and shown.endswith(b"the end\n")


def test_a_private_key_on_one_line_is_masked():
    shown = masked(b'{"private_key": "' + PEM.replace(b"\n", rb"\n") + b'", "id": "kept"}\n')
    assert not any(line in shown for line in BODY) and b"kept" in shown


def test_a_key_without_an_end_does_not_mask_a_log_for_ever():
    lines = [PEM.split(b"\n")[0], *[b"averyveryverylongword"] * (KEY_LINES + 5)]
    assert masked(b"\n".join(lines) + b"\n").count(b"averyveryverylongword") == 5


def test_a_secret_in_an_event_is_masked_and_the_record_whole():
    data = record(b"one") + record(b"text " + HF + b" text") + record(b"three")
    shown = masked(data, is_events=True)
    assert (
        HF not in shown
        and shown[: len(record(b"one"))] == record(b"one")
        and shown.endswith(record(b"three"))
    )
    assert whole_events(
        lambda offset, length: shown[offset : offset + length], 0, len(shown)
    ).end == len(data)
    assert shown == record(b"one") + record(b"text " + b"*" * len(HF) + b" text") + record(b"three")


PIECES = [
    *(line + b"\n" for line, _ in SECRETS.values()),
    PEM + b"\n",
    HARMLESS[0] + b"\n",
    HF,
    b"\n",
    b"\xff\x00-",
]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=8),
    st.lists(st.integers(0, 4000), max_size=4),
    st.integers(90, 500),
)
def test_the_masks_of_a_beginning_depend_on_it_alone(pieces, ends, block):
    """However a file was looked at before, and in whatever blocks where the lines are shorter than
    these.
    """
    data = b"".join(pieces)
    read = lambda offset, length: data[offset : offset + length]  # noqa: E731
    search = MaskSearch(is_events=False)
    for end in sorted(min(end, len(data)) for end in ends):
        assert Masks(search.until(read, end)).over(data[:end], 0) == masked(data, end)
        whole = data.rfind(b"\n", 0, end) + 1
        assert masked(data, end)[:whole] == masked(data)[:whole]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "tr11ops.hub.masking.BLOCK_BYTES",
            max(block, *(len(piece) + 1 for piece in (b"", *pieces))),
        )
        if b"\n" in data[:block] and HF not in pieces:
            assert masked(data) == Masks(MaskSearch(is_events=False).until(read, len(data))).over(
                data, 0
            )


# ----------------------------------------------------------------------------- rounds
@pytest.fixture
def mirror(tmp_path, hub, hub_server) -> Mirror:
    return Mirror(tmp_path, hub, hub_server)


def leaks(mirror: Mirror, *secrets: bytes) -> list[bytes]:
    """Which of them any commit of the repository has."""
    contents = [
        content
        for commit in mirror.server.history(REPOSITORY)
        for content in mirror.server.files(REPOSITORY, commit.id).values()
    ]
    return [secret for secret in secrets if any(secret in content for content in contents)]


@pytest.mark.parametrize("anew", [True, False])
def test_a_masked_log_grows_round_by_round_and_is_no_damage(mirror, anew):
    local = b"one\ntoken " + HF + b"\n"
    mirror.write(LOG, local)
    mirror.sync(anew=anew)
    for number in range(3):
        mirror.now += 1
        mirror.add(LOG, b"line %d " % number + AWS + b" AWS_SECRET_KEY=" + AWS + b"\n")
        outcome = mirror.sync(anew=anew, rebuild=number == 1)
        assert [(send.reason, send.superseded) for send in outcome.sends] == [
            ("grown", "")
        ] and not outcome.notes
        assert len(mirror.there()[LOG]) == mirror.path(LOG).stat().st_size
    assert not leaks(mirror, HF) and mirror.path(LOG).read_bytes().startswith(local)
    assert not mirror.sync(rebuild=True).sends and set(mirror.there()) == {LOG}


@pytest.mark.parametrize("anew", [True, False])
def test_a_key_that_is_cut_by_a_round_leaks_no_half(mirror, anew):
    lines = PEM.split(b"\n")
    mirror.write(LOG, b"\n".join(lines[:4]) + b"\n" + lines[4][:20])
    mirror.sync(anew=anew)
    mirror.now += 1000  # quiet: its unfinished end is sent too
    mirror.sync(anew=anew)
    assert (
        mirror.there()[LOG].count(b"\n") == 4
        and len(mirror.there()[LOG]) == mirror.path(LOG).stat().st_size
    )
    mirror.add(LOG, lines[4][20:] + b"\n" + b"\n".join(lines[5:]) + b"\nafter\n")
    outcome = mirror.sync(anew=anew)
    assert [send.reason for send in outcome.sends] == ["grown"] and mirror.there()[LOG].endswith(
        b"\nafter\n"
    )
    assert not leaks(mirror, *(line[:16] for line in BODY)) and set(mirror.there()) == {LOG}


@pytest.mark.parametrize("anew", [True, False])
def test_an_unfinished_line_turned_secret_keeps_its_file(mirror, anew):
    mirror.write(LOG, b"one\nkey AKIA" + b"IOSF")
    mirror.now += 1000
    mirror.sync(anew=anew)
    mirror.add(LOG, b"ODNN7EXAMPLE\n")
    outcome = mirror.sync(anew=anew)
    assert [send.reason for send in outcome.sends] == ["grown"]
    assert mirror.there() == {LOG: b"one\nkey " + b"*" * 20 + b"\n"}


def test_events_with_a_secret_are_sent_whole_and_masked(mirror):
    mirror.write(EVENTS, record(b"one") + record(HF))
    mirror.sync()
    mirror.add(EVENTS, record(b"two"))
    assert [send.reason for send in mirror.sync().sends] == ["grown"]
    assert mirror.there() == {EVENTS: record(b"one") + record(b"*" * len(HF)) + record(b"two")}


def test_what_an_older_version_sent_unmasked_is_masked_and_said(mirror):
    mirror.server.create(REPOSITORY)
    mirror.write(LOG, b"one " + HF + b"\n")
    mirror.server.put(REPOSITORY, LOG, mirror.path(LOG).read_bytes())
    outcome = mirror.sync()
    assert [(send.reason, send.superseded) for send in outcome.sends] == [("masked", "")]
    assert mirror.there() == {LOG: b"one " + b"*" * len(HF) + b"\n"}
    assert any("older commits" in line for line in mirror.said)
    assert not mirror.sync(rebuild=True).sends


def test_a_secret_is_told_once_for_each_file_and_never_shown(mirror):
    mirror.write(LOG, b"one\n" + HF + b"\n" + HF + b"\n")
    outcome = mirror.sync()
    assert [(found.path, found.kind, found.line) for found in outcome.found] == [
        (LOG, "Hugging Face token", 2)
    ]
    mirror.now += 60
    mirror.add(LOG, b"again " + HF + b"\nhttps://me:secret99@host\n")
    mirror.sync()
    told = [line for line in mirror.said if "masked" in line]
    assert len(told) == 2 and "line 2:" in told[0] and "line 5:" in told[1]
    assert [found.kind for found in read_found(mirror.directory)] == [
        "Hugging Face token",
        "password in an address",
    ]
    assert len(write_revoked(mirror.directory, mirror.now)) == 2 and not write_revoked(
        mirror.directory, mirror.now
    )
    mirror.add(LOG, HF + b"\n")
    mirror.sync()
    assert all(found.revoked == mirror.now for found in read_found(mirror.directory))
    copy = read_copy(mirror.directory.paths.state / "sync" / "status.json")
    assert isinstance(copy, CopyStatus) and copy.secrets == read_found(mirror.directory)
    everything = "".join(mirror.said) + "".join(
        path.read_text() for path in mirror.directory.paths.state.rglob("*") if path.is_file()
    )
    assert "hf_" not in everything and "secret99" not in everything


@pytest.mark.parametrize("is_first", [True, False])
def test_a_secret_of_a_round_that_fails_late_is_recorded(mirror, is_first):
    mirror.write(LOG, b"one\n")
    if not is_first:
        mirror.sync()
    mirror.write(LOG, b"one\n" + HF + b"\n")
    look = mirror.hub.look

    def refuse(repository, names, **more):
        if LOG in names:
            raise HubPermanentError("the token was withdrawn")
        return look(repository, names, **more)

    mirror.hub.look = refuse
    with pytest.raises(HubPermanentError):
        mirror.sync()
    mirror.hub.look = look
    copy = read_copy(mirror.directory.paths.state / "sync" / "status.json")
    assert isinstance(copy, CopyStatus) and [secret.kind for secret in copy.secrets] == [
        "Hugging Face token"
    ]
    assert copy.message == "the token was withdrawn"
    mirror.sync()
    assert [secret.kind for secret in read_found(mirror.directory)] == ["Hugging Face token"]


def test_what_is_revoked_during_a_round_stays_revoked(mirror):
    mirror.write(LOG, b"one\n" + HF + b"\n")
    mirror.sync()
    mirror.add(LOG, b"https://me:secret99@host\n")
    commit = mirror.hub.commit

    def meanwhile(*words, **more):
        write_revoked(mirror.directory, 7.0)
        return commit(*words, **more)

    mirror.hub.commit = meanwhile
    mirror.sync()
    assert {secret.kind: secret.revoked for secret in read_found(mirror.directory)} == {
        "Hugging Face token": 7.0,
        "password in an address": None,
    }


# ----------------------------------------------------------------------------- a public repository
def test_a_public_repository_gets_nothing_without_consent(mirror):
    mirror.server.create(REPOSITORY, private=False)
    mirror.write(LOG, b"one\n")
    with pytest.raises(PublicRepository, match="tr11 sync --public"):
        mirror.sync()
    assert not mirror.there()
    assert preview(mirror.setting).sends and any("is public" in line for line in mirror.said)
    write_confirmed(mirror.directory, mirror.hub.endpoint, REPOSITORY, mirror.now)
    mirror.sync()
    assert mirror.there() == {LOG: b"one\n"}
    assert (
        next(entry.kind for entry in read_journal(mirror.directory.journal).entries)
        == "sync-public"
    )
    value = json.loads((mirror.directory.paths.state / "sync" / "public.json").read_text())
    assert value["repository"] == REPOSITORY and value["time"] == mirror.now


def test_a_repository_that_became_public_is_asked_about(mirror):
    mirror.write(LOG, b"one\n")
    mirror.sync()
    mirror.server.repo(REPOSITORY).private = False
    mirror.add(LOG, b"two\n")
    with pytest.raises(PublicRepository):
        mirror.sync()
    assert mirror.there() == {LOG: b"one\n"}


def test_the_card_may_want_a_public_repository(mirror):
    from tr11ops.hub.sync import sync_once

    mirror.server.create(REPOSITORY, private=False)
    mirror.write(LOG, b"one\n")
    sync_once(replace(mirror.setting, private=False))
    assert mirror.there() == {LOG: b"one\n"}
