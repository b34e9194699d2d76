"""What the site's support hears of a fault that only the site can repair: no commands of ours, and
who can be asked.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.alerts.mail_text.shared import (
    LONGEST_SUBJECT,
    clean,
    message_identity,
    moment,
)
from tr11ops.alerts.policy import Policy
from tr11ops.alerts.state import OVER, Alert, Message, stamp
from tr11ops.base.glyphs import wrapped


def site_message(alert: Alert, kind: str, policy: Policy, now: float) -> Message:
    """The mail about a fault that began, or that is over (`kind` in OVER). The delivery URLs do not
    get it.
    """
    name = f"{alert.fingerprint}-{stamp(alert.began)}-{alert.sends + 1}-site"
    over = kind in OVER
    return Message(
        id=name,
        kind="site",
        alert=alert.fingerprint,
        detector=alert.detector,
        severity=alert.severity,
        subject=clean(f"{'[OK] ' if over else ''}{policy.run}: {alert.title}", LONGEST_SUBJECT),
        body="\n".join(_lines(alert, over, policy, now)) + "\n",
        to=(policy.support,),
        time=now,
        message_id=message_identity(name, policy),
        urls=False,
    )


def _lines(alert: Alert, over: bool, policy: Policy, now: float) -> Iterator[str]:
    yield from ("Hello,", "")
    if over:
        yield from wrapped(f"the training {policy.run} has the nodes again that it needs.")
    else:
        yield from wrapped(
            f"the training {policy.run} does not have the nodes that it needs: {alert.title}."
        )
        yield ""
        for text in alert.evidence:
            yield from wrapped(text, "  ")
        yield from ("", "Could you please look at them? Nothing was drained or resumed by us.")
    yield ""
    yield from wrapped(
        f"To be asked about it: {', '.join(policy.on_duty(now)) or 'no one is named'}."
    )
    yield f"Seen:  {moment(alert.last_seen, policy)}"
