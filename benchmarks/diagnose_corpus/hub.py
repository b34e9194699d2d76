"""A mirror job against a hub, or an object store, that refuses: `hub.py
401|403|404|429|500|refused|dns|gcs-401|...`.

The server runs in this process; what the client libraries make of its answers is theirs.
"""

import http.server
import json
import os
import sys
import threading
import time
import urllib.request
from typing import Any

import huggingface_hub

HOW = sys.argv[1]
STATUS = int(HOW[-3:]) if HOW[-3:].isdigit() else 403
WHY = {
    401: ("Invalid credentials in Authorization header", "Invalid username or password."),
    403: ("", "Forbidden: you must use a write token to upload to a repository."),
    404: ("RepoNotFound", "Repository not found"),
    429: (
        "",
        "We had to rate limit you, you hit the quota of 128 repository commits per hour. Retry after 1 hour.",
    ),
    500: ("", "Internal Error - We're working hard to fix this as soon as possible!"),
    503: ("", "We encountered an internal error. Please try again."),
}
DENIED = " does not have storage.objects.create access to the Google Cloud Storage object."
GCS = {
    401: ("Anonymous caller" + DENIED, "required"),
    403: ("bloom-backup@tr11.iam.gserviceaccount.com" + DENIED, "forbidden"),
    404: ("The specified bucket does not exist.", "notFound"),
    503: ("We encountered an internal error. Please try again.", "backendError"),
}


class Refuse(http.server.BaseHTTPRequestHandler):
    def answer(self) -> None:
        gcs = HOW.startswith("gcs")
        if HOW == "gcs-quota":
            message, reason, status = (
                "The project exceeded the rate limit for creating and updating objects.",
                "",
                429,
            )
        else:
            message, reason = GCS[STATUS] if gcs else WHY[STATUS][::-1]
            status = STATUS
        error = {
            "code": status,
            "message": message,
            "errors": [{"message": message, "reason": reason}],
        }
        body = json.dumps({"error": error if gcs else message}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if not gcs and reason:
            self.send_header("X-Error-Code" if STATUS == 404 else "X-Error-Message", reason)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = f"http://127.0.0.1:{server.server_port}"
    if HOW == "refused":
        server.server_close()
        where = "http://127.0.0.1:9"
    elif HOW == "dns":
        where = "http://huggingface.invalid"
    say = lambda text: print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)  # noqa: E731
    say("sync: mirror of /scratch/checkpoints/tr11-176B-ml/tr11-176B-ml-logs")
    say("sync: 3 new files of tensorboard/main, 1 of logs/main (41.2 MB)")
    if not HOW.startswith("gcs"):
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        api = huggingface_hub.HfApi(endpoint=where, token="hf_" + "x" * 20)
        say("sync: uploading logs/main/main_log.txt")
        api.upload_file(
            path_or_fileobj=b"log",
            path_in_repo="main_log.txt",
            repo_id="bigscience/tr11-176B-ml-logs",
        )
        return
    say(
        "sync: copying checkpoints/global_step94000/layer_03-model_00-model_states.pt to gs://bigscience-backups"
    )
    url = f"{where}/upload/storage/v1/b/bigscience-backups/o?name=layer_03-model_00-model_states.pt"
    try:
        urllib.request.urlopen(urllib.request.Request(url, b"{}", method="POST"))
    except urllib.error.HTTPError as error:
        raise OSError(
            f"{error.code} {error.reason}: POST {url}: {error.read().decode()}"
        ) from error


if __name__ == "__main__":
    main()
