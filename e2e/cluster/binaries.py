"""Kubernetes and what runs beside it as programs on this machine: built from source once and found again later.

- They lie outside the checkout, in `$TAPFORGE_CACHE` or `~/.cache/tapforge`, under a name that is a hash of the Go
  module, of the Go version and of the build's flags: a change of any of them is a new build, and nothing else is.
- A folder that is there is complete: it is filled under another name and renamed. Builders that come at the same time
  wait for the first.
- `go` is asked for at every start, because its version is part of the name; it downloads the modules that it needs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODULE: Final = Path(__file__).parent / "controlplane"
COMPONENTS: Final = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
    "kwok",
)


@dataclass(frozen=True, slots=True)
class Sources:
    """A Go module of this folder."""

    #: for messages
    what: str
    module: Path
    #: files and folders of the module that make the programs what they are
    files: tuple[str, ...]
    #: as `go build` takes them
    packages: tuple[str, ...]
    #: name of the one program; empty: several, which Go names
    program: str = ""
    #: further names of that program
    links: tuple[str, ...] = ()
    #: (module that is required, folder of it, name that its copy gets beside the programs)
    carried: tuple[tuple[str, str, str], ...] = ()
    #: file of the module that is read in place of its go.mod
    modfile: str = "go.mod"


CONTROL_PLANE: Final = Sources(
    "the control plane", MODULE, ("go.mod", "go.sum", "main.go"), (".",), "controlplane", COMPONENTS
)
#: `coredns`, `ray-operator` (KubeRay) and `pause`; KubeRay's kinds lie in `crds` beside `bin`
ADDONS: Final = Sources(
    "the add-ons of a real node",
    Path(__file__).parent / "addons",
    ("go.mod", "go.sum", "coredns/main.go", "pause/main.go"),
    ("tool", "./..."),
    carried=(("github.com/ray-project/kuberay/ray-operator", "config/crd/bases", "crds"),),
)
#: `karpenter`: with its provider of kwok's nodes; its kinds in `crds`, the provider's in `provider-crds`
KARPENTER: Final = Sources(
    "Karpenter",
    Path(__file__).parent / "karpenter",
    ("go.mod", "go.sum"),
    ("tool",),
    "karpenter",
    carried=(
        ("sigs.k8s.io/karpenter", "pkg/apis/crds", "crds"),
        ("sigs.k8s.io/karpenter", "kwok/apis/crds", "provider-crds"),
    ),
)
#: `kueue`; its kinds lie in `crds` beside `bin`
KUEUE: Final = Sources(
    "Kueue",
    Path(__file__).parent / "kueue",
    ("go.mod", "go.sum"),
    ("tool",),
    "kueue",
    carried=(("sigs.k8s.io/kueue", "config/components/crd/bases", "crds"),),
)
#: the parts of Kubernetes that an operator meets, in the oldest supported version and in the newest one; what else
#: a cluster needs is the control plane's
_VERSIONS: Final = Path(__file__).parent / "versions"
_PARTS: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
OLDEST_KUBERNETES: Final = Sources(
    "the oldest Kubernetes",
    _VERSIONS,
    ("oldest.mod", "oldest.sum", "main.go"),
    (".",),
    "kubernetes",
    _PARTS,
    modfile="oldest.mod",
)
NEWEST_KUBERNETES: Final = Sources(
    "the newest Kubernetes", _VERSIONS, ("go.mod", "go.sum", "main.go"), (".",), "kubernetes", _PARTS
)
#: `ray-operator`; KubeRay's kinds lie in `crds` beside `bin`
OLDEST_KUBERAY: Final = Sources(
    "the oldest KubeRay",
    Path(__file__).parent / "kuberay-oldest",
    ("go.mod", "go.sum"),
    ("tool",),
    "ray-operator",
    carried=ADDONS.carried,
)
#: what `TAPFORGE_TEST_KUBERNETES` and `TAPFORGE_TEST_KUBERAY` may say; without them a cluster is of the usual versions
KUBERNETES: Final = {"": CONTROL_PLANE, "oldest": OLDEST_KUBERNETES, "newest": NEWEST_KUBERNETES}
KUBERAY: Final = {"": ADDONS, "oldest": OLDEST_KUBERAY}
HELM: Final = Sources("Helm", Path(__file__).parent / "helm", ("go.mod", "go.sum"), ("tool",), "helm")

#: where Go lies on machines whose PATH does not say so
USUAL_PLACES = "/usr/local/go/bin:/usr/lib/go/bin"

_FLAGS = ("-trimpath", "-buildvcs=false")
#: without these the API server says that it is v0.0.0
_VERSION = "k8s.io/component-base/version"
_BUILD_SECONDS = 3600
_SAY_SECONDS = 30
#: a build that was not used for this long is removed by the next one
_KEEP_SECONDS = 30 * 24 * 3600


class CannotBuild(RuntimeError):
    """The components can't be had on this machine; says what is missing and how to get it."""


