"""What answers and exceptions of a destination become: one line, the right kind, and no secret."""

from __future__ import annotations

from email.message import Message

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tr11ops.backup.remote_http import error_of_status
from tr11ops.base.errors import ArchiveFull, ArchivePermanentError, ArchiveUnavailable
from tr11ops.base.http import wait_of
from tr11ops.base.redact import LONGEST_TEXT, one_line

SECRET = "hunter2hunter2"


@given(
    before=st.text(max_size=50),
    after=st.text(max_size=300),
    form=st.sampled_from(
        [
            "Authorization: Bearer {}",
            "authorization: bearer {}",
            "token={}",
            "access_token: {}",
            "password={}",
            "upload_id={}",
            "https://me:{}@host/path",
            "http://host/path?x=1&signature={}",
            "see https://storage.example/x?upload_id={}&y",
            "-----BEGIN PRIVATE KEY-----\n{}\n",
            "ya29.{}",
        ]
    ),
)
def test_secrets_are_taken_out_of_any_text(before: str, after: str, form: str) -> None:
    shown = one_line(f"{before} {form.format(SECRET)} {after}")
    assert SECRET not in shown
    assert len(shown) <= LONGEST_TEXT
    assert shown.isprintable()


@given(st.integers(0, 10**12))
def test_seconds_are_waited_but_never_longer_than_a_day(seconds: int) -> None:
    headers = Message()
    headers["retry-after"] = str(seconds)
    assert wait_of(headers, 0.0) == (min(seconds, 86400) if seconds < 10**9 else 0)


@pytest.mark.parametrize(
    ("after", "date", "wait"),
    [
        ("Sat, 01 Jan 2022 00:01:30 GMT", "Sat, 01 Jan 2022 00:00:00 GMT", 90.0),
        ("Sat, 01 Jan 2022 00:00:00 GMT", "Sat, 01 Jan 2022 00:01:00 GMT", 0.0),
        ("Sun, 01 Jan 2023 00:00:00 GMT", "Sat, 01 Jan 2022 00:00:00 GMT", 86400.0),
        ("Sat, 01 Jan 2022 00:01:30 GMT", "", 0.0),
        ("Sat, 01 Jan 2022 00:01:30", "Sat, 01 Jan 2022 00:00:00 GMT", 90.0),
        ("soon", "Sat, 01 Jan 2022 00:00:00 GMT", 0.0),
        ("-5", "", 0.0),
        ("1e9", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_a_date_is_compared_with_the_server_s_own_clock(after: str, date: str, wait: float) -> None:
    headers = Message()
    headers["Retry-After"], headers["Date"] = after, date
    assert wait_of(headers, 4e9) == wait


@given(status=st.integers(300, 599), message=st.text(max_size=300), wait=st.floats(0, 3600))
def test_every_status_has_a_meaning(status: int, message: str, wait: float) -> None:
    error = error_of_status(status, "gs://bucket/x", "the default credentials", message, wait)
    assert type(error) in {ArchiveUnavailable, ArchiveFull, ArchivePermanentError}
    assert str(error).startswith("gs://bucket/x: ")
    assert "\n" not in str(error)
    if status >= 500 and status != 507:
        assert isinstance(error, ArchiveUnavailable) and error.wait == wait
    if status in {401, 404, 410}:
        assert isinstance(error, ArchivePermanentError)
