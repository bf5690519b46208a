"""The server: who may ask, that it only reads, what it answers, and the commands that start it."""

import asyncio
import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio
from click.testing import CliRunner
from load.made_run import Shape, make_run
from PIL import Image

from tapforge_envs.serving.page_site import CannotListen
from tapforge_trainer.cli.main import cli
from tapforge_trainer.dashboard.serve import serving
from tapforge_trainer.run.assembly import ConfigurationError

DEADLINE = aiohttp.ClientTimeout(total=60)
SMALL = Shape(32, steps=3, screens=6, groups=2, prompt=8, answer=4, measured=12)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", SMALL)
    make_run(folder / "two", SMALL, seed=7)
    return folder


@pytest_asyncio.fixture
async def page(runs) -> AsyncIterator[str]:
    async with serving([runs], "127.0.0.1", 0) as address:
        yield address


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=DEADLINE) as opened:
        yield opened


async def get(session: aiohttp.ClientSession, address: str, headers: dict | None = None, **words: str):
    async with session.get(address, params=words, headers=headers) as answer:
        return answer.status, await answer.json()


async def settled(session: aiohttp.ClientSession, page: str, run: str) -> None:
    async with asyncio.timeout(60):
        while True:
            _, found = await get(session, f"{page}api/runs/{run}/episodes", recording="rollout", sort="-advantage")
            if found["read"] == found["all"] > 0 and found["episodes"][0]["advantage"] is not None:
                return
            await asyncio.sleep(0.05)


async def test_everything_is_answered(page, session, runs):
    _, listed = await get(session, f"{page}api/runs")
    assert [run["name"] for run in listed["runs"]] == ["one", "two"]
    api = f"{page}api/runs/one"
    await settled(session, page, "one")
    _, first = await get(session, api)
    assert first["state"] == "stopped" and first["update"] == 2 and first["facts"]["seed"] == "0"
    [mode] = first["success"]
    assert (mode["before"]["success"], mode["before"]["low"], mode["after"]["success"]) == (0.3, 0.2, 0.8)
    assert [one["policy"] for one in first["baselines"]] == ["random"]
    assert sum(first["episodes"]["outcomes"]["rollout"].values()) == 32
    assert {one["words"] for one in first["time"]["parts"]} >= {"the learner waits for phones"}
    assert len(first["templates"]) == 8

    _, figures = await get(session, f"{api}/figures")
    assert (
        "success over all valid attempts"
        in {f["name"]: f["meaning"] for f in figures["figures"]}["rollout/success_rate"]
    )
    _, series = await get(session, f"{api}/figures", name="learner/entropy")
    assert series["updates"] == [1, 2] and len(series["figures"]["learner/entropy"]) == 2

    _, facets = await get(session, f"{api}/facets")
    assert {one["value"]: one["count"] for one in facets["recording"]} == {
        "rollout": 32, "evaluation/before-sampled": 12, "evaluation/after-sampled": 12
    }  # fmt: skip
    named = {"recording": "rollout", "name": "g1-000001.2.0"}
    _, episode = await get(session, f"{api}/episode", **named)
    step = episode["steps"][0]
    assert step["size"] == [96, 160] and len(episode["members"]) == 8
    if step["gesture"]:
        assert step["gesture"]["words"].startswith("tap (")
    async with session.get(f"{api}/frame", params={"recording": "rollout", "name": step["frame"]}) as answer:
        assert answer.content_type == "image/png" and (await answer.read()).startswith(b"\x89PNG")
    _, whole = await get(session, f"{api}/step", **named, step="1")
    assert len(whole["answer"]["tokens"]) == 4 and whole["answer"]["tokens"][0]["text"] is not None
    assert whole["answer"]["learned"] == 1 and whole["not_learned"] == ""
    for token in whole["answer"]["tokens"]:
        assert token["learner_logprob"] == token["logprob"] - token["gap"] and 0 < abs(token["gap"]) < 0.01
        assert token["entropy"] > 0
    # A damaged line of the learner's keeps no step from being shown.
    path = runs / "one" / "rollout" / "learner-000001.jsonl"
    written = path.read_bytes()
    path.write_bytes(written.replace(b'"gaps"', b'"gap_"'))
    _, damaged = await get(session, f"{api}/step", **named, step="1")
    path.write_bytes(written)
    assert damaged["answer"]["learned"] is None and "no learner's tokens at byte" in damaged["not_learned"]
    measured = {"recording": "evaluation/before-sampled", "name": "before-sampled-000000.0.0"}
    _, unlearned = await get(session, f"{api}/step", **measured, step="0")
    assert unlearned["answer"]["learned"] is None and "entropy" not in unlearned["answer"]["tokens"][0]
    assert unlearned["not_learned"].endswith("are not recorded: no update trains on a measurement.")
    assert whole["state"]["state_key"] and whole["prompt"][-1] == {"frame": whole["frames"][0]}
    _, group = await get(session, f"{api}/group", recording="rollout", name="g1-000001")
    assert len(group["episodes"]) == 8

    await settled(session, page, "two")
    words = {"a": "one", "recording_a": "evaluation/after-sampled", "b": "two"}
    _, compared = await get(session, f"{page}api/compare", **words, recording_b="evaluation/after-sampled")
    assert compared["tasks"] == 12 == sum(compared["kinds"].values()) == len(compared["rows"])
    gained = sum((row["b"] - row["a"]) for row in compared["rows"]) / 12
    assert compared["gain"] == pytest.approx(gained)