def ensure(say: Callable[[str], None] = lambda line: print(line, flush=True), of: Sources = CONTROL_PLANE) -> Path:
    """The folder with the programs of the module. Builds them if it is not there: minutes, once."""
    go = _go(of)
    folder = cache() / _fingerprint(of, _version(go, of))
    programs = folder / "bin"
    if not programs.is_dir():
        with only_one(folder, say, of.what):
            if not programs.is_dir():
                _build(go, of, folder, say)
                _forget_old(folder)
    os.utime(folder)
    return programs


def chosen(versions: Mapping[str, Sources], variable: str) -> Sources:
    """The version that the environment asks for. Raises CannotBuild for one that is not among `versions`."""
    name = os.environ.get(variable, "")
    if name not in versions:
        raise CannotBuild(f"{variable} is {name!r}; it may be {' or '.join(repr(one) for one in versions)}")
    return versions[name]


def kubernetes() -> Sources:
    """What the API server, the controllers and the scheduler of a cluster are built of."""
    return chosen(KUBERNETES, "TAPFORGE_TEST_KUBERNETES")


def kuberay() -> Sources:
    return chosen(KUBERAY, "TAPFORGE_TEST_KUBERAY")


def cache() -> Path:
    """Folder for what is built once and used for long."""
    named = os.environ.get("TAPFORGE_CACHE")
    base = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tapforge"
    return base.absolute() / "e2e"


def _needed(of: Sources) -> str:
    found = re.search(r"^go (\S+)$", (of.module / of.modfile).read_text(), re.MULTILINE)
    if found is None:
        raise CannotBuild(f"{of.module / of.modfile} has no line `go <version>`: it is not the file that was committed")
    return found[1]


def _go(of: Sources) -> str:
    go = shutil.which("go") or shutil.which("go", path=USUAL_PLACES)
    if go is None:
        raise CannotBuild(
            f"the test cluster is built from source with Go {_needed(of)} or newer, and there is no `go` on the PATH. "
            "Unpack a release from https://go.dev/dl/ into /usr/local and add /usr/local/go/bin to the PATH"
        )
    return go


def _version(go: str, of: Sources) -> str:
    # Inside the module, so that a Go that can fetch the version which go.mod asks for answers with that one.
    asked = subprocess.run(
        [go, "env", "GOVERSION"], cwd=of.module, capture_output=True, text=True, timeout=600, check=False
    )
    version = asked.stdout.strip()
    if asked.returncode != 0 or _numbers(version) < _numbers(_needed(of)):
        raise CannotBuild(
            f"the test cluster needs Go {_needed(of)} or newer, and {go} is {version or 'older'}"
            f"{': ' + asked.stderr.strip() if asked.stderr.strip() else ''}. Go 1.21 and newer fetch the version that "
            "they need unless GOTOOLCHAIN=local forbids it; for an older one take a release from https://go.dev/dl/"
        )
    return version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _arguments(of: Sources) -> list[str]:
    kubernetes = re.search(r"k8s\.io/kubernetes (v(\d+)\.(\d+)\.\S+)", (of.module / of.modfile).read_text())
    if kubernetes is None:
        if of is CONTROL_PLANE:
            raise CannotBuild(
                f"{of.module / of.modfile} doesn't require k8s.io/kubernetes: it is not the file that was committed"
            )
        return [*_FLAGS, "-ldflags", "-s -w"]
    stamps = {"gitVersion": kubernetes[1], "gitMajor": kubernetes[2], "gitMinor": kubernetes[3]}
    return [
        *_FLAGS,
        "-ldflags",
        " ".join(["-s -w", *(f"-X {_VERSION}.{key}={value}" for key, value in stamps.items())]),
    ]


