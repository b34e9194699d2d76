"""The server: pages, a stream of changes, and the forms of those who have a token."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from msgspec.structs import astuple, replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from tr11ops.alerts.mail_route import is_address
from tr11ops.alerts.policy import policy_of
from tr11ops.api import Answer
from tr11ops.base.errors import Refusal
from tr11ops.base.observed import Unknown, known
from tr11ops.base.shipped import page_lines, page_names, page_title
from tr11ops.rundir.journal import user_name
from tr11ops.serve.access import CookieSigner, RateLimit, WebSession, is_known_host
from tr11ops.serve.acts import AT_ONCE, WebAct, carry_out
from tr11ops.serve.answers import (
    ALERTS_CHANGED,
    WHAT_THEY_DO,
    AnswerableLink,
    LinkRefused,
    answerable_link,
)
from tr11ops.serve.details import DetailsReader, read_log
from tr11ops.serve.pages import ASSETS, Pages, asset
from tr11ops.serve.poller import News, RunPoller
from tr11ops.serve.tokens import owner_of
from tr11ops.serve.view import RunView, in_order, sums_of, view_of
from tr11ops.status.run_list import RunList
from trainer.contract.errors import Tr11Error
from trainer.contract.record import Record

COOKIE = "tr11"
LARGEST_FORM = 16 << 10
FORM_SECONDS = 10.0
TICK_SECONDS = 1.0
AFTER_ACT_SECONDS = 5.0  # a page says that it is looking again rather than to keep anyone longer
BEAT_SECONDS = 15.0
MOST_STREAMS = 600
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ServeSettings(Record):
    """How it is served. `link_key`: what links in mails are signed with; `names`: host names under
    which it is reached; `is_private`: reading needs a token too; `is_secure`: the browser reaches it
    by TLS.
    """

    tokens: Path
    link_key: Path
    names: tuple[str, ...] = ()
    is_private: bool = False
    is_secure: bool = False


class Served:
    """The answers to requests."""

    def __init__(self, watcher: RunPoller, settings: ServeSettings) -> None:
        self.watcher = watcher
        self.settings = settings
        self.seal = CookieSigner()
        self.pages = Pages()
        self.reader = DetailsReader()
        self.logins = RateLimit(5)
        self.all_logins = RateLimit(60)
        self.acts = RateLimit(20)
        self.streams = 0
        self._names = (*settings.names, socket.gethostname(), socket.getfqdn())
        self._list: tuple[int, float, list[RunView]] = (-1, 0.0, [])

    # ------------------------------------------------------------------------- who asks
    def session(self, request: Request) -> WebSession | None:
        return self.seal.opened(request.cookies.get(COOKIE, ""))

    def refusal(self, request: Request) -> Response | None:
        """Why a request is answered no further; None where it is."""
        self.watcher.asked = time.monotonic()
        if not is_known_host(request.headers.get("host", ""), self._names):
            return PlainTextResponse("this server has another name (tr11 serve --name)", 421)
        is_open = request.url.path.startswith(("/login", "/assets/", "/answer/"))
        if self.settings.is_private and not is_open and self.session(request) is None:
            return RedirectResponse("/login", 303)
        return None

    def views(self) -> list[RunView]:
        """Of all runs, what needs a person first; made once for all who ask within a second."""
        version, made, kept = self._list
        now = time.time()
        if version != self.watcher.version or now - made > 1.0:
            kept = in_order([view_of(news, now) for news in self.watcher.news()])
            self._list = (self.watcher.version, now, kept)
        return kept

    def page(self, request: Request, name: str, status: int = 200, **values: Any) -> HTMLResponse:
        session = self.session(request)
        form = ""
        if session is not None:
            form = self.seal.form(request.cookies.get(COOKIE, ""))
        is_part = request.headers.get("x-part") == "1"
        text = self.pages.render(name, is_part=is_part, session=session, form=form, **values)
        return HTMLResponse(text, status)

    # ------------------------------------------------------------------------- reading
    async def runs(self, request: Request) -> Response:
        views = self.views()
        return self.page(
            request,
            "list",
            runs=views,
            counts=RunList.of(view.listed for view in views).sentence,
            sums=sums_of(self.watcher.news()),
            troubles={str(root): why for root, why in self.watcher.troubles.items() if why},
            roots=self.watcher.roots,
        )

    async def run(self, request: Request) -> Response:
        news = await self.after_acts(request)
        if news is None:
            return self.missing(request)
        return self.page(
            request,
            "run",
            run=view_of(news, time.time()),
            asks_address=asks_address(self.session(request), news),
        )

    async def details(self, request: Request) -> Response:
        news = self.found(request)
        if news is None:
            return self.missing(request)
        return self.page(
            request, "details", details=await asyncio.to_thread(self.reader.details, news)
        )

    async def incident(self, request: Request) -> Response:
        news = self.found(request)
        wanted = request.path_params["fingerprint"]
        if news is None:
            return self.missing(request)
        view = view_of(news, time.time())
        if news.is_before_act:
            return RedirectResponse(f"/run/{news.key}", 303)
        alert = next((one for one in view.alerts if one.fingerprint == wanted), None)
        if alert is None:
            return self.missing(request, "That alert is not open any more.")
        return self.page(
            request,
            "incident",
            run=view,
            alert=alert,
            faults=[one for one in view.faults if wanted in one.names],
            asks_address=asks_address(self.session(request), news),
        )

    async def log(self, request: Request) -> Response:
        news = self.found(request)
        if news is None:
            return JSONResponse({"lines": [], "why": "no such run"}, 404)
        found = await asyncio.to_thread(read_log, news, request.query_params.get("q", "")[:200])
        why = found.why if isinstance(found, Unknown) else ""
        return JSONResponse({"lines": known(found, ()), "why": why})

    async def runbook(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in page_names():
            return self.missing(request, "There is no such runbook page.")
        # a line for each paragraph: the browser wraps them
        words = "\n".join(page_lines(f"{name}.md", 10_000))
        return self.page(request, "runbook", title=page_title(name), text=words)

    async def document(self, request: Request) -> Response:
        """What the list holds, for other tools."""
        keys = ("key", "name", "variant", "folder", "word", "why", "iteration", "loss", "eta")
        runs = [{key: getattr(view, key) for key in keys} for view in self.views()]
        return JSONResponse({"schema": 1, "runs": runs})

    async def events(self, request: Request) -> Response:
        if self.streams >= MOST_STREAMS:
            return PlainTextResponse("too many readers", 503, {"Retry-After": "30"})
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=headers)

    async def _events(self) -> AsyncIterator[str]:
        """A line for each change, only the newest: who reads slowly is told less often."""
        self.streams += 1
        try:
            seen, said = -1, 0.0
            while True:
                version, now = self.watcher.version, time.monotonic()
                if version != seen:
                    seen, said = version, now
                    yield f"event: change\ndata: {version}\n\n"
                elif now - said > BEAT_SECONDS:
                    said = now
                    yield ": still here\n\n"
                await asyncio.sleep(TICK_SECONDS)
        finally:
            self.streams -= 1

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return PlainTextResponse("not found", 404)
        body, kind = asset(name)
        return Response(body, media_type=kind, headers={"Cache-Control": "max-age=300"})

    def found(self, request: Request) -> News | None:
        return self.watcher.find(request.path_params["key"])

    async def after_acts(self, request: Request) -> News | None:
        """As `found`; a look that began before an act is soon followed by another, which is awaited."""
        until = time.monotonic() + AFTER_ACT_SECONDS
        while (news := self.found(request)) and news.is_before_act and time.monotonic() < until:
            await asyncio.sleep(TICK_SECONDS / 5)
        return news

    def missing(self, request: Request, why: str = "There is no such run here.") -> Response:
        return self.page(request, "message", 404, title="Not found", lines=(why,), back="/")

    # ------------------------------------------------------------------------- acting
    def sign_in(
        self, request: Request, status: int = 200, why: str = "", key: str = ""
    ) -> Response:
        """The form for a token; who came from a run goes on there. Whose server it is, and where, is for
        those alone who may read without a token.
        """
        shown: dict[str, Any] = {"why": why, "run_key": key}
        if not self.settings.is_private:
            shown |= {"user": user_name(), "host": socket.gethostname()}
        return self.page(request, "login", status, **shown, tokens=self.settings.tokens)

    async def login(self, request: Request) -> Response:
        if request.method == "GET":
            return self.sign_in(request, key=request.query_params.get("run", ""))
        address = request.client.host if request.client else "?"
        if not (self.logins.allows(address) and self.all_logins.allows("")):
            return self.sign_in(request, 429, "Too many tries: wait a minute.")
        form = await read_form(request)
        if form is None or not is_same_site(request):
            return self.sign_in(request, 400, "That form was not sent from this page.")
        name = await asyncio.to_thread(
            owner_of, self.settings.tokens, form.get("token", "").strip()
        )
        if name is None:
            return self.sign_in(request, 403, "That token opens nothing.", form.get("run", ""))
        news = self.watcher.find(form.get("run", ""))
        answer = RedirectResponse("/" if news is None else f"/run/{news.key}", 303)
        secure = self.settings.is_secure or request.url.scheme == "https"
        cookie = self.seal.session(name)
        answer.set_cookie(COOKIE, cookie, httponly=True, samesite="strict", secure=secure)
        return answer

    async def logout(self, request: Request) -> Response:
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(COOKIE)
        return answer

    async def act(self, request: Request) -> Response:
        """A form of a run's page: what takes nothing away is done at once, the rest is previewed."""
        session = self.session(request)
        cookie = request.cookies.get(COOKIE, "")
        form = await read_form(request)
        if session is None:
            return self.sign_in(
                request, 403, "Acting needs your token.", request.path_params["key"]
            )
        sealed = form is not None and self.seal.is_form_of(cookie, form.get("form", ""))
        if form is None or not sealed or not is_same_site(request):
            return self._said(request, 403, "That form was not sent from this page.")
        if not self.acts.allows(session.name):
            return self._said(request, 429, "Too much at once: wait a minute.")
        news = self.found(request)
        if news is None or news.run is None or not news.can_act:
            return self._said(request, 409, "Nothing can be changed from here: this is a copy.")
        return await self._acted(request, news, form, session)

    async def _acted(
        self, request: Request, news: News, form: dict[str, str], session: WebSession
    ) -> Response:
        cookie = request.cookies.get(COOKIE, "")
        run = news.run
        names = ("action", "reason", "alert", "length", "nodes", "address", "shown")
        given = {name: form[name] for name in names if form.get(name)}
        act = WebAct(news.key, who=session.name, **{"action": "", **given})
        try:
            act = replace(act, reason=" ".join(act.reason.split())).checked()
            confirmed = self.seal.is_plan(form.get("plan", ""), cookie, *astuple(act))
            shows = act.action not in AT_ONCE and not confirmed
            changed = ""
            assert run is not None
            answer = await asyncio.to_thread(carry_out, run, act, shows)
            if answer.has_changed:
                shows = True
                changed = answer.lines[-1]
                answer = await asyncio.to_thread(carry_out, run, act, shows)
        except Tr11Error as error:
            return self._said(request, 400, error.sentence, news.key)
        if not shows:
            return self._outcome(request, news, answer, act)
        act = replace(act, shown=answer.plan)
        return self.page(
            request,
            "preview",
            run=view_of(news, time.time()),
            act=act,
            answer=answer,
            plan=self.seal.plan(cookie, *astuple(act)),
            changed=changed,
        )

    async def answer(self, request: Request) -> Response:
        """What a link in a mail leads to: a page with one button; only the button acts, for scanners
        of mail follow links.
        """
        token = request.path_params["token"]
        key = self.settings.link_key
        try:
            asked = await asyncio.to_thread(answerable_link, token, key, self.watcher.news())
        except LinkRefused as error:
            return self._said(request, error.status, error.sentence)
        if request.method == "POST":
            return await self._answered(request, asked)
        return self._asked(request, asked, request.query_params.get("do", "ack"))

    def _asked(
        self, request: Request, asked: AnswerableLink, action: str, changed: str = ""
    ) -> Response:
        """The page of a link: the alerts as they are now, and the button."""
        buttons = asked.buttons
        if action not in buttons:
            return self.missing(request, "There is no such button.")
        return self.page(
            request,
            "answer",
            asked=asked,
            token=request.path_params["token"],
            action=action,
            changed=changed,
            label=buttons[action],
            effect=WHAT_THEY_DO[action],
            others=[(name, words) for name, words in buttons.items() if name != action],
        )

    async def _answered(self, request: Request, asked: AnswerableLink) -> Response:
        form = await read_form(request)
        if form is None or not is_same_site(request):
            return self._said(request, 403, "That form was not sent from this page.")
        if not self.acts.allows(asked.link.who):
            return self._said(request, 429, "Too much at once: wait a minute.")
        assert asked.news.run is not None
        if form.get("shown", asked.shown) != asked.shown:
            return self._asked(request, asked, form.get("action", ""), ALERTS_CHANGED)
        try:
            act = asked.act(form.get("action", ""))
            answer = await asyncio.to_thread(carry_out, asked.news.run, act)
        except Tr11Error as error:
            return self._said(request, 400, error.sentence)
        return self._outcome(request, asked.news, answer, act)

    def _outcome(self, request: Request, news: News, answer: Answer, act: WebAct) -> Response:
        """That it was done, or why not, and what a person may want next; the pages are to show it
        soon.
        """
        view = view_of(news, time.time())
        self.watcher.look_again(news.key)
        title = "Not done"
        status = 409
        if answer.exit_code == 0:
            title = "Done"
            status = 200
        return self.page(
            request, "done", status, run=view, act=act, title=title, lines=answer.lines
        )

    def _said(self, request: Request, status: int, why: str, key: str = "") -> Response:
        back = f"/run/{key}" if key else "/"
        shown = {"lines": why.splitlines(), "back": back}
        return self.page(request, "message", status, title="Not done", **shown)


