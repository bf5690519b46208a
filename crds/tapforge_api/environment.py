"""Where a run's phones and tasks come from. Times are seconds, sizes are pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .base import UNIQUE, Device, DnsLabel, Keyed, OneOf, Path, Positive, Rule, Seconds, Spec, Word, compare
from .dataset import DataSet
from .plugin import OPTIONS, PluginOptions
from .pool import EmulatorPoolSpec, Protocol, is_url

Split = Literal["train", "validation", "test"]
WaitSeconds = Annotated[float, Field(ge=0, le=60)]


class Latency(Spec):
    """Artificial, log-normal slowness of a simulated phone's steps."""

    median_seconds: Annotated[float, Field(ge=0, le=3600)] = Field(0.0, description="median of a step, seconds")
    sigma: Annotated[float, Field(ge=0, le=5)] = Field(
        0.0, description="standard deviation of the logarithm of a step's duration; 0: all steps take the median"
    )


class RecycleServers(Spec):
    """When a server that is well is replaced by a fresh one, while the run goes on: one at a time, and each phone moves
    at the end of its episode. Without any member, never."""

    after_episodes: Positive | None = Field(None, description="episodes on each of its phones, on average")
    after_seconds: Seconds | None = Field(None, description="age, seconds")


class Processes(Spec):
    """Environments on the machine of the driver: simulated phones, or MiniWoB++'s web pages."""

    environment: Literal["phone", "miniwob"] = Field(
        "phone",
        description="what runs there. phone: the simulated phone; miniwob: MiniWoB++'s pages in a headless Chromium, "
        "which has to be installed",
    )
    count: Annotated[int, Field(ge=1, le=4096)] = Field(2, description="phones or pages, each of which is one slot")
    servers: Annotated[int, Field(ge=1, le=256)] = Field(
        1,
        description="server processes that the phones are spread over; one is good for some hundred steps a second. "
        "With miniwob each has a browser of its own",
    )
    latency: Latency | None = Field(
        None, description="artificial slowness; without it the phones are as fast as they can"
    )
    recycle: RecycleServers = Field(
        RecycleServers(), description="when a server that is well is replaced by a fresh one"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        compare("servers", "<=", "count", "a server without a phone does nothing"),
        Rule(
            message="latency must be left out with environment miniwob: only simulated phones are slow on demand",
            cel="self.environment == 'phone' || !has(self.latency)",
            holds=lambda o: o.environment == "phone" or o.latency is None,
        ),
    )


class Urls(OneOf):
    """Environment servers that run independently of the training, one phone each."""

    list: Annotated[tuple[Device, ...], Field(min_length=1, max_length=4096), UNIQUE] | None = Field(
        None,
        description="addresses, each of one phone's server: URLs; with protocol adb serials, HOST:PORT, or auto for "
        "every device that is attached",
    )
    file: Path | None = Field(
        None, description="file with one address per line; blank lines and # comments are skipped"
    )


class PoolReference(Spec):
    """An EmulatorPool in the run's namespace; phones are claimed from the operator."""

    name: DnsLabel = Field(description="metadata.name of the EmulatorPool")
    slots: Annotated[int, Field(ge=1, le=4096)] = Field(
        16, description="phones that are claimed at most; the run begins with the first one and takes what comes free"
    )
    priority: Annotated[int, Field(ge=-1000, le=1000)] = Field(
        0,
        description="whose claims are served first where phones are short: the larger; runs of a smaller one may be "
        "asked for phones at the end of their episodes",
    )


class OwnPool(Spec):
    """An EmulatorPool that the operator makes for the run alone, under its name. It exists while the run is active."""

    slots: Annotated[int, Field(ge=1, le=4096)] = Field(
        16, description="phones that are claimed at most; the run begins with the first one and takes what comes free"
    )
    spec: EmulatorPoolSpec = Field(description="the pool, as in an EmulatorPool")


class EnvironmentSource(OneOf):
    """Where phones come from, or the data set that takes their place."""

    processes: Processes | None = Field(None, description="simulated phones, or web pages, on the driver's machine")
    urls: Urls | None = Field(None, description="servers that already run")
    pool: PoolReference | None = Field(None, description="an EmulatorPool of the cluster")
    own_pool: OwnPool | None = Field(None, description="an EmulatorPool of the run's own, made for it on the cluster")
    dataset: DataSet | None = Field(None, description="recorded steps: no phone is used")


class Screen(Spec):
    """Size that the environments of source.processes draw at, in pixels."""

    width: Annotated[int, Field(ge=32, le=4096)] = Field(96, description="width, pixels")
    height: Annotated[int, Field(ge=32, le=4096)] = Field(160, description="height, pixels")


