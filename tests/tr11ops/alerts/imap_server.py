"""A small IMAP server on the loopback: LOGIN, EXAMINE, UID SEARCH, UID FETCH, LOGOUT, as RFC 3501 has them."""

from __future__ import annotations

import re
import shlex
import socketserver
import threading
from dataclasses import dataclass, field
from email import message_from_bytes
from typing import Any

USER, PASSWORD = "bot@example.org", 'tr0ub4 "dor'


@dataclass
class Letterbox:
    """The mails of the one folder, by UID; what was asked; and how the server misbehaves."""

    mails: dict[int, bytes] = field(default_factory=dict)
    validity: int = 7
    commands: list[str] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    is_terse: bool = False  # a search is answered without a list
    drips: threading.Event = field(default_factory=threading.Event)

    def put(self, content: bytes) -> int:
        number = max(self.mails, default=0) + 1
        self.mails[number] = content
        return number


class Conversation(socketserver.StreamRequestHandler):
    server: ImapServer

    def handle(self) -> None:
        self.say("* OK ready")
        while line := self.rfile.readline().decode().strip():
            tag, _, rest = line.partition(" ")
            self.server.box.commands.append(rest)
            words = shlex.split(rest)
            if not getattr(self, f"do_{words[0].lower()}")(tag, words[1:]):
                return

    def say(self, text: str) -> None:
        self.wfile.write(text.encode() + b"\r\n")

    def do_capability(self, tag: str, words: list[str]) -> bool:
        self.say("* CAPABILITY IMAP4rev1")
        self.say(f"{tag} OK done")
        return True

    def do_login(self, tag: str, words: list[str]) -> bool:
        good = words == [USER, PASSWORD]
        self.say(f"{tag} OK in" if good else f"{tag} NO [AUTHENTICATIONFAILED] wrong: {words[1]}")
        return True

    def do_examine(self, tag: str, words: list[str]) -> bool:
        box = self.server.box
        while box.drips.is_set() and not self.server.over.wait(0.02):
            self.say("* OK still looking")
        if words != ["INBOX"]:
            self.say(f"{tag} NO there is no such folder")
            return True
        self.say(f"* {len(box.mails)} EXISTS")
        self.say(f"* OK [UIDVALIDITY {box.validity}] UIDs valid")
        self.say(f"{tag} OK [READ-ONLY] done")
        return True

    def do_uid(self, tag: str, words: list[str]) -> bool:
        if words[0] == "SEARCH":
            if not self.server.box.is_terse:
                self.say("* SEARCH " + " ".join(map(str, self.search(words[1:]))))
        else:
            self.fetch(int(words[1]), " ".join(words[2:]))
        self.say(f"{tag} OK done")
        return True

    def search(self, words: list[str]) -> list[int]:
        mails = self.server.box.mails
        found = sorted(mails)
        if words[0] == "UID":
            first = int(words[1].split(":")[0])
            found = [number for number in found if number >= first] or found[
                -1:
            ]  # `n:*` is never empty
        keys = words[2:]
        assert keys[0] == "OR" and keys[1] == keys[4] == "HEADER"
        parsed = {number: message_from_bytes(mails[number]) for number in found}
        pairs = ((keys[2], keys[3]), (keys[5], keys[6]))
        return [
            n for n in found if any(text in str(parsed[n].get(name, "")) for name, text in pairs)
        ]

    def fetch(self, number: int, items: str) -> None:
        box = self.server.box
        if number not in box.mails:
            return
        match = re.search(r"BODY\.PEEK\[\]<0\.(\d+)>", items)
        assert match is not None, items  # a reading that is not read-only
        box.fetched.append(number)
        content = box.mails[number][: int(match[1])]
        self.say(f"* {number} FETCH (UID {number} BODY[]<0> {{{len(content)}}}")
        self.wfile.write(content + b")\r\n")

    def do_logout(self, tag: str, words: list[str]) -> bool:
        self.say("* BYE")
        self.say(f"{tag} OK done")
        return False


class ImapServer(socketserver.ThreadingTCPServer):
    """Serves one letter box on a free port until it is closed."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Conversation)
        self.box = Letterbox()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was cut off is no error of the server."""

    def close(self) -> None:
        self.over.set()
        self.shutdown()
        self.thread.join()
        self.server_close()
