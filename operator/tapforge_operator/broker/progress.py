"""Progress over HTTP: the path of `tapforge_api.progress`, beside the claims and under their rules. Only a Pod of the
run itself may report for it."""

from __future__ import annotations

from aiohttp import web

from tapforge_api.progress import REPORT, Progress

from ..reports import NotNow, Reports
from .auth import Auth, Denied
from .body import read_body
from .server import answer, parse, token, turn


def add_progress(app: web.Application, reports: Reports, auth: Auth) -> None:
    async def report(request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["run"]
        shown = token(request)
        async with turn(request, proved=auth.knows(shown)):
            run = (await auth.caller(shown)).run
            said = parse(await read_body(request), Progress)
        if run is None or (run.namespace, run.name) != (namespace, name):
            who = f"a Pod of TrainingRun {run.namespace}/{run.name}" if run is not None else "no Pod of a TrainingRun"
            text = f"only a Pod of TrainingRun {name} in namespace {namespace} may report for it; this is {who}"
            raise Denied(403, "Forbidden", text)
        try:
            return answer(await reports.take(run.uid, said))
        except NotNow as error:
            raise Denied(503, "NotNow", str(error)) from error

    app.router.add_post(REPORT, report)