def _fingerprint(of: Sources, version: str) -> str:
    parts = [(of.module / name).read_bytes() for name in of.files]
    parts += [text.encode() for text in (version, *_arguments(of), *of.links, os.uname().machine)]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


@contextmanager
def only_one(folder: Path, say: Callable[[str], None], what: str) -> Iterator[None]:
    """One process at a time makes `folder`; the others wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        deadline = time.monotonic() + _BUILD_SECONDS
        told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CannotBuild(f"another process has been building {folder} for {_BUILD_SECONDS} s") from None
                if not told:
                    say(f"cluster: another process is building {what}, waiting for it")
                    told = True
                time.sleep(0.5)
        yield


def _build(go: str, of: Sources, folder: Path, say: Callable[[str], None]) -> None:
    say(f"cluster: building {of.what} from source into {folder} (minutes on 2 cores, once)")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as place:
        new = Path(place) / "new"
        programs = new / "bin"
        programs.mkdir(parents=True)
        _compile(
            [
                go,
                "build",
                "-v",
                f"-modfile={of.modfile}",
                *_arguments(of),
                "-o",
                f"{programs}/{of.program}",
                *of.packages,
            ],
            of.module,
            say,
        )
        for link in of.links:
            (programs / link).symlink_to(of.program)
        for module, source, name in of.carried:
            # Copied without their modes: Go's module cache is read-only, also for a program that removes the copy.
            found = _module_folder(go, of, module) / source
            shutil.copytree(found, new / name, copy_function=shutil.copyfile)
            (new / name).chmod(0o755)
        new.rename(folder)
    say(f"cluster: built {of.what} in {time.monotonic() - started:.0f} s")


def carried(of: Sources, name: str) -> Path:
    """A folder that is copied beside the programs, as it lies in its module: without building any of them."""
    go = _go(of)
    module, source, _ = next(one for one in of.carried if one[2] == name)
    fetch = [go, "mod", "download", f"-modfile={of.modfile}", module]
    done = subprocess.run(fetch, cwd=of.module, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    if done.returncode != 0:
        raise CannotBuild(f"`{' '.join(fetch)}` in {of.module} ended with {done.returncode}: {done.stderr.strip()}")
    return _module_folder(go, of, module) / source


def _module_folder(go: str, of: Sources, module: str) -> Path:
    asked = subprocess.run(
        [go, "list", f"-modfile={of.modfile}", "-m", "-f", "{{.Dir}}", module],
        cwd=of.module,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if asked.returncode != 0 or not asked.stdout.strip():
        raise CannotBuild(f"`go list -m {module}` in {of.module} ended with {asked.returncode}: {asked.stderr.strip()}")
    return Path(asked.stdout.strip())


def _compile(command: list[str], module: Path, say: Callable[[str], None]) -> None:
    nice = shutil.which("nice")
    build = subprocess.Popen(
        [nice, "-n", "5", *command] if nice else command,
        cwd=module,
        env={**os.environ, "CGO_ENABLED": "0"},
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    overdue = threading.Timer(_BUILD_SECONDS, build.kill)
    overdue.start()
    packages = 0
    errors: list[str] = []
    said = time.monotonic()
    try:
        assert build.stderr is not None
        for line in build.stderr:
            # -v names one package per line; everything with a blank in it is a message.
            if " " in line.strip():
                errors = [*errors[-40:], line.rstrip()]
            else:
                packages += 1
            if time.monotonic() - said > _SAY_SECONDS:
                say(f"cluster: still building, {packages} packages compiled")
                said = time.monotonic()
        code = build.wait()
    finally:
        overdue.cancel()
        if build.poll() is None:
            build.kill()
            build.wait()
    if code != 0:
        raise CannotBuild(f"`{' '.join(command[:2])}` in {module} ended with {code}:\n" + "\n".join(errors))


def _forget_old(current: Path) -> None:
    for folder in current.parent.iterdir():
        if folder != current and folder.is_dir() and time.time() - folder.stat().st_mtime > _KEEP_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
