"""Which version a commit is, and that everything of a release says so."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.version import Version
from release import archives
from release.stage import copy, stamp
from release.version import Commit, NoVersion, chart_version, found, image_tag, is_release, version_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("written", "commit", "version", "chart", "tag"),
    [
        ("0.2.0", Commit("0.2.0", 0, "1a2b3c4", False), "0.2.0", "0.2.0", "0.2.0"),
        ("0.2.0rc1", Commit("0.2.0rc1", 0, "1a2b3c4", False), "0.2.0rc1", "0.2.0-rc.1", "0.2.0-rc.1"),
        ("0.1.0", Commit("0.1.0", 3, "1a2b3c4", False), "0.1.1.dev3+g1a2b3c4", "0.1.1-dev.3+g1a2b3c4", None),
        ("0.2.0", Commit("0.1.0", 3, "1a2b3c4", False), "0.2.0.dev3+g1a2b3c4", "0.2.0-dev.3+g1a2b3c4", None),
        (
            "0.2.0rc1",
            Commit("0.2.0rc1", 2, "1a2b3c4", False),
            "0.2.0rc2.dev2+g1a2b3c4",
            "0.2.0-rc.1.dev.2+g1a2b3c4",
            None,
        ),
        ("0.1.0", Commit("", 40, "1a2b3c4", False), "0.1.0.dev40+g1a2b3c4", "0.1.0-dev.40+g1a2b3c4", None),
        ("0.1.0", Commit("0.1.0", 0, "1a2b3c4", True), "0.1.1.dev0+g1a2b3c4.dirty", "0.1.1-dev.0+g1a2b3c4.dirty", None),
        ("0.3.0", None, "0.3.0", "0.3.0", "0.3.0"),
    ],
)
def test_versions(written: str, commit: Commit | None, version: str, chart: str, tag: str | None) -> None:
    made = version_of(written, commit)
    assert (str(made), chart_version(made), image_tag(made)) == (version, chart, tag or chart.replace("+", "_"))
    assert is_release(made) == (tag is not None)


def test_a_commit_is_older_than_the_release_that_it_leads_to_and_newer_than_the_one_before() -> None:
    after = version_of("0.1.0", Commit("0.1.0", 3, "1a2b3c4", False))
    assert Version("0.1.0") < after < Version("0.1.1")
    for written in ("0.2.0rc1", "0.2.0rc2", "0.2.0"):
        after = version_of(written, Commit("0.2.0rc1", 3, "1a2b3c4", False))
        assert Version("0.2.0rc1") < after < Version("0.2.0rc2")
    assert version_of("0.3.0rc1", Commit("0.2.0rc1", 3, "1a2b3c4", False)) < Version("0.3.0rc1")


def test_a_tag_that_the_files_contradict_is_refused() -> None:
    with pytest.raises(NoVersion, match="the tag is v0.2.0, and pyproject.toml says 0.1.0: write"):
        version_of("0.1.0", Commit("0.2.0", 0, "1a2b3c4", False))
    with pytest.raises(NoVersion, match="the newest tag is v1-old"):
        version_of("0.1.0", Commit("1-old", 3, "1a2b3c4", False))


def test_a_checkout_gets_its_version_from_its_tags_and_says_it_everywhere(tmp_path: Path) -> None:
    """A repository of git's, with and without a tag, and what is copied out of it."""
    root, stage = tmp_path / "root", tmp_path / "stage"
    for file in ("pyproject.toml", "charts/tapforge/Chart.yaml", "charts/tapforge/values.yaml"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text((ROOT / file).read_text())
    (root / "manifests").mkdir()
    (root / "manifests/pool.yaml").write_text("image: tapforge/phone:dev\n")

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=root, check=True, timeout=60, capture_output=True)

    written = Version(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    assert found(root) == written, "no git: an unpacked source distribution"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert str(found(root)).startswith(f"{written}.dev1+g")
    git("tag", f"v{written}")
    assert found(root) == written
    (root / "left-about.txt").write_text("in no release")
    assert found(root) == written, "files that git doesn't know change nothing"
    (root / "manifests/pool.yaml").write_text("image: tapforge/phone:dev\n# more\n")
    version = found(root)
    assert str(version).endswith(".dirty")

    copy(root, stage)
    stamp(stage, version)
    assert not (stage / "left-about.txt").exists()
    assert found(stage) == version, "what is built from the copy, and from an sdist of it, has the version"
    chart = yaml.safe_load((stage / "charts/tapforge/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (chart_version(version), str(version))
    assert yaml.safe_load((stage / "charts/tapforge/values.yaml").read_text())["image"]["tag"] == image_tag(version)
    assert f"tapforge/phone:{image_tag(version)}" in (stage / "manifests/pool.yaml").read_text()


def test_an_unpacked_source_distribution_leaves_out_what_commands_made_in_it(tmp_path: Path) -> None:
    for name in ("build/site/index.html", "dist/a.whl", ".venv/bin/python", "trainer/build/kept.py", "a b/ü.txt"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).touch()
    copy(tmp_path / "root", tmp_path / "stage")
    found = sorted(str(path.relative_to(tmp_path / "stage")) for path in (tmp_path / "stage").rglob("*.*"))
    assert found == ["a b/ü.txt", "trainer/build/kept.py"]


def test_the_changelog_has_the_version_that_the_package_says() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_an_archive_holds_one_image_under_its_new_name_and_is_the_same_each_time(tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    manifests = []
    for name in ("one", "two"):
        for blob in (f"config-{name}", "shared"):
            (blobs / blob).write_text(blob)
        about = {"config": {"digest": f"sha256:config-{name}"}, "layers": [{"digest": "sha256:shared"}]}
        (blobs / f"manifest-{name}").write_text(json.dumps(about))
        manifests.append(
            {
                "digest": f"sha256:manifest-{name}",
                "annotations": {"org.opencontainers.image.ref.name": f"docker.io/tapforge/{name}:dev"},
            }
        )
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))

    made = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for path in made:
        digest = archives.archive(layout, "docker.io/tapforge/one:dev", "docker.io/tapforge/one:0.1.0", path)
        assert digest == "sha256:manifest-one"
    assert made[0].read_bytes() == made[1].read_bytes()
    with tarfile.open(made[0]) as tar:
        names = [name.rpartition("/")[2] for name in tar.getnames()]
        assert names == ["oci-layout", "index.json", "config-one", "manifest-one", "shared"]
        (only,) = json.loads(tar.extractfile("index.json").read())["manifests"]
    assert only["annotations"]["io.containerd.image.name"] == "docker.io/tapforge/one:0.1.0"
    assert only["annotations"]["org.opencontainers.image.ref.name"] == "0.1.0"