class Deadlines(Spec):
    """How long calls to a phone may take. A call that takes longer makes the episode invalid, never a failure. The
    model's time counts against none of them."""

    acquire_seconds: Seconds = Field(120.0, description="that a run goes on with no slot free and none in use, seconds")
    reset_seconds: Seconds | None = Field(
        None, description="to set up a task, seconds; without it 30, or 300 where protocol isn't tapforge"
    )
    step_seconds: Seconds | None = Field(
        None,
        description="to carry out an action and return the next frame, seconds; without it 15, or 60 where protocol "
        "isn't tapforge",
    )
    evaluate_seconds: Seconds | None = Field(
        None, description="to judge an episode, seconds; without it 15, or 120 where protocol isn't tapforge"
    )
    episode_seconds: Seconds | None = Field(
        None,
        description="for all calls of an episode together, seconds; without it 600, or 1800 where protocol isn't "
        "tapforge",
    )


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """How long calls to a phone may take, every default filled in; seconds."""

    reset: float
    step: float
    evaluate: float
    episode: float


#: servers of other people load snapshots, start containers and wait for screens
_OWN, _OTHERS = CallSeconds(30.0, 15.0, 15.0, 600.0), CallSeconds(300.0, 60.0, 120.0, 1800.0)


class Settle(Spec):
    """When the screen of a phone counts as settled after an action. Its frame is the step's observation. Phones of
    protocol tapforge answer with a settled frame by themselves; all of this is for the others."""

    mode: Literal["adaptive", "fixed", "none"] = Field(
        "adaptive",
        description="adaptive: frames are taken until they stop changing; fixed: one frame after fixedSeconds; "
        "none: one frame at once",
    )
    fixed_seconds: WaitSeconds = Field(1.0, description="with fixed: from the action to the frame, seconds")
    min_seconds: WaitSeconds = Field(0.25, description="from the action to the first frame, seconds")
    quiet_seconds: Annotated[float, Field(ge=0.05, le=60)] = Field(
        0.25, description="that frames stay equal before the screen counts as settled, and between two frames, seconds"
    )
    unchanged_seconds: WaitSeconds = Field(
        1.0, description="after which a screen that the action didn't change counts as settled, seconds"
    )
    moving_seconds: WaitSeconds = Field(
        2.5, description="after which a screen with a small part that moves counts as settled, seconds"
    )
    moving_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.02, description="how much of the screen such a part (a spinner, a video) is at most"
    )
    max_seconds: WaitSeconds = Field(
        5.0, description="after which no further frame is taken, whatever moves, seconds; the last one stands"
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        compare("min_seconds", "<=", "max_seconds", "there would be no frame"),
        compare("quiet_seconds", "<=", "max_seconds", "no screen could ever count as settled"),
    )


Package = Annotated[
    str, Field(min_length=3, max_length=255, pattern=r"^[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z][A-Za-z0-9_]*)+$")
]


class AppName(Spec):
    """What an app is called. adb knows packages, and no labels."""

    name: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description="as the model writes it; upper and lower case are the same"
    )
    package: Package = Field(description="package that it means")


class Adb(Spec):
    """How phones of protocol adb are used. Other phones have no use for it."""

    keyboard: Literal["auto", "adb", "input"] = Field(
        "auto",
        description="how text is typed. adb: by ADBKeyboard, which has to be installed; input: by `input text`, ASCII "
        "only; auto: by ADBKeyboard where it is installed",
    )
    ui_tree: bool = Field(
        False, description="whether observations carry a dump of uiautomator; costs one to three seconds a step"
    )
    unlock: bool = Field(True, description="whether a reset wakes the phone and puts its lock screen away")
    stay_awake: bool = Field(
        True, description="whether a reset keeps the screen on for as long as the phone is plugged in"
    )
    collapse_notifications: bool = Field(True, description="whether a reset closes the notification shade")
    do_not_disturb: bool = Field(
        False, description="whether a reset turns do-not-disturb on; nothing turns it off again"
    )
    force_stop_third_party: bool = Field(
        True, description="whether a reset stops all apps that the device did not come with"
    )
    force_stop: Annotated[tuple[Package, ...], Field(max_length=256), UNIQUE] = Field(
        (), description="other packages that a reset stops, besides the app in front and the task's"
    )
    keep: Annotated[tuple[Package, ...], Field(max_length=256), UNIQUE] = Field(
        (), description="packages that a reset doesn't stop: a VPN, a device manager"
    )
    clear_data: Annotated[tuple[Package, ...], Field(max_length=256), UNIQUE] = Field(
        (), description="packages of which a reset deletes all data (`pm clear`)"
    )
    apps: Annotated[tuple[AppName, ...], Field(max_length=512), Keyed("name")] = Field(
        (), description="names of apps beside the usual ones, for open_app"
    )


