"""The edge to the hub: what sync, upload and the remote status need of it, and how it fails.

Its errors are one line without a secret: `HubUnavailable` (later may be another matter),
`HubPermanentError` (a person is needed; the text says for what), and of the latter `HubMissing` (no
such thing) and `HubConflict` (someone committed meanwhile). Everything is tried again with growing
waits, as the caller's policy says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from tr11ops.base.errors import HubMissing, HubPermanentError, HubUnavailable
from tr11ops.base.retry import RetryPolicy, retry
from tr11ops.hub.base import (
    DEFAULT_BRANCH,
    Credentials,
    HubFile,
    Operation,
    Progress,
    Repository,
    endpoint_of,
    hub_retries,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TIMEOUT_SECONDS = 60.0
LOOKED_AT_ONCE = 500  # paths in one request

_T = TypeVar("_T")


class Hub:
    """One hub as one account. Methods raise HubUnavailable, HubPermanentError, and FileChanged for
    a local file.

    `endpoint` None is $HF_ENDPOINT, or the public hub. `timeout` is how long one request may be
    silent, in seconds. Methods may be called by several threads.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        credentials: Credentials | None = None,
        retries: RetryPolicy | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        try:
            self.endpoint = endpoint_of(endpoint, os.environ)
        except ValueError as error:
            raise HubPermanentError(str(error)) from None
        self.credentials = credentials or Credentials()
        self._retries = retries or hub_retries()
        self._timeout = timeout

    # ------------------------------------------------------------------------- repositories
    def ensure_repository(self, repository: Repository, private: bool = True) -> str:
        """The newest commit of the repository's branch; both are made when they are not there.

        `private` holds for a repository that is made; one that is there stays as it is.
        """
        try:
            return self.head(repository)
        except HubMissing:
            pass

        def make(api: HfApi) -> None:
            api.create_repo(
                repository.name, repo_type=repository.kind, private=private, exist_ok=True
            )
            if repository.branch != DEFAULT_BRANCH:
                api.create_branch(
                    repository.name,
                    branch=repository.branch,
                    repo_type=repository.kind,
                    exist_ok=True,
                )

        self._ask(f"making {repository.name}", make)
        return self.head(repository)

    def head(self, repository: Repository) -> str:
        """The id of the branch's newest commit. Raises HubMissing."""
        return self.newest(repository)[0]

    def newest(self, repository: Repository) -> tuple[str, bool]:
        """The id of the branch's newest commit, and whether only members see the repository. Raises
        HubMissing.
        """

        def ask(api: HfApi) -> tuple[str, bool]:
            from tr11ops.hub.committing import commit_id

            facts = api.repo_info(
                repository.name, repo_type=repository.kind, revision=repository.branch
            )
            return commit_id(facts.sha), facts.private is True

        return self._ask(repository.name, ask)

    def is_private(self, repository: Repository) -> bool:
        """Whether only members see the repository. Raises HubMissing."""
        return self.newest(repository)[1]

    # ------------------------------------------------------------------------- reading
    def list_tree(self, repository: Repository, revision: str | None = None) -> dict[str, HubFile]:
        """All files of a commit (default: the branch's newest), at any depth."""

        def ask(api: HfApi) -> dict[str, HubFile]:
            tree = api.list_repo_tree(
                repository.name,
                recursive=True,
                revision=revision or repository.branch,
                repo_type=repository.kind,
            )
            return _entries(tree)

        return self._ask(f"the files of {repository.name}", ask)

    def look(
        self, repository: Repository, paths: Iterable[str], revision: str | None = None
    ) -> dict[str, HubFile]:
        """Those of the paths that are files of the commit."""
        wanted = list(paths)

        def ask(api: HfApi) -> dict[str, HubFile]:
            found: dict[str, HubFile] = {}
            for start in range(0, len(wanted), LOOKED_AT_ONCE):
                part = wanted[start : start + LOOKED_AT_ONCE]
                found |= _entries(
                    api.get_paths_info(
                        repository.name,
                        part,
                        revision=revision or repository.branch,
                        repo_type=repository.kind,
                    )
                )
            return found

        return self._ask(f"files of {repository.name}", ask)

    def read(
        self,
        repository: Repository,
        path: str,
        offset: int = 0,
        length: int | None = None,
        revision: str | None = None,
    ) -> bytes:
        """Bytes of a file, all of them or a part; fewer than `length` only at the file's end.
        Raises HubMissing.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        if length == 0:
            return b""
        address = hf_hub_url(
            repository.name,
            path,
            repo_type=repository.kind,
            revision=revision or repository.branch,
            endpoint=self.endpoint,
        )
        headers = {"Accept-Encoding": "identity"}
        if offset or length is not None:
            headers["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"

        def ask(api: HfApi) -> bytes:
            answer = get_session().get(
                address, headers={**build_hf_headers(token=api.token), **headers}
            )
            if answer.status_code == 416:  # begins behind the end
                return b""
            hf_raise_for_status(answer)
            if "Range" not in headers:
                return answer.content
            if answer.status_code != 206:  # a hub that knows no ranges gives the whole
                return answer.content[offset : None if length is None else offset + length]
            if not answer.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                raise json.JSONDecodeError("not the part that was asked for", "", 0)
            return answer.content

        return self._ask(f"{path} of {repository.name}", ask)

    # ------------------------------------------------------------------------- writing
    def commit(
        self,
        repository: Repository,
        operations: Iterable[Operation],
        message: str,
        *,
        parent: str | None = None,
        progress: Progress | None = None,
    ) -> str:
        """Make one commit of all operations and return its id; the newest commit's where nothing
        would change.

        Large files are sent first, those that the hub has are not sent again; the commit comes
        last, so all of it is seen or nothing. It is never made twice: a commit carries its own
        word, and where an answer was lost it is looked for before it is tried again. With `parent`
        HubConflict is raised when someone has committed since it; without, the commit is made on
        top of theirs.
        """
        from tr11ops.hub.committing import CommitAttempt

        with ExitStack() as opened:
            attempt = CommitAttempt(
                repository,
                tuple(operations),
                message=message,
                parent=parent,
                progress=progress,
                opened=opened,
            )
            return self._ask(f"a commit to {repository.name}", attempt)

    # ------------------------------------------------------------------------- how it is asked
    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        from tr11ops import __version__
        from tr11ops.hub.transport import install

        install(self._timeout)
        token = self.credentials.token
        # False: no token of the library's own finding, which may be another account's
        return HfApi(
            self.endpoint,
            token=False if token is None else token.reveal(),
            library_name="tr11",
            library_version=__version__,
        )

    def _ask(self, what: str, work: Callable[[HfApi], _T]) -> _T:
        """Do `work` until it succeeds, is refused, or the policy gives up."""
        api = self._api()
        from tr11ops.hub.transport import failure_of, one_question

        def attempt() -> _T:
            try:
                with one_question():
                    return work(api)
            except Exception as error:
                failure = failure_of(error, what, self.endpoint, self.credentials)
                if failure is None:
                    raise
                raise failure from None

        return retry(attempt, self._retries, HubUnavailable)


def _entries(tree: Iterable[Any]) -> dict[str, HubFile]:
    from huggingface_hub.hf_api import RepoFile

    return {
        item.path: HubFile(
            item.size, item.blob_id, item.lfs.sha256 if item.lfs is not None else None
        )
        for item in tree
        if isinstance(item, RepoFile)
    }
