"""How Argo CD and Flux read pools and runs, whatever state the operator's planners say they are in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from e2e.gitops.argocd import CHECKS, health
from e2e.gitops.kstatus import Reading
from pools import NOW, pool
from situations import POOLS, RUNS, all_pools, all_runs, thing

from tapforge_api.pool import EmulatorPoolStatus
from tapforge_operator.emulatorpool.state import RefusalReason
from tapforge_operator.emulatorpool.status import Concern, Counts, Report, status_of

Flux = Callable[..., list[Reading]]
CONCERNS = Path(__file__).parents[2] / "operator" / "tapforge_operator" / "emulatorpool" / "status.py"

#: kind, situation, what Argo CD says, a word of its message, what kstatus says
TABLE = """
EmulatorPool  new                       Progressing  not_seen          InProgress
EmulatorPool  boots                     Progressing  3_slots_boot      InProgress
EmulatorPool  ready                     Healthy      3_of_3            Current
EmulatorPool  edited                    Progressing  not_seen          InProgress
EmulatorPool  empty                     Healthy      0_of_0            Current
EmulatorPool  at_rest                   Healthy      0_of_0            Current
EmulatorPool  one_is_exchanged          Healthy      9_of_10           InProgress
EmulatorPool  grows_by_one              Healthy      9_of_10           InProgress
EmulatorPool  rolls_out                 Progressing  to_exchange       InProgress
EmulatorPool  no_room                   Progressing  without_a_node    InProgress
EmulatorPool  slow_pull                 Progressing  imagePullSecrets  InProgress
EmulatorPool  bad_image                 Degraded     ImagePullBackOff  InProgress
EmulatorPool  boots_fail                Degraded     9_boots_in_a_row  InProgress
EmulatorPool  a_device_rests            Degraded     http://b          InProgress
EmulatorPool  all_devices               Healthy      2_of_2            Current
EmulatorPool  over_quota                Degraded     quota             InProgress
EmulatorPool  forbidden                 Degraded     says_no           Failed
EmulatorPool  unreadable                Degraded     too_many          Failed
EmulatorPool  deleted                   -            -                 Terminating
TrainingRun   new                       Progressing  not_seen          InProgress
TrainingRun   begins                    Progressing  attempt_1         InProgress
TrainingRun   waits_for_phones          Progressing  1_of_3_phones     InProgress
TrainingRun   starts                    Progressing  -                 InProgress
TrainingRun   runs                      Healthy      runs              Current
TrainingRun   without_KubeRay           Degraded     install_KubeRay   Failed
TrainingRun   held_by_a_queue           Suspended    -                 InProgress
TrainingRun   stops                     Progressing  suspended         InProgress
TrainingRun   suspended                 Suspended    it_goes_on_from   Current
TrainingRun   suspended_from_the_start  Suspended    is_suspended      Current
TrainingRun   resumed                   Progressing  not_seen          InProgress
TrainingRun   lost_its_cluster          Progressing  was_lost          InProgress
TrainingRun   complete                  Healthy      complete          Current
TrainingRun   complete_and_edited       Healthy      complete          Current
TrainingRun   failed                    Degraded     -                 Failed
TrainingRun   unreadable                Degraded     not_a_number      Failed
TrainingRun   deleted                   -            -                 Terminating
"""
ROWS = [tuple(word.replace("_", " ") for word in line.split()) for line in TABLE.split("\n") if line]
SITUATIONS = {"EmulatorPool": POOLS, "TrainingRun": RUNS}


def test_the_table_has_every_situation() -> None:
    assert [(kind, name) for kind, name, *_ in ROWS] == [(k, name) for k, all_ in SITUATIONS.items() for name in all_]


@pytest.mark.parametrize(
    ("kind", "situation", "argo", "word", "flux_says"), ROWS, ids=[f"{kind}: {name}" for kind, name, *_ in ROWS]
)
def test_both_tools_read_what_the_operator_means(
    flux: Flux, kind: str, situation: str, argo: str, word: str, flux_says: str
) -> None:
    one = SITUATIONS[kind][situation]()
    (reading,) = flux(one)
    assert reading.status == flux_says, reading
    if argo == "-":
        return  # what is being deleted Argo CD itself says
    found = health(one)
    assert found.status == argo, found
    assert found.message
    assert word in ("-", *[word] * (word in found.message)), found.message


def _ready(thing: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in thing["status"]["conditions"])


#: what Argo CD may say where kstatus says so
AGREE = {
    "EmulatorPool": {
        "Current": {"Healthy"},
        "InProgress": {"Healthy", "Progressing", "Degraded"},
        "Failed": {"Degraded"},
    },
    "TrainingRun": {
        "Current": {"Healthy", "Suspended"},
        "InProgress": {"Progressing", "Suspended"},
        "Failed": {"Degraded"},
    },
}


@pytest.mark.parametrize("every", [all_pools, all_runs])
def test_the_two_tools_never_contradict_each_other(flux: Flux, every: Callable[[], Iterator[dict[str, Any]]]) -> None:
    things = list(every())
    assert len(things) > 500
    said = [(one, health(one), reading.status) for one, reading in zip(things, flux(*things), strict=True)]
    assert not [row for row in said if row[1].status not in AGREE[row[0]["kind"]][row[2]]]
    assert not [row for row in said if row[1].status == "Healthy" and not _ready(row[0])]
    assert {reading for _, _, reading in said} == {"Current", "InProgress", "Failed"}


@pytest.mark.parametrize("kind", ["EmulatorPool", "TrainingRun"])
@pytest.mark.parametrize(
    "status",
    [
        {},
        {"conditions": []},
        {"observedGeneration": 1},
        {"observedGeneration": 1, "conditions": [{"type": "Other", "status": "True", "message": ""}]},
        {"observedGeneration": 0, "conditions": [{"type": "Ready", "status": "True", "message": ""}]},
        {"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "Unknown", "message": ""}]},
    ],
)
def test_what_says_too_little_is_on_its_way(kind: str, status: dict[str, Any]) -> None:
    assert health(thing(kind, status)).status == "Progressing"
    bare = thing(kind, status)
    del bare["status"]
    assert health(bare).status == "Progressing"


def _reasons() -> list[str]:
    told = set(re.findall(r'Concern\(\s*"(\w+)"', CONCERNS.read_text())) | set(get_args(RefusalReason))
    assert len(told) > 10
    return sorted(told)


@pytest.mark.parametrize("reason", _reasons())
def test_every_trouble_of_a_pool_that_is_not_ready_is_shown(reason: str) -> None:
    of = pool()
    report = Report(Counts(desired=3), 0, concerns=[Concern(reason, "this is why")], busy=[("SlotsMissing", "some")])
    status = status_of(of, report, EmulatorPoolStatus(), NOW).model_dump(mode="json", by_alias=True)
    found = health(thing("EmulatorPool", status))
    by_itself = reason in ("Unschedulable", "ImagePullSlow")
    assert (found.status, found.message) == ("Progressing" if by_itself else "Degraded", "this is why")


def test_a_ready_pool_says_what_is_wrong_with_it() -> None:
    report = Report(Counts(desired=3, ready=3), 0, concerns=[Concern("BootFailing", "this is why")])
    status = status_of(pool(), report, EmulatorPoolStatus(), NOW).model_dump(mode="json", by_alias=True)
    found = health(thing("EmulatorPool", status))
    assert (found.status, found.message) == ("Healthy", "3 of 3 slots are ready; this is why")


def test_argo_cd_gets_a_check_for_each_kind() -> None:
    component = yaml.safe_load((CHECKS / "kustomization.yaml").read_text())
    (generator,) = component["configMapGenerator"]
    entries = dict(entry.split("=") for entry in generator["files"])
    assert entries == {
        f"resource.customizations.health.tapforge.dev_{kind}": f"{kind.lower()}.lua" for kind in SITUATIONS
    }
    assert {path.name for path in CHECKS.glob("*.lua")} == set(entries.values())
