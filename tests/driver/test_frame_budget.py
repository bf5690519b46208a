"""What the frames under way may take is known before anything is started."""

from tapforge_api import load
from tapforge_trainer.rollout.frame_budget import (
    BYTES_PER_PIXEL,
    budget_error,
    episode_bytes,
    frame_budget,
    largest_frame,
)
from tapforge_trainer.tasks.selection import training_tasks
from tapforge_trainer.tiny.folder import write_processor

GIB = 2**30


def run(rollout: str = "{}", environment: str = '{source: {urls: {list: ["http://a:1"]}}}', model: str = "{}"):
    spec = f"{{rollout: {rollout}, environment: {environment}, model: {model}, tasks: {{suite: standard}}}}"
    return load(f"{{apiVersion: tapforge.dev/v1alpha1, kind: TrainingRun, metadata: {{name: a}}, spec: {spec}}}\n")


def longest(found) -> int:
    return max(training_tasks(found).sample(found.spec.seed, n).max_steps for n in range(64))


def test_an_episode_takes_its_longest_task_in_frames_of_the_models_size():
    found = run(model="{adapter: {maxPixels: 1000000}}")
    assert episode_bytes(found, longest(found)) == int((longest(found) + 1) * 1_000_000 * BYTES_PER_PIXEL)
    # By default a prompt's frames take three quarters of it.
    wide = run(model="{contextTokens: 8192, adapter: {historyImages: 3}}", rollout="{responseTokens: 192}")
    pixels = episode_bytes(wide, longest(wide)) / (longest(wide) + 1) / BYTES_PER_PIXEL
    assert abs(pixels - 2000 * 32 * 32) < 10
    small = run(environment="{source: {processes: {count: 4}}, screen: {width: 96, height: 160}}")
    assert episode_bytes(small, longest(small)) == int((longest(small) + 1) * 96 * 160 * BYTES_PER_PIXEL)


def test_the_bound_is_the_specs_or_a_share_of_the_object_stores():
    found = run()
    assert frame_budget(found, training_tasks(found), None).max_bytes is None
    assert frame_budget(found, training_tasks(found), 10 * GIB).max_bytes == 6 * GIB
    given = run(rollout="{framesGiB: 2.5}")
    assert frame_budget(given, training_tasks(given), 10 * GIB).max_bytes == int(2.5 * GIB)


def test_an_update_that_does_not_fit_is_refused_with_the_remedy():
    found = run(rollout="{groupsPerUpdate: 64, groupSize: 8, framesGiB: 0.5}")
    error = budget_error(found, frame_budget(found, training_tasks(found), None))
    assert error is not None and "64 x 8 episodes" in error and "0.5 GiB" in error
    enough = run(rollout="{groupsPerUpdate: 64, groupSize: 8, framesGiB: 512}")
    assert budget_error(enough, frame_budget(enough, training_tasks(enough), None)) is None


def test_the_largest_frame_is_the_runs_own_screen_or_a_large_phones(tmp_path):
    write_processor(tmp_path)
    demo = run(environment="{source: {processes: {count: 4}}, screen: {width: 96, height: 160}}")
    assert largest_frame(demo, tmp_path) == (96, 160)
    phones = run(model="{contextTokens: 8192, maxPixels: 1310720}", rollout="{responseTokens: 192}")
    width, height = largest_frame(phones, tmp_path)
    assert 0.9 < width * height / 1_310_720 <= 1 and height / width > 2
    unbounded = run(model="{contextTokens: 8192}", rollout="{responseTokens: 192}")
    width, height = largest_frame(unbounded, tmp_path)
    assert 0.9 < width * height / (4096 * 32 * 32) <= 1, "as the image processor bounds it"
