"""Runs inside NVRx's own environment: {name: path of a log} in, {name: what its restart agent says}
out, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

from nvidia_resiliency_ext.attribution.restart_agent import RestartAgent, RestartAgentRequest


def main() -> None:
    found = {}
    for name, path in json.load(sys.stdin).items():
        began = time.perf_counter()
        result = (
            RestartAgent()
            .run(RestartAgentRequest(log_path=path, job_id=name, cycle_id=1))
            .result.to_payload()
        )
        primary = result.get("primary_failure") or {}
        found[name] = {
            "decision": result["decision"],
            "line": primary.get("line"),
            "node": primary.get("node"),
            "failure_class": primary.get("failure_class"),
            "seconds": time.perf_counter() - began,
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
