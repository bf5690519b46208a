"""The parts of a real node that decide without one: addresses, mounts, images and when they are built again."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from e2e.cluster.node import CannotRun, archive, host, network, prerequisites
from e2e.images import build
from hypothesis import given
from hypothesis import strategies as st

_TABLE = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
vpn\t0000800A\t00000000\t0001\t0\t0\t0\t000080FF\t0\t0\t0
"""


def test_this_machines_routes_are_read() -> None:
    assert network.routes(_TABLE) == [
        IPv4Network("0.0.0.0/0"),
        IPv4Network("192.0.2.0/24"),
        IPv4Network("10.128.0.0/9"),
    ]


@given(st.lists(st.sampled_from(list(IPv4Network("10.128.0.0/9").subnets(new_prefix=12))), max_size=7))
def test_a_nodes_addresses_are_nobody_elses(taken: list[IPv4Network]) -> None:
    addresses = network.choose([IPv4Network("0.0.0.0/0"), *taken])
    assert not any(addresses.block.overlaps(way) for way in taken)
    assert addresses.pods.subnet_of(addresses.block) and addresses.cable.subnet_of(addresses.block)
    assert not addresses.pods.overlaps(addresses.cable)
    assert {addresses.host, addresses.node} == set(addresses.cable.hosts())
    assert len(addresses.interface()) <= 15


def test_a_machine_without_room_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"needs a /16 .*10\.0\.0\.0/8, 172\.16\.0\.0/12"):
        network.choose([IPv4Network("10.0.0.0/8"), IPv4Network("172.16.0.0/12")])


def test_the_interpreter_and_its_environment_are_in_a_pod_and_nothing_is_there_twice() -> None:
    volumes, mounts = host.mounts()
    places = [Path(volume["hostPath"]["path"]) for volume in volumes]
    assert [str(place) for place in places] == [mount["mountPath"] for mount in mounts]
    assert all(mount["readOnly"] for mount in mounts)
    for needed in (Path(host.python()), Path(host.python()).resolve(), Path(json.__file__), host.CHECKOUT / "Makefile"):
        assert any(needed.is_relative_to(place) for place in places), needed
    # One inside another would be mounted into a place that can't be written.
    assert not [(a, b) for a in places for b in places if a != b and a.is_relative_to(b)]


def test_what_a_container_says_itself_stands() -> None:
    spec = host.pod_spec(
        [{"name": "a", "image": "other:1", "env": [{"name": "HOME", "value": "/x"}]}], hostNetwork=True
    )
    (container,) = spec["containers"]
    assert container["image"] == "other:1" and spec["hostNetwork"] is True
    # The last one of a name counts.
    assert {entry["name"]: entry["value"] for entry in container["env"]}["HOME"] == "/x"


def test_an_image_of_a_few_files_is_whole(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"#!/bin/sh\n")
    path = archive.write(
        tmp_path / "i.tar", "a/b:1", {"/p": program, "/etc/x": b"text"}, folders=["/tmp"], command=["/p"]
    )
    with tarfile.open(path) as tar:

        def content(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        (manifest,) = json.loads(content("manifest.json"))
        config = json.loads(content(manifest["Config"]))
        with tarfile.open(fileobj=io.BytesIO(content(manifest["Layers"][0]))) as layer:
            found = {member.name: (oct(member.mode), member.isdir()) for member in layer}
    assert manifest["RepoTags"] == ["a/b:1"] and config["config"]["Cmd"] == ["/p"]
    assert found == {"tmp": ("0o1777", True), "p": ("0o755", False), "etc/x": ("0o644", False)}


# --- when images are built again --------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for place in (*build.RECIPE, *build.CODE):
        source, copy = build.ROOT / place, tmp_path / place
        if source.is_dir():
            copy.mkdir(parents=True)
            (copy / "file.txt").write_text("1")
        else:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    return tmp_path


@pytest.mark.parametrize("place", [*build.RECIPE, *build.CODE])
def test_a_change_of_what_goes_into_an_image_is_another_image(checkout: Path, place: str) -> None:
    before = build.fingerprint(checkout, ["phone"])
    changed = checkout / place
    (changed / "file.txt" if changed.is_dir() else changed).write_text("2")
    assert build.fingerprint(checkout, ["phone"]) != before


def test_other_changes_are_not(checkout: Path) -> None:
    before = build.fingerprint(checkout, ["phone", "operator"])
    cached = checkout / "trainer" / "tapforge_envs" / "__pycache__"
    cached.mkdir()
    (cached / "file.pyc").write_text("x")
    (checkout / "Makefile").write_text("x")
    assert build.fingerprint(checkout, ["operator", "phone"]) == before
    assert build.fingerprint(checkout, ["phone"]) != before
    assert build.fingerprint(checkout, ["operator", "phone"], ["TRAINER=cpu"]) != before


def test_what_the_dockerfile_copies_is_what_is_looked_at() -> None:
    words = (line.split() for line in (build.ROOT / "Dockerfile").read_text().splitlines())
    copied = {place for line in words if line[:1] == ["COPY"] and "--from" not in line[1] for place in line[1:-1]}
    sources = {place for place in copied if not place.startswith("requirements/")}
    assert sources == set(build.CODE) and len(copied) > len(sources)
    kept = {
        line.removeprefix("!") for line in (build.ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert kept == {*build.CODE, "requirements"}


# --- what is missing --------------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_by_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prerequisites, "PATH", str(tmp_path))
    assert {"containerd", "runc", "iptables", "util-linux"} <= set(prerequisites.missing(prerequisites.NODE))
    for program in prerequisites.IMAGES:
        (tmp_path / program).write_text("")
        (tmp_path / program).chmod(0o755)
    assert not {"buildah", "debootstrap"} & set(prerequisites.missing(prerequisites.IMAGES))


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(CannotRun, match="takes root, and this is user 1000"):
        prerequisites.ensure()


def test_another_system_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(CannotRun, match="Linux only, and this is darwin"):
        prerequisites.ensure()