@pytest.mark.parametrize(
    "path, words, status, message",
    [
        ("api/runs/none", {}, 404, "there is no run 'none' here; there is one, two"),
        ("api/runs/one/episode", {"recording": "rollout"}, 400, "needs name="),
        ("api/runs/one/step", {"recording": "rollout", "name": "x", "step": "-1"}, 400, "isn't the number of a step"),
        ("api/runs/one/frame", {"recording": "../..", "name": "spec.yaml"}, 404, "no recording"),
        ("api/runs/one/episodes", {"colour": "red"}, 400, "no field 'colour'"),
        ("page/..%2fserver.py", {}, 404, "no file"),
        ("page/index.html", {}, 404, "no file"),
        ("api/nothing", {}, 404, "Not Found"),
    ],
)
async def test_what_cannot_be_answered_is_said(page, session, path, words, status, message):
    got, found = await get(session, f"{page}{path}", **words)
    assert got == status and message in found["error"], found


@pytest.mark.parametrize(
    "headers, message",
    [
        ({"Host": "evil.example"}, "isn't called 'evil.example'"),
        ({"Host": "127.0.0.1.evil.example"}, "isn't called"),
        ({"Host": "[::"}, "isn't called"),
        ({"Sec-Fetch-Site": "cross-site"}, "another site asks"),
    ],
)
async def test_other_sites_are_refused(page, session, headers, message):
    for path in ("api/runs", "api/runs/one/episodes", "page/app.js"):
        status, found = await get(session, f"{page}{path}", headers)
        assert status == 403 and message in found["error"]


async def test_it_only_reads(page, session, runs):
    before = sorted((path, path.stat().st_mtime_ns) for path in (runs / "one").rglob("*"))
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        async with session.request(method, f"{page}api/runs/one") as answer:
            assert answer.status == 405
    await settled(session, page, "one")
    assert sorted((path, path.stat().st_mtime_ns) for path in (runs / "one").rglob("*")) == before


async def test_the_page_allows_its_own_files_alone(page, session):
    async with session.get(page) as answer:
        html, policy = await answer.text(), answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert "://" not in html and "<script>" not in html and "style=" not in html
    package = Path(sys.modules["tapforge_trainer.dashboard"].__file__).parent / "page"
    for file in package.iterdir():
        text = file.read_text()
        assert len(text.splitlines()) <= 400, "one file, one idea"
        assert "innerHTML" not in text and "outerHTML" not in text and "insertAdjacentHTML" not in text
        if file.suffix in (".js", ".css"):
            assert "http://www.w3.org/2000/svg" in text or "://" not in text, "it loads nothing from elsewhere"
            async with session.get(f"{page}page/{file.name}") as answer:
                assert answer.status == 200 and (await answer.text()) == text


async def test_other_addresses_need_a_token(runs, session):
    with pytest.raises(CannotListen, match="give a token"):
        async with serving([runs], "0.0.0.0", 0):
            pass
    async with serving([runs], "0.0.0.0", 0, "se-cret") as page:
        page = page.replace("0.0.0.0", "127.0.0.1")
        wrong = f"tapforge_view_{urlsplit(page).port}=wrong"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": wrong}):
            status, found = await get(session, f"{page}api/runs", headers)
            assert status == 401 and "needs its token" in found["error"]
        assert (await get(session, f"{page}api/runs", {"Authorization": "Bearer se-cret"}))[0] == 200
        assert (await get(session, f"{page}api/runs", token="se-cret"))[0] == 401  # in no address of the API
        async with session.get(f"{page}?token=se-cret", allow_redirects=False) as answer:
            assert answer.status == 303 and answer.headers["Location"] == "/"
            cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
        async with session.get(f"{page}?token=se-cre", allow_redirects=False) as answer:
            assert answer.status == 401
        assert (await get(session, f"{page}api/runs", {"Cookie": cookie.partition(";")[0]}))[0] == 200


