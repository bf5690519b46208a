"""A run's first file from three answers: which environment, which model, which machine. Pure.

Promises: `tapforge plan` takes the file as it is written, on any machine, with the values that matter commented; what
can't work together is refused in words. Sizes are those of the samples (`manifests/samples`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

Environment = Literal["simulated", "adb", "androidworld", "osworld", "pool"]
ENVIRONMENTS: Final = get_args(Environment)
#: part of a model's name, in lower case -> its adapter; the first that fits
_ADAPTERS: Final = (
    ("ui-tars", "ui-tars"),
    ("gui-owl", "gui-owl"),
    ("mai-ui", "mai-ui"),
    ("aguvis", "aguvis"),
    ("qwen3", "qwen3-vl"),
    ("qwen2", "qwen2.5-vl"),
)
TINY: Final = "tiny"
#: adapters that act on a phone only
_PHONES_ONLY: Final = ("mai-ui",)
#: tasks that a file of this environment begins with, as lines of tasks.jsonl
TASKS: Final[dict[str, str]] = {
    "adb": '{"template": "wifi-off", "goal": "Turn Wi-Fi off.", "max_steps": 12, "params": '
    '{"setup": "svc wifi enable", "check": "settings get global wifi_on", "expect": "^0$"}}\n'
    '{"template": "version", "goal": "Which version of Android is this?", "max_steps": 12, '
    '"params": {"answer": "^\\\\D*13\\\\b"}}\n',
    "androidworld": '{"suite": "androidworld", "template": "ContactsAddContact", "params": {"task_idx": "0"}, '
    '"max_steps": 20}\n',
    "osworld": '{"suite": "osworld", "template": "os/94d95f96-9699-4208-98ba-3c3119edf9c2", "max_steps": 15}\n',
}


class NoFile(ValueError):
    """What was asked for can't be a run; says what can."""


@dataclass(frozen=True, slots=True)
class Asked:
    name: str
    environment: Environment
    #: "tiny", OWNER/NAME of Hugging Face or a folder
    model: str
    #: 0: a machine without any
    gpus: int
    #: a run on Kubernetes rather than on this machine
    cluster: bool
    #: file of tasks, as a run in the working directory finds it
    tasks: str = "tasks.jsonl"


def first_file(asked: Asked) -> str:
    """YAML with comments. Raises NoFile."""
    tiny = asked.model == TINY
    if tiny and asked.environment != "simulated":
        raise NoFile(
            f"the tiny model knows the simulated phone's small screens alone: with {asked.environment} name a model, "
            "such as Qwen/Qwen3-VL-8B-Instruct"
        )
    if not tiny and not asked.gpus:
        raise NoFile(f"{asked.model} needs GPUs: say how many there are, or take the model tiny")
    if asked.environment == "pool" and not asked.cluster:
        raise NoFile("a pool's phones need the operator: ask for a cluster, or take another environment")
    adapter = "qwen3-vl" if tiny else _adapter(asked.model)
    if asked.environment == "osworld" and adapter in _PHONES_ONLY:
        raise NoFile(f"{adapter} acts on phones only: take another model for osworld")
    head = (
        "# What runs: tapforge plan -f THIS FILE. Every field: tapforge explain spec.\n"
        f"apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata:\n  name: {asked.name}\nspec:\n  seed: 1\n"
    )
    parts = [head, _model(asked, adapter), _environment(asked), _tasks(asked), _learning(asked), _machine(asked)]
    return "".join(parts)


def _adapter(model: str) -> str:
    found = next((adapter for part, adapter in _ADAPTERS if part in model.lower()), None)
    return found or "qwen3-vl"


def _model(asked: Asked, adapter: str) -> str:
    if asked.model == TINY:
        return (
            "  model:\n    source: {tiny: {}}          # 1.1 million parameters, comes with the package\n"
            "    dtype: float32\n    freezeVision: true\n    contextTokens: 256\n"
            "    adapter: {name: qwen3-vl, prompt: compact, historyImages: 1, historySteps: 8}\n"
        )
    folder = asked.model.startswith((".", "/", "~")) or asked.model.count("/") != 1
    source = f"path: {{folder: {asked.model}}}" if folder else f"huggingFace: {{repo: {asked.model}}}"
    lora = "    lora: {rank: 64, alpha: 128}   # adapters only; without this line all weights learn, on 8 GPUs\n"
    known = any(part in asked.model.lower() for part, _ in _ADAPTERS)
    return (
        f"  model:\n    source: {{{source}}}\n    contextTokens: 10240\n    maxPixels: 1003520\n"
        + ("" if asked.gpus >= 8 else lora)
        + ("" if known else "    # the adapter makes prompts and reads actions: docs/models.md lists them\n")
        + f"    adapter:\n      name: {adapter}\n"
        + "      history: {blocks: {keep: 2, upTo: 6}}   # screens that a prompt shows\n"
    )


