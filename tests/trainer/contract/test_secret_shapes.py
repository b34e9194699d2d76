"""What is taken for a secret, and what is not: by its form, by its name, and in a number of steps
as its length says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from re import (
    _constants as codes,  # type: ignore[attr-defined]
    _parser as parser,  # type: ignore[attr-defined]
)
from typing import Any

import pytest

from tests.plugins import planted_secrets, secrets_in_context
from tr11ops.base import redact as messages
from tr11ops.base.redact import redact
from tr11ops.hub.masking import Masks, MaskSearch, _finder
from trainer.contract import secret_names, secret_shapes
from trainer.contract.secret_names import is_plain, is_secret_name, reference_of
from trainer.contract.secret_shapes import (
    NAME_STEMS,
    RULES_FILE,
    SHAPES,
    SecretShape,
    all_shapes,
    has_secret,
    is_secret,
)

REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
WITHOUT_WIDTH = (codes.AT, codes.ASSERT, codes.ASSERT_NOT)
PLANTED = planted_secrets.planted() + secrets_in_context.planted()
HARMLESS = planted_secrets.HARMLESS + secrets_in_context.HARMLESS


def published(line: str) -> str:
    """A line of a log as `tr11 sync` sends it."""
    data = line.encode() + b"\n"
    masks = MaskSearch(is_events=False).until(
        lambda offset, length: data[offset : offset + length], len(data)
    )
    return Masks(masks).over(data, 0).decode()


@pytest.mark.parametrize(("line", "secret"), PLANTED)
def test_a_secret_is_never_published_nor_said(line: str, secret: str) -> None:
    for shown in (published(line), redact(line)):
        assert not [
            secret[at : at + 8] for at in range(len(secret) - 7) if secret[at : at + 8] in shown
        ]


@pytest.mark.parametrize(("line", "secret"), PLANTED)
def test_a_secret_in_a_card_is_known(line: str, secret: str) -> None:
    only_a_user = f"://{secret}@" in line  # many addresses have no more than a user's name
    assert has_secret(line) or only_a_user


@pytest.mark.parametrize("line", HARMLESS)
def test_what_is_no_secret_is_published_as_it_is(line: str) -> None:
    assert published(line) == line + "\n"
    assert not has_secret(line)


SECRET_NAMES = (
    "PGPASSWORD GITHUB_PAT OPENAI_KEY AZURE_STORAGE_KEY SMTP_PASS DB_DSN MYSQL_PWD REDISCLI_AUTH NGC_CLI_API_KEY "
    "WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_ACCESS_KEY_ID "
    "COMET_API_KEY MLFLOW_TRACKING_PASSWORD NEPTUNE_API_TOKEN CLEARML_API_SECRET_KEY SENTRY_DSN SLACK_WEBHOOK_URL "
    "VAULT_TOKEN DOCKER_AUTH_CONFIG NPM_TOKEN TWINE_PASSWORD AZURE_CLIENT_SECRET AZURE_STORAGE_CONNECTION_STRING "
    "AZURE_STORAGE_SAS_TOKEN SSH_PRIVATE_KEY GPG_PASSPHRASE BORG_PASSPHRASE RCLONE_CONFIG_PASS FERNET_KEY COOKIE_SECRET "
    "JWT_SECRET SIGNING_KEY APIKEY githubPat apiKey DBPASS SMTPPASS ROOT_PW WIFI_PSK sas_token client_secret account_key "
    "private-key connection_string gitlabToken x-api-key"
).split()
HARMLESS_NAMES = (
    "TOKENIZERS_PARALLELISM SSH_AUTH_SOCK NCCL_IB_PKEY HF_TOKEN_PATH PGPASSFILE GOOGLE_APPLICATION_CREDENTIALS_FILE "
    "MAX_TOKENS KEYBOARD MONKEY COMPASS BYPASS OLDPWD NCCL_SOCKET_IFNAME CUDA_VISIBLE_DEVICES PATH LD_LIBRARY_PATH "
    "EOS_TOKEN pad_token_id num_key_value_heads query_key_value CACHE_KEY forward_pass secretName token_env "
    "NoCredentialsError PASSES HF_HOME endpoint_url requests_timeout TOKENIZER_PATH patience patch_size author authority keypoints"
).split()


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_name_is_judged_by_its_words(name: str) -> None:
    assert is_secret_name(name) and is_secret(name, "hunter2") and is_secret(name, "x")
    assert not any(
        is_secret(name, value)
        for value in ("", "0", "true", "/gpfs/home/it", "~/it", "$OTHER", "${OTHER}")
    )


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_a_name_of_other_words_is_no_secrets(name: str) -> None:
    assert not is_secret_name(name) and not is_secret(name, "hunter2")
    assert is_secret(name, "https://me:hunter2@host/") and is_secret(
        name, "hf_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9t"
    )


def test_a_name_that_is_found_in_a_value_is_looked_at_too() -> None:
    assert published('arguments=\'{"hf_token": "xaB3dE5fG7h", "a": 1}\'').count("*") == len(
        "xaB3dE5fG7h"
    )
    assert published("token='hello', password=hunter2, api_key=x1y2z3a4").count("*") == len(
        "hunter2" + "x1y2z3a4"
    )
    assert (
        published("password=token=hunter2, eos_token=</s>")
        == "password=" + "*" * 13 + ", eos_token=</s>\n"
    )


def test_what_can_be_no_secret_and_what_refers_to_one() -> None:
    assert is_secret("ALERT_WEBHOOK_URL", "https://chat.example/a1") and not is_secret(
        "TOKEN_URL", "https://host/a1"
    )
    assert (
        is_plain("<|endoftext|>")
        and is_plain("https://host/path")
        and not is_plain("https://host/path?sig=1")
    )
    assert reference_of("$A_B") == reference_of("${A_B}") == "A_B"
    assert not any(map(reference_of, ("", "$", "$A-B", "$A$B", "x$A", "${A", "$1A", "$$A")))


# ------------------------------------------------------------------- how long it takes, by counting
def repeats_without_a_bound(items: Iterable[Any], is_last: bool = True) -> Iterator[str]:
    """Repeats without a bound that are not the end of the expression, or hold more than one sign.

    A search tries each place of a text. Where all else has a bound, that takes a bounded number of
    steps, or goes on to the end of a match, behind which the next search begins: so many steps in
    all as a constant times the text's length.
    """
    found = list(items)
    for place, (operator, argument) in enumerate(found):
        is_end = is_last and all(following in WITHOUT_WIDTH for following, _ in found[place + 1 :])
        if operator in REPEATS:
            _, most, inner = argument
            if most == codes.MAXREPEAT and not (is_end and len(inner) == 1):
                yield str(inner)
            yield from repeats_without_a_bound(inner, is_end and most == 1)
        elif operator is codes.SUBPATTERN:
            yield from repeats_without_a_bound(argument[-1], is_end)
        elif operator is codes.BRANCH:
            for branch in argument[1]:
                yield from repeats_without_a_bound(branch, is_end)
        elif operator in (codes.ASSERT, codes.ASSERT_NOT):
            yield from repeats_without_a_bound(argument[1], False)


@pytest.mark.parametrize(
    "pattern", [r"://\S*[?&]sig=", r"(?:a+)+$", r"[a-z]*b", r"(?=a*)b", r"(?:a*|b)c"]
)
def test_the_count_sees_what_is_quadratic(pattern: str) -> None:
    assert list(repeats_without_a_bound(parser.parse(pattern)))


@pytest.mark.parametrize("shape", all_shapes(), ids=[shape.kind for shape in all_shapes()])
def test_no_search_for_a_secret_takes_more_steps_than_the_text_has_places(shape: Any) -> None:
    assert list(repeats_without_a_bound(parser.parse(shape.pattern, re.ASCII))) == []
    assert shape.in_text.groups == shape.in_bytes.groups and all(shape.words)


def test_nor_the_look_at_what_stands_beside_a_name() -> None:
    for shape in (
        secret_shapes._VALUE.replace(secret_shapes._SIGN, "a"),
        secret_names._SAID,
        secret_names._WORDY,
    ):
        assert list(repeats_without_a_bound(parser.parse(shape, re.ASCII))) == []


@pytest.mark.parametrize("name", ["_TOKEN", "_KEY", "_HEADER", "_FIELD", "_USER_INFO", "_QUERY"])
def test_nor_one_in_a_message(name: str) -> None:
    assert list(repeats_without_a_bound(parser.parse(getattr(messages, name)))) == []


def test_the_data_names_where_it_is_from() -> None:
    value = json.loads(RULES_FILE.read_text(encoding="utf-8"))
    assert "gitleaks" in value["about"] and value["licence"].startswith(
        "MIT License. Copyright (c)"
    )
    assert len({rule["id"] for rule in value["rules"]}) == len(value["rules"]) > 200


@pytest.mark.parametrize(
    "shape", [shape for shape in SHAPES if shape.joint], ids=lambda shape: shape.kind
)
def test_what_is_looked_at_around_stems_is_what_the_whole_line_holds(shape: SecretShape) -> None:
    """Each line behind a long one of harmless JSON, where most of it need not be looked at."""
    before = '{"eos_token": "</s>", "tokens_per_second": 12.5, "key": "layer.7"} ' * 20
    compared = 0
    for line, _ in PLANTED:
        text = (before + line).encode("utf-8", "replace")
        near = list(shape.spans(text, [], _finder().stems_in(text)))
        assert near == list(shape._found(shape.in_bytes, text)), line
        compared += bool(near)
    assert compared > 5


@pytest.mark.parametrize("name", [*SECRET_NAMES, *sorted(secret_names._SURE_WORDS)])
def test_each_secret_s_name_holds_a_stem(name: str) -> None:
    assert any(stem in name.lower() for stem in NAME_STEMS)


@pytest.mark.parametrize(
    "beside",
    [
        "key=1 config[hub_token] = @@",
        "key=1 {name: hub_token, value: @@}",
        "key=1 db_pwd\t:\t@@",
        "key=1 db_pwd  =  @@",
        "key=1 hf_token_2=@@",
        "key=1 Authorization: @@",
        "pw \u2503 @@",
    ],
)
def test_a_name_is_found_however_its_value_is_joined_to_it(beside: str) -> None:
    secret = "aB3dE5fG7h" + "I9jK"
    assert secret not in published(beside.replace("@@", secret))