async def test_new_runs_appear_and_folders_are_checked(tmp_path, session):
    make_run(tmp_path / "runs" / "early", SMALL)
    with pytest.raises(ConfigurationError, match="is not a run's folder"):
        async with serving([tmp_path / "nothing"], "127.0.0.1", 0):
            pass
    async with serving([tmp_path / "runs"], "127.0.0.1", 0) as page:
        make_run(tmp_path / "runs" / "late", SMALL)
        async with asyncio.timeout(60):
            while len((await get(session, f"{page}api/runs"))[1]["runs"]) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        status, found = await get(session, f"{page}api/runs/late")
        assert status == 200 and found["run"] == "late"


async def test_a_run_that_stopped_counts_what_it_did_last(tmp_path, session):
    """events.jsonl of a run that was killed in a line, and played updates again."""
    folder = make_run(tmp_path / "runs" / "again", SMALL)
    lines = (folder / "events.jsonl").read_text().splitlines()
    update = json.loads(next(line for line in lines if '"event": "update"' in line))
    back = [{"event": "reinforcement", "update": 1, "version": 2}, {**update, "update": 2, "success_rate_all": 0.125}]
    more = "\n".join(json.dumps({"at": 1.8e9, **event}) for event in back)
    (folder / "events.jsonl").write_text("\n".join(lines) + '\n{"at": 1, "event": "upda\n' + more + "\n")
    async with serving([folder], "127.0.0.1", 0) as page:
        _, series = await get(session, f"{page}api/runs/again/figures", name="rollout/success_rate")
        assert series["updates"] == [1, 2] and series["figures"]["rollout/success_rate"][1] == 0.125


async def test_the_command_serves_until_it_is_stopped(runs):
    script = "import sys; from tapforge_trainer.cli.main import main; main()"
    words = ["view", str(runs), "--serve", "--port", "0", "--json"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, *words, stdout=-1, stderr=-1)
    address = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["page"]
    async with aiohttp.ClientSession(timeout=DEADLINE) as session:
        assert (await get(session, f"{address}api/runs/two"))[1]["run"] == "two"
    process.send_signal(signal.SIGTERM)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, err) == (0, b"")


