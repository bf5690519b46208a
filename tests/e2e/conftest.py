"""A real control plane for the tests of this folder: one for the session, with tapforge's kinds in it. A test takes a
namespace of its own (`namespace`), so that tests don't see each other.

Its programs are built before the first test runs, in the open: that takes minutes once, and a test that takes so long
without a word counts as hung. Where they can't be had (another system than Linux, no Go) the tests that want a cluster
are skipped with the reason; in CI that is a failure. The same goes for a real node, for the tests that want one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pytest
from claiming import may
from e2e import installed
from e2e.cluster import PATIENCE, CannotBuild, Cluster, Options, binaries
from e2e.cluster.node import CannotRun
from operator_process import ACCOUNT, Ground, Operator, enabled, install, uninstall

CRDS = sorted((Path(__file__).parents[2] / "crds").glob("*.yaml"))
_NUMBERS = itertools.count(1)


_MISSING = pytest.StashKey[str]()
_NO_NODE = pytest.StashKey[str]()
_IMAGES = pytest.StashKey[Path]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds, if one of the tests that were chosen needs it."""
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if "built" not in wanted or session.config.option.collectonly:
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        try:
            if sys.platform != "linux":
                raise CannotBuild(f"the test cluster runs on Linux only, and this is {sys.platform}")
            binaries.ensure()
            binaries.ensure(of=binaries.kubernetes())
            if wanted & {"addons", "real_node"}:
                binaries.ensure(of=binaries.ADDONS)
                binaries.ensure(of=binaries.kuberay())
            if "node_autoscaler" in wanted:
                binaries.ensure(of=binaries.KARPENTER)
            if "helm" in wanted:
                binaries.ensure(of=binaries.HELM)
        except CannotBuild as error:
            session.config.stash[_MISSING] = str(error)
            return
        try:
            if "real_node" in wanted:
                session.config.stash[_IMAGES] = installed.prepare()
        except (CannotRun, CannotBuild) as error:
            session.config.stash[_NO_NODE] = str(error)


@pytest.fixture(scope="session")
def built(pytestconfig: pytest.Config) -> None:
    """Whoever starts a cluster needs what it is made of."""
    if missing := pytestconfig.stash.get(_MISSING, ""):
        if os.environ.get("CI"):
            pytest.fail(f"no test cluster, and in CI there must be one: {missing}", pytrace=False)
        pytest.skip(f"NO CLUSTER, NOTHING OF THE CONTROL PLANE WAS TESTED: {missing}")


@pytest.fixture(scope="session")
def real_node(built: None, pytestconfig: pytest.Config) -> None:
    """Whoever starts a real node needs root, and programs that start containers."""
    if missing := pytestconfig.stash.get(_NO_NODE, ""):
        if os.environ.get("CI"):
            pytest.fail(f"no real node, and in CI there must be one: {missing}", pytrace=False)
        pytest.skip(f"NO REAL NODE, NOTHING THAT RUNS IN CONTAINERS WAS TESTED: {missing}")


@pytest.fixture(scope="session")
def real(real_node: None, pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """Shared by the tests of real Pods: one real node, KubeRay, and the operator in its Deployment."""
    with installed.up(pytestconfig.stash[_IMAGES]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def addons(built: None) -> None:
    """KubeRay and its kinds."""
    binaries.ensure(of=binaries.ADDONS)


@pytest.fixture(scope="session")
def helm(built: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Helm with folders of its own."""
    program, home = binaries.ensure(of=binaries.HELM) / "helm", tmp_path_factory.mktemp("helm")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HELM_", "KUBE"))}
    environment |= {f"HELM_{what}_HOME": str(home / what) for what in ("CACHE", "CONFIG", "DATA")}

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(program), *arguments],
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE,
            check=False,
            env=environment,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"helm {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        return done

    return run


@pytest.fixture(scope="session")
def cluster(built: None) -> Iterator[Cluster]:
    """Shared by all tests: 3 fake nodes of 110 pods; whoever stops or restarts something leaves it running."""
    with Cluster(Options(nodes=3, qps=200)) as up:
        up.apply(*CRDS)
        up.wait_kinds()
        up.wait_for("the kinds to be explained", lambda: _explained(up))
        yield up


def _explained(cluster: Cluster) -> bool:
    """`kubectl explain` reads schemas that are put together some time after the kinds are served."""
    schemas = "/openapi/v3/apis/tapforge.dev/v1alpha1"
    if not cluster.exists(schemas):
        return False
    said = cluster.api("GET", schemas)["components"]["schemas"]
    return {"dev.tapforge.v1alpha1.EmulatorPool", "dev.tapforge.v1alpha1.TrainingRun"} <= set(said)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """One that no other test uses; removed behind it."""
    name = f"test-{next(_NUMBERS)}"
    cluster.api("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    # Pods are refused until it has its service account.
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    cluster.wait_for("the namespace's service account", lambda: cluster.exists(account))
    yield name
    cluster.api("DELETE", f"/api/v1/namespaces/{name}")


# --- with an operator -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ground(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Ground]:
    """With what the manifests install, and no operator."""
    short = request.module.__name__.removeprefix("test_").replace("_", "-")
    tests = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    spaces = [f"{short}-{number}" for number in range(len(tests))]
    for space in spaces:
        cluster.api("POST", "/api/v1/namespaces", enabled(space))
    own = f"{short}-operator"
    install(cluster, own, spaces)
    for space in spaces:
        account = f"/api/v1/namespaces/{space}/serviceaccounts/default"
        cluster.wait_for("the namespace's service account", lambda account=account: cluster.exists(account))
    cluster.wait_for("the operator's rights", lambda: _may_all(cluster, own, spaces))
    yield Ground(own, spaces, list(reversed(spaces)))
    uninstall(cluster, own)
    cluster.kubectl("delete", "namespaces", own, *spaces, "--ignore-not-found", "--wait=false")


def _may_all(cluster: Cluster, own: str, spaces: Sequence[str]) -> bool:
    """Whether the API server knows of the bindings: it reads them some time after they are written."""
    questions = [("create", "authentication.k8s.io", "tokenreviews", ""), ("list", "", "nodes", "")]
    questions += [("create", "", "pods", space) for space in spaces]
    user = f"system:serviceaccount:{own}:{ACCOUNT}"
    its_own = may(cluster, user, "patch", "coordination.k8s.io", "leases", own, "tapforge-operator")
    return its_own and all(may(cluster, user, *question) for question in questions)


@pytest.fixture
def space(ground: Ground) -> str:
    """A namespace of the test's own that the file's operator watches."""
    return ground.left.pop()


@pytest.fixture(scope="module")
def operator(cluster: Cluster, ground: Ground) -> Iterator[Operator]:
    """One for all tests of a file; whoever stops it starts it again."""
    one = Operator(cluster, ground.own, ground.spaces).start().wait_ready()
    yield one
    one.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the logs of the operators that a failed test had."""
    report = yield
    if report.failed and report.when != "teardown":
        funcargs = getattr(item, "funcargs", {})
        if "real" in funcargs:
            report.sections.append(("the real cluster", installed.describe(funcargs["real"])))
        for thing in funcargs.values():
            for one in thing if isinstance(thing, list) else [thing]:
                if isinstance(one, Operator):
                    report.sections.append((f"log of {one.name}", one.last_words(funcargs.get("space", ""))))
    return report