class EnvironmentSpec(Spec):
    """The phones of a run."""

    source: EnvironmentSource = Field(
        EnvironmentSource(processes=Processes()), description="where phones come from; exactly one member"
    )
    protocol: Protocol = Field("tapforge", description="what the phones' servers speak")
    screen: Screen = Field(Screen(), description="size of a simulated phone or page; others have their own")
    deadlines: Deadlines = Field(Deadlines(), description="how long calls to a phone may take")
    settle: Settle = Field(Settle(), description="when the screen counts as settled after an action")
    adb: Adb = Field(Adb(), description="how phones of protocol adb are used")

    @property
    def call_seconds(self) -> CallSeconds:
        given, usual = self.deadlines, _OWN if self.protocol == "tapforge" else _OTHERS
        return CallSeconds(
            given.reset_seconds or usual.reset,
            given.step_seconds or usual.step,
            given.evaluate_seconds or usual.evaluate,
            given.episode_seconds or usual.episode,
        )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="protocol must be that of source.ownPool.spec.protocol: a run has to understand its own phones",
            cel="!has(self.source.ownPool) || self.source.ownPool.spec.protocol == self.protocol",
            holds=lambda o: o.source.own_pool is None or o.source.own_pool.spec.protocol == o.protocol,
        ),
        Rule(
            message="protocol must be tapforge with source.processes: the phones on the driver's machine speak it",
            cel="!has(self.source.processes) || self.protocol == 'tapforge'",
            holds=lambda o: o.source.processes is None or o.protocol == "tapforge",
        ),
        Rule(
            message="protocol must be tapforge with source.dataset: recorded steps are asked by nothing else",
            cel="!has(self.source.dataset) || self.protocol == 'tapforge'",
            holds=lambda o: o.source.dataset is None or o.protocol == "tapforge",
        ),
        Rule(
            message="screen must be 160x210, 320x420 or 640x840 pixels with source.processes.environment miniwob",
            cel="!has(self.source.processes) || self.source.processes.environment == 'phone' || "
            "(self.screen.width == 160 && self.screen.height == 210) || "
            "(self.screen.width == 320 && self.screen.height == 420) || "
            "(self.screen.width == 640 && self.screen.height == 840)",
            holds=lambda o: (
                o.source.processes is None
                or o.source.processes.environment == "phone"
                or (o.screen.width, o.screen.height) in ((160, 210), (320, 420), (640, 840))
            ),
        ),
        Rule(
            message="source.urls.list must hold URLs, http://HOST:PORT; other addresses are of protocol adb",
            cel="!has(self.source.urls) || !has(self.source.urls.list) || self.protocol == 'adb' || "
            "self.source.urls.list.all(u, u.startsWith('http://') || u.startsWith('https://'))",
            holds=lambda o: o.source.urls is None or o.protocol == "adb" or all(map(is_url, o.source.urls.list or ())),
        ),
    )


class Sampler(Spec):
    """Which of the tasks are practised more often than others."""

    name: Word = Field(
        "uniform",
        description="uniform: each as often; near_half: those with a success rate near one half; band: those within a "
        "band of success; stages: a mix of templates that changes with the updates; or an entry point of "
        "tapforge.samplers",
    )
    options: PluginOptions = OPTIONS


class Cooldown(Spec):
    """Tasks that teach nothing pause for a while and are tried again then."""

    after_failed: Positive | None = Field(
        None,
        description="groups in a row in which every valid episode failed, after which a task pauses; without it such "
        "tasks never do",
    )
    after_solved: Positive | None = Field(
        None,
        description="groups in a row in which every valid episode succeeded, after which a task pauses; without it "
        "such tasks never do",
    )
    updates: Positive = Field(20, description="updates for which it pauses")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="afterFailed or afterSolved must be set: without both no task ever pauses",
            cel="has(self.afterFailed) || has(self.afterSolved)",
            holds=lambda o: o.after_failed is not None or o.after_solved is not None,
        ),
    )


class Tasks(Spec):
    """What is practised. `evaluation.tasks` says what is measured on."""

    suite: Word = Field("quickstart", description="task suite of the environment")
    split: Split = Field("train", description="part of the suite that episodes are drawn from")
    templates: Annotated[tuple[Word, ...], Field(max_length=1024), UNIQUE] = Field(
        (), description="task templates to draw from; empty: all of the split"
    )
    file: Path | None = Field(
        None,
        description="file with one task per line, instead of the suite: JSONL, or a list as its protocol has them",
    )
    max_tasks: Positive | None = Field(None, description="at most this many different tasks; without it all")
    sampler: Sampler = Field(Sampler(), description="which of them are practised more often than others")
    cooldown: Cooldown | None = Field(
        None, description="pauses of tasks that always fail or always succeed; without it there are none"
    )
    half_life: Positive = Field(
        50, description="updates after which a result counts half in a task's success rate, by which samplers choose"
    )


class EvaluationTasks(Spec):
    """What is measured on: tasks that are not practised."""

    suite: Word | None = Field(
        None,
        description="task suite; without it and without file the one that is practised, or the tasks of tasks.file",
    )
    split: Split = Field("test", description="part of the suite that is measured on")
    templates: Annotated[tuple[Word, ...], Field(max_length=1024), UNIQUE] = Field(
        (), description="task templates; empty: those that are practised, or all of another suite"
    )
    file: Path | None = Field(None, description="file with one task per line, instead of a suite, as tasks.file")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            message="suite and file must not both be set: tasks come from one of them",
            cel="!(has(self.suite) && has(self.file))",
            holds=lambda o: o.suite is None or o.file is None,
        ),
    )