async def test_a_selection_is_a_file_of_its_own(page, session, runs, tmp_path, monkeypatch):
    await settled(session, page, "one")
    words = {"recording": "rollout", "outcome": "failure", "sort": "-advantage", "limit": "4"}
    async with session.get(f"{page}api/runs/one/export", params=words) as answer:
        html = await answer.text()
        assert answer.headers["Content-Disposition"] == 'attachment; filename="one-episodes.html"'
        assert answer.headers["Content-Security-Policy"] == "sandbox"
    _, listed = await get(session, f"{page}api/runs/one/episodes", **words)
    names = [one["name"] for one in listed["episodes"]]
    assert len(names) == 4 < listed["total"]
    shown = re.findall(r'title="episode rollout/([\w.-]+), seed', html)
    assert sorted(shown) == sorted(names) and shown[0] == names[0]
    assert f"one: 4 of {listed['total']} episodes" in html and "outcome failure and sort -advantage" in html
    assert html.count('data-outcome="failure"') == 4 and "data:image/png;base64," in html and "adv " in html
    assert (await get(session, f"{page}api/runs/one/export", name="none"))[0] == 404

    # The command writes the same, from the page's whole address; and one episode alone.
    address = f"{page}#/run/one/episodes?recording=rollout&outcome=failure&sort=-advantage&limit=4"
    target = tmp_path / "lost.html"
    view = ("view", runs / "one", "--export", target, "--where")
    assert await asyncio.to_thread(said, *view, address) == (0, f"{target}: 4 of {listed['total']} episodes\n")
    assert target.read_text() == html
    code, words = await asyncio.to_thread(said, *view, f"recording=rollout&name={names[1]}")
    assert (code, words) == (0, f"{target}: 1 of 1 episodes\n") and names[0] not in target.read_text()
    monkeypatch.setattr("tapforge_trainer.dashboard.export.MOST_SCREENS", 1)
    code, words = await asyncio.to_thread(said, *view, "?recording=rollout&outcome=failure&limit=4")
    assert (code, words) == (0, f"{target}: 1 of {listed['total']} episodes\n"), "the screens of one are enough"
    for asked, message in (
        ("colour=red", "no field 'colour'"),
        ("name=none", "no episode is like that"),
        ("recording=rollout&q=is that so?", "no episode is like that"),
        (f"{page}#/run/one/episode/rollout/{names[0]}", "is not the address of a list"),
    ):
        code, words = await asyncio.to_thread(said, *view, asked)
        assert code == 2 and message in words, words
    assert "an export is of one run" in said("view", "--serve", "--export", target)[1]

    # As an animated picture: the first of the same selection, with its three steps.
    for ending in (".gif", ".webp"):
        picture = target.with_suffix(ending)
        asked = ("view", runs / "one", "--export", picture, "--where", address.removesuffix("&limit=4"))
        assert await asyncio.to_thread(said, *asked) == (0, f"{picture}: 1 of {listed['total']} episodes\n")
        with Image.open(picture) as shown:
            assert (shown.format, shown.n_frames) == (ending[1:].upper(), 3)
    nameless = target.with_name(".gif")
    code, words = await asyncio.to_thread(said, "view", runs / "one", "--export", nameless)
    with Image.open(nameless) as shown:
        assert code == 0 and shown.format == "GIF"
    code, words = await asyncio.to_thread(said, *view, address, "--seconds-per-step", "1")
    assert code == 2 and "are of a .gif or .webp" in words
    # Each step is a picture, also where episodes show the same screens.
    monkeypatch.setattr("tapforge_trainer.dashboard.export.MOST_PICTURES", 4)
    assert (await asyncio.to_thread(said, *asked[:-1], address))[1] == f"{picture}: 2 of {listed['total']} episodes\n"
    monkeypatch.setattr("tapforge_trainer.dashboard.export.LONGEST", 2)
    code, words = await asyncio.to_thread(said, *asked[:-1], address)
    assert code == 2 and "an episode of 3 steps is not animated, only of 2 at most: export it as a page" in words
    for other in (target.with_suffix(".png"), target.with_name(".png")):
        code, words = await asyncio.to_thread(said, "view", runs / "one", "--export", other)
        assert code == 2 and "FILE.gif or FILE.webp" in words and not other.exists()


def said(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(map(str, words)))
    return done.exit_code, done.output


def test_the_first_screen_as_text(runs):
    code, shown = said("show", runs / "one")
    assert code == 0 and "held-out success, sampled: 30 % (20 % to 40 %) -> 80 % (70 % to 90 %)" in shown
    assert "baseline, random: 5 % (0 % to 15 %)" in shown and "two_panels" in shown and "seed:" in shown
    assert json.loads(said("show", runs / "one", "--output", "json")[1])["update"] == 2
    assert [line.split()[0] for line in said("ls", runs)[1].splitlines()] == ["RUN", "one", "two"]


def test_what_the_commands_cannot_do_is_said(runs, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        code, words = said("view", runs, "--serve", "--port", taken)
    assert code == 2 and "is in use; --port 0 takes a free one" in words
    for asked, message in (
        (("view", runs, "--serve", "--host", "0.0.0.0"), "give a token"),
        (("view", tmp_path / "none", "--serve"), "is not a run's folder: it doesn't exist"),
        (("view",), "or add --serve"),
        (("show", runs), "it holds the runs one, two"),
    ):
        code, words = said(*asked)
        assert code == 2 and message in words, words
    assert said("ls", tmp_path) == (1, f"Error: there is no run in {tmp_path}; name the folder that holds them\n")


def test_a_recording_of_another_kind_of_screens(tmp_path):
    """The removal of a run's folder while it is served is an answer, not a crash."""
    from tapforge_trainer.dashboard.opened import OpenRun
    from tapforge_trainer.dashboard.stored import NotThere

    folder = make_run(tmp_path / "gone", SMALL)
    run = OpenRun(folder)
    run.facets()
    run.work()
    shutil.rmtree(folder / "rollout")
    with pytest.raises(NotThere):
        run.episode("rollout", "g1-000000.0.0")
    run.work()
    assert run.episodes([("recording", "rollout")])["total"] == 0
    run.close()


def test_a_run_says_which_software_it_is():
    from tapforge_trainer.run.software import software

    found = software()
    assert found.keys() <= {"tapforge", "commit"} and all(found.values())
    if "commit" in found:
        assert len(found["commit"].rstrip("+")) >= 12
