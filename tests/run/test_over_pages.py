"""A run trains on MiniWoB++ in a real browser: demonstrated, practised, measured; its goals are the pages' own."""

from __future__ import annotations

import pytest
from e2e import packages
from whole import Run, tapforge

from tapforge_envs.web import catalog

pytestmark = pytest.mark.long

PAGES, UPDATES, DEMONSTRATIONS = 3, 2, 8

SPEC = f"""
apiVersion: tapforge.dev/v1alpha1
kind: TrainingRun
metadata: {{name: pages}}
spec:
  seed: 3
  model: {{contextTokens: 256, adapter: {{prompt: compact}}}}
  environment:
    source: {{processes: {{environment: miniwob, count: {PAGES}}}}}
    screen: {{width: 160, height: 210}}
    deadlines: {{episodeSeconds: 600, acquireSeconds: 600, resetSeconds: 120, stepSeconds: 120, evaluateSeconds: 120}}
  tasks: {{suite: miniwob, templates: [click-test, click-test-2, focus-text]}}
  warmStart: {{demonstrations: {DEMONSTRATIONS}, steps: 4, batchSize: 8, errorRate: 0.5}}
  rollout: {{groupSize: 2, groupsPerUpdate: 2, responseTokens: 24, groupDeadlineSeconds: 600}}
  learner: {{learningRate: 1e-4}}
  engine: {{maxConcurrentSequences: 4, kvCacheMiB: 64}}
  evaluation: {{greedy: false, baselines: false, episodes: 4}}
  checkpoints: {{export: false}}
  stop: {{maxUpdates: {UPDATES}}}
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Run:
    packages.ensure(packages.CHROMIUM)
    place = tmp_path_factory.mktemp("pages")
    (place / "pages.yaml").write_text(SPEC)
    return Run(place / "runs" / "pages", place / "pages.yaml", tapforge("run", "-f", "pages.yaml", place=place))


def test_it_trains_and_leaves_no_browser_behind(pages: Run) -> None:
    assert pages.finished.code == 0, pages.finished.said
    assert pages.finished.left_behind == []
    assert [event["update"] for event in pages.events("update")] == [1, 2]
    (shown,) = pages.events("demonstrations")
    assert (shown["episodes"], shown["samples"]) == (DEMONSTRATIONS, DEMONSTRATIONS)
    assert pages.summary["updates"] == UPDATES


def test_what_was_asked_is_what_the_page_said(pages: Run) -> None:
    episodes = [episode for episode in pages.recording("rollout").episodes() if episode.steps]
    assert episodes
    for episode in episodes:
        assert episode.task.goal in (
            "Click the button.",
            "Click button ONE.",
            "Click button TWO.",
            "Focus into the textbox.",
        )
        assert catalog.page_of(episode.task) == episode.task.template
        assert episode.outcome != "invalid", episode.message