def asks_address(session: WebSession | None, news: News) -> bool:
    """Whether a person's token has a name that no mail of the run reaches: a shift goes to no such."""
    if session is None or news.run is None:
        return False
    policy = policy_of(news.run.card, mark="", host="")
    address = policy.address_of(session.name)
    return bool(policy.everyone) and not is_address(address)


async def read_form(request: Request) -> dict[str, str] | None:
    """The fields of a form; None where it is too large, too slow, or none."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        return None
    body = bytearray()
    try:
        async with asyncio.timeout(FORM_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > LARGEST_FORM:
                    return None
        fields = parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=20)
    except (TimeoutError, ValueError):
        return None
    return dict(fields)


def is_same_site(request: Request) -> bool:
    """Whether the browser says that a page of this server sent it; an old one says nothing."""
    if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        return False
    origin = request.headers.get("origin", "")
    return origin in {"", "null"} or origin.partition("://")[2] == request.headers.get("host", "")


Handler = Callable[[Request], Awaitable[Response]]


def application(watcher: RunPoller, settings: ServeSettings) -> Starlette:
    """The whole server, for uvicorn."""
    served = Served(watcher, settings)

    async def guarded(handler: Handler, request: Request) -> Response:
        try:
            answer = served.refusal(request) or await handler(request)
        except (Refusal, Tr11Error) as error:
            answer = PlainTextResponse(error.sentence, 503)
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    table = (
        ("/", served.runs),
        ("/runs.json", served.document),
        ("/events", served.events),
        ("/run/{key}", served.run),
        ("/run/{key}/details", served.details),
        ("/run/{key}/log", served.log),
        ("/run/{key}/alert/{fingerprint}", served.incident),
        ("/run/{key}/act", served.act, "POST"),
        ("/answer/{token}", served.answer, "GET", "POST"),
        ("/runbook/{name}", served.runbook),
        ("/assets/{name}", served.asset),
        ("/login", served.login, "GET", "POST"),
        ("/logout", served.logout, "POST"),
    )
    # without another method: GET
    routes = [
        Route(path, partial(guarded, handler), methods=how or None) for path, handler, *how in table
    ]
    return Starlette(routes=routes)