def _environment(asked: Asked) -> str:
    if asked.model == TINY:
        return (
            "  environment:\n    source: {processes: {count: 64, servers: 1}}   # simulated phones on this machine\n"
            "    screen: {width: 96, height: 160}\n    deadlines: {episodeSeconds: 60}\n"
        )
    if asked.environment == "simulated":
        return (
            "  environment:\n    source: {processes: {count: 32, servers: 2}}   # simulated phones beside the driver\n"
            "    screen: {width: 1080, height: 2400}\n"
        )
    if asked.environment == "pool":
        return (
            "  environment:\n    # phones of an EmulatorPool of this name; kubectl get emulatorpools\n"
            "    source: {pool: {name: phones, slots: 32}}\n    screen: {width: 1080, height: 2400}\n"
        )
    addresses = {
        "adb": '"emulator-5554"',
        "androidworld": '"http://127.0.0.1:5000"',
        "osworld": '"http://127.0.0.1:10001?workers=4"',
    }[asked.environment]
    what = "serials or HOST:PORT; auto: all that are attached" if asked.environment == "adb" else "a server each"
    return (
        f"  environment:\n    protocol: {asked.environment}\n    source:\n"
        f"      urls: {{list: [{addresses}]}}   # {what}\n"
        f"    # more: docs/{asked.environment}.md\n"
    )


def _tasks(asked: Asked) -> str:
    if asked.model == TINY:
        return "  tasks: {suite: quickstart, split: train}\n"
    if asked.environment in ("simulated", "pool"):
        return "  tasks: {suite: standard, split: train}\n"
    return f"  tasks: {{file: {asked.tasks}}}   # a task per line; measure on others than these in the end\n"


def _learning(asked: Asked) -> str:
    if asked.model == TINY:
        return (
            "  warmStart: {demonstrations: 1000, steps: 180, batchSize: 64, learningRate: 1e-3, errorRate: 0.5}\n"
            "  rollout: {groupSize: 8, groupsPerUpdate: 16, responseTokens: 24, minValid: 4}\n"
            "  algorithm:   # tapforge preset lists others\n    advantage: {gigpo: {gamma: 0.95}}\n"
            "  learner: {learningRate: 1.5e-4, miniBatches: 2, tokensPerMicroBatch: 8192}\n"
            "  engine: {maxConcurrentSequences: 64, kvCacheMiB: 128}\n"
            "  evaluation: {tasks: {split: test}, episodes: 200}\n  stop: {maxUpdates: 44, maxSeconds: 210}\n"
        )
    own = asked.environment in ("simulated", "pool")
    ranks = max(1, asked.gpus // 2)
    groups = "groupSize: 8, groupsPerUpdate: 16" if own else "groupSize: 4, groupsPerUpdate: 2"
    rate = "1e-6" if asked.gpus >= 8 else "2e-5"
    turns = "  placement: {mode: colocated}   # learner and engine take turns on the GPU\n" if asked.gpus == 1 else ""
    measured = "tasks: {split: test}, episodes: 100" if own else f"tasks: {{file: {asked.tasks}}}, episodes: 2"
    return (
        f"  rollout: {{{groups}, responseTokens: 512}}\n"
        "  algorithm:   # tapforge preset lists others\n    advantage: {gigpo: {}}\n"
        f"  learner: {{ranks: {ranks}, learningRate: {rate}, tokensPerMicroBatch: 16384}}\n"
        f"  engine: {{replicas: {max(1, asked.gpus - ranks)}, maxConcurrentSequences: 64}}\n{turns}"
        f"  evaluation: {{{measured}, everyUpdates: 20}}\n  stop: {{maxUpdates: 200}}\n"
    )


def _machine(asked: Asked) -> str:
    if not asked.cluster:
        return f"  device: {'cuda' if asked.gpus else 'cpu'}\n"
    head = (
        "  checkpoints: {uri: s3://bucket/runs}   # or storage: a volume; they outlive the Pods\n"
        "  cluster:\n    image: tapforge/trainer:dev\n"
    )
    if not asked.gpus:
        return head
    limits = f'{{memory: 400Gi, nvidia.com/gpu: "{asked.gpus}"}}'
    return (
        f"{head}    workers:\n      - name: gpu\n        replicas: 1\n        template:\n          spec:\n"
        "            containers:\n              - name: ray\n                resources:\n"
        f'                  requests: {{cpu: "16", memory: 200Gi}}\n                  limits: {limits}\n'
    )
