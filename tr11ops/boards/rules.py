"""Alert rules for Prometheus, as the text of a rule file: `tr11 metrics --rules`. Pure."""

from __future__ import annotations

from tr11ops.status.metrics import ALERT_RULES, AlertRule

HEAD = """\
# Alert rules for runs of tr11, made by `tr11 metrics --rules`: make them again after an upgrade.
# Load: rule_files in prometheus.yml. What tr11 finds itself it mails itself; these watch it from outside.
"""


def rules_text() -> str:
    """YAML that Prometheus and `promtool check rules` read."""
    import yaml

    group = {"name": "tr11", "rules": [_rule(rule) for rule in ALERT_RULES]}
    return HEAD + str(yaml.safe_dump({"groups": [group]}, sort_keys=False, width=1000))


def _rule(rule: AlertRule) -> dict[str, object]:
    return {
        "alert": rule.name,
        "expr": rule.expression,
        "for": rule.wait,
        "labels": {"severity": rule.severity},
        "annotations": {
            "summary": rule.summary,
            "runbook": f"tr11 runbook {rule.runbook}",
        },
    }
