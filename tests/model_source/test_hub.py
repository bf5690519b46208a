"""A repository of a hub, asked by huggingface_hub's own client, on nodes that share nothing."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from tests.model_source.conftest import node, pinned, said
from tests.model_source.fake_hub import FakeHub, Repository
from tests.model_source.small_model import FIRST, REPO, SECOND, WANTED, files

SOURCE = {"huggingFace": {"repo": REPO}}


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_each_node_fetches_for_itself_and_gets_what_the_driver_pinned(hub: FakeHub, tmp_path: Path) -> None:
    driver, *others = [node(tmp_path / name, HF_ENDPOINT=hub.endpoint) for name in ("driver", "a", "b")]
    ref = pinned(driver, SOURCE)
    assert (ref["commit"], {file["name"] for file in ref["files"]}) == (FIRST, WANTED)
    # Somebody pushes meanwhile.
    hub.repositories[REPO].revisions["main"] = SECOND
    kind, described = driver.resolve(ref, weights=False)
    assert kind == "" and names(described) == {name for name in WANTED if not name.endswith(".safetensors")}
    folders = [said(process) for process in [other.start(ref=ref, weights=True, seconds=60.0) for other in others]]
    for kind, folder in folders:
        assert kind == "" and names(folder) == WANTED and f"/{FIRST}" in folder
        assert all((Path(folder) / name).read_bytes() == files()[name] for name in WANTED)
    assert folders[0][1] != folders[1][1]
    assert hub.sent["model-00001-of-00002.safetensors"] == 2, "once for each node"
    # A later session of the run begins with the same weights, whatever main is now.
    again = pinned(driver, SOURCE, {"kind": "hub", "place": REPO, "commit": FIRST, "files": []})
    assert again["commit"] == FIRST and pinned(driver, SOURCE)["commit"] == SECOND


def test_of_many_processes_of_a_node_one_fetches(hub: FakeHub, tmp_path: Path) -> None:
    here = node(tmp_path, HF_ENDPOINT=hub.endpoint)
    ref = pinned(here, SOURCE)
    answers = [said(process) for process in [here.start(ref=ref, weights=True, seconds=60.0) for _ in range(6)]]
    assert len(set(answers)) == 1 and answers[0][0] == "", answers
    assert {name: hub.sent[name] for name in WANTED} == dict.fromkeys(WANTED, 1)
    asked = hub.asked
    assert here.resolve(ref) == answers[0] and hub.asked == asked, "what is there costs no call"


def test_a_node_goes_on_with_its_cache_when_the_hub_is_gone(hub: FakeHub, tmp_path: Path) -> None:
    here = node(tmp_path, HF_ENDPOINT=hub.endpoint)
    ref = pinned(here, SOURCE)
    _, folder = here.resolve(ref)
    hub.stop()
    kind, again = here.pin(SOURCE)
    assert kind == "" and (again["commit"], again["files"]) == (FIRST, [])
    assert here.resolve(again) == ("", folder)
    offline = node(tmp_path, HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="1")
    assert offline.resolve(pinned(offline, SOURCE)) == ("", folder)


def test_without_a_network_and_a_cache_it_is_said_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    here = node(tmp_path, HF_ENDPOINT=hub.endpoint)
    ref = pinned(here, SOURCE)
    offline = node(tmp_path / "empty", HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="1")
    for kind, words in (offline.pin(SOURCE), offline.resolve(ref)):
        assert kind == "ModelRefused" and "HF_HUB_OFFLINE is set" in words and "hf download" in words
    hub.stop()
    kind, words = node(tmp_path / "other", HF_ENDPOINT=hub.endpoint).pin(SOURCE)
    assert kind == "ModelError" and "can't be asked" in words and REPO in words


def test_a_download_that_breaks_off_is_done_again(hub: FakeHub, tmp_path: Path) -> None:
    here = node(tmp_path, HF_ENDPOINT=hub.endpoint)
    ref = pinned(here, SOURCE)
    hub.break_off = {"model-00002-of-00002.safetensors"}
    hub.busy = 1
    kind, folder = here.resolve(ref)
    assert kind == "" and not hub.break_off
    assert (Path(folder) / "model-00002-of-00002.safetensors").read_bytes() == files()[
        "model-00002-of-00002.safetensors"
    ]


def test_a_process_that_was_killed_while_it_fetched_leaves_nothing_in_the_way(hub: FakeHub, tmp_path: Path) -> None:
    here = node(tmp_path, HF_ENDPOINT=hub.endpoint)
    ref = pinned(here, SOURCE)
    assert here.resolve(ref, weights=False)[0] == ""
    # The small files are there, as after a kill before the shards: that is not taken for the model.
    kind, folder = here.resolve(ref)
    assert kind == "" and names(folder) == WANTED


@pytest.mark.parametrize(
    ("repository", "token", "kind", "words"),
    [
        (None, "", "CredentialsRefused", "no HF_TOKEN is given"),
        (None, "mine", "CredentialsRefused", "has no such repository"),
        (Repository(files(), {"main": FIRST}, token="theirs"), "", "CredentialsRefused", "no HF_TOKEN is given"),
        (Repository(files(), {"main": FIRST}, token="theirs"), "mine", "CredentialsRefused", "is not accepted"),
        (
            Repository(files(), {"main": FIRST}, "theirs", True),
            "mine",
            "CredentialsRefused",
            "accept the model's terms",
        ),
        (Repository(files(), {"other": FIRST}), "", "ModelRefused", "no such revision"),
        (Repository({"README.md": b"data"}, {"main": FIRST}), "", "ModelRefused", "lacks config.json"),
    ],
)
def test_a_refusal_is_said_at_the_start_with_its_remedy(
    hub: FakeHub, tmp_path: Path, repository: Repository | None, token: str, kind: str, words: str
) -> None:
    hub.repositories = {} if repository is None else {REPO: repository}
    here = node(tmp_path, HF_ENDPOINT=hub.endpoint, **({"HF_TOKEN": token} if token else {}))
    found, text = here.pin(SOURCE)
    assert (found, words in text, REPO in text) == (kind, True, True), text
    assert not hub.sent


def test_a_node_without_a_token_uses_the_drivers(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories[REPO].token = "ours"
    ref = pinned(node(tmp_path / "driver", HF_ENDPOINT=hub.endpoint, HF_TOKEN="ours"), SOURCE)
    assert node(tmp_path / "a").resolve(ref)[0] == ""
    hub.repositories[REPO].token = "renewed"
    kind, words = node(tmp_path / "b").resolve(ref)
    assert kind == "CredentialsRefused" and "ours" not in words


def test_a_full_disk_is_told_before_it_is_full(hub: FakeHub, tmp_path: Path) -> None:
    here = node(tmp_path, HF_ENDPOINT=hub.endpoint)
    ref = pinned(here, SOURCE)
    ref["files"] = [file | {"size": 2**60} for file in ref["files"]]
    kind, words = here.resolve(ref)
    assert kind == "ModelError" and "GiB are free" in words and "HF_HOME" in words


def test_a_disk_that_fills_up_is_told(hub: FakeHub, tmp_path: Path) -> None:
    """In a file system of a few pages."""
    hub.repositories[REPO].files["model-00001-of-00002.safetensors"] += b"0" * 400_000
    here = node(tmp_path / "small", HF_ENDPOINT=hub.endpoint)
    ref = pinned(here, SOURCE)
    ref["files"] = []
    mount = f'mount -t tmpfs -o size=200k none {tmp_path}/small && exec "$@"'
    small = ("unshare", "-rm", "sh", "-c", mount, "sh")
    kind, words = said(here.start(*small, ref=ref, weights=True, seconds=60.0))
    assert kind == "ModelError" and "is full" in words, words


def test_a_wait_for_another_process_has_an_end(hub: FakeHub, tmp_path: Path) -> None:
    here = node(tmp_path, HF_ENDPOINT=hub.endpoint)
    ref = pinned(here, SOURCE)
    locks = tmp_path / "hf" / "hub" / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    name = REPO.replace("/", "--")
    with (locks / f"tapforge--{name}--{FIRST}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kind, words = here.resolve(ref, seconds=0.5)
    assert kind == "ModelError" and "another process" in words and "startSeconds" in words
    assert here.resolve(ref)[0] == ""
