"""The API: `TrainingRun` and `EmulatorPool`, the only definition of every field, default, unit and rule.

    run = load("quickstart.yaml", overrides=["spec.seed=3"])   # SpecError names everything that is wrong
    run.spec.rollout.group_size
    crd("TrainingRun")                                         # the schema for the API server

Imports nothing else of tapforge, and neither torch, ray nor vllm.
"""

from .base import API_VERSION, GROUP, VERSION, Condition, Metadata, OneOf
from .changes import forbidden_changes
from .crd import crd
from .document import to_yaml
from .errors import Problem, SpecError
from .loading import KINDS, SCHEMA_REVISION, Source, Text, dump_set, from_object, load, load_bundle, load_pool, resolve
from .pool import EmulatorPool, EmulatorPoolSpec
from .reading import Reading, read_pool, read_run
from .training_run import MAX_RUN_NAME, TrainingRun, TrainingRunSpec

__all__ = [
    "API_VERSION",
    "GROUP",
    "KINDS",
    "MAX_RUN_NAME",
    "SCHEMA_REVISION",
    "VERSION",
    "Condition",
    "EmulatorPool",
    "EmulatorPoolSpec",
    "Metadata",
    "OneOf",
    "Problem",
    "Reading",
    "Source",
    "SpecError",
    "Text",
    "TrainingRun",
    "TrainingRunSpec",
    "crd",
    "dump_set",
    "forbidden_changes",
    "from_object",
    "load",
    "load_bundle",
    "load_pool",
    "read_pool",
    "read_run",
    "resolve",
    "to_yaml",
]
