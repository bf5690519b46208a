"""AndroidControl, GUI-Odyssey and Rico, in rows made here as their pages describe them: what is read and counted."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tests.data.test_data_sets import image, made

from tapforge_trainer.data import sources
from tapforge_trainer.data.episodes import DataError
from tapforge_trainer.data.tfrecord import examples


def example_class() -> Any:
    """`tf.train.Example`, by protobuf itself."""
    field = descriptor_pb2.FieldDescriptorProto
    one, many, message = field.LABEL_OPTIONAL, field.LABEL_REPEATED, field.TYPE_MESSAGE
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    feature = file.message_type.add(name="Feature")
    lists = {"bytes": field.TYPE_BYTES, "float": field.TYPE_FLOAT, "int64": field.TYPE_INT64}
    for number, (name, kind) in enumerate(lists.items(), start=1):
        file.message_type.add(name=f"{name}List").field.add(name="value", number=1, type=kind, label=many)
        feature.field.add(name=f"{name}_list", number=number, type=message, type_name=f".tf.{name}List", label=one)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=one)
    entry.field.add(name="value", number=2, type=message, type_name=".tf.Feature", label=one)
    features.field.add(name="feature", number=1, type=message, type_name=".tf.Features.FeatureEntry", label=many)
    whole = file.message_type.add(name="Example")
    whole.field.add(name="features", number=1, type=message, type_name=".tf.Features", label=one)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


EXAMPLE = example_class()


def record(goal: str, actions: list[dict[str, Any]], first: int = 0, screens: int | None = None, **more: Any) -> bytes:
    found = EXAMPLE()
    feature = found.features.feature
    feature["episode_id"].int64_list.value.append(-5)
    feature["goal"].bytes_list.value.append(goal.encode())
    count = len(actions) + 1 if screens is None else screens
    feature["screenshots"].bytes_list.value.extend(image(first + place) for place in range(count))
    feature["screenshot_widths"].int64_list.value.extend([100] * count)
    feature["actions"].bytes_list.value.extend(json.dumps(action).encode() for action in actions)
    feature["step_instructions"].bytes_list.value.extend(f"step {place}".encode() for place in range(len(actions)))
    feature["shares"].float_list.value.extend([0.5, -2.0])
    return found.SerializeToString()


def written(path: Path, records: list[bytes], zipped: bool = True) -> Path:
    data = b"".join(struct.pack("<QI", len(one), 0) + one + bytes(4) for one in records)
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


CLICK = {"action_type": "click", "x": 50, "y": 100}


@pytest.mark.parametrize("zipped", [True, False])
def test_examples_are_read_as_protobuf_wrote_them(tmp_path: Path, zipped: bool) -> None:
    path = written(tmp_path / "a", [record("go", [CLICK]), b"\xff\xff\xff", record("on", [])], zipped)
    (_, first), (where, broken), (_, third) = examples(path)
    assert first["goal"] == [b"go"] and first["episode_id"] == [-5] and first["shares"] == [0.5, -2.0]
    assert first["screenshots"] == [image(0), image(1)] and first["screenshot_widths"] == [100, 100]
    assert where == "a record 2" and isinstance(broken, DataError) and third["goal"] == [b"on"]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="cut off|to its end"):
        list(examples(path))


def test_android_control(tmp_path: Path) -> None:
    actions = [
        {"action_type": "open_app", "app_name": "Zoho Meet"},
        CLICK,
        {"action_type": "long_press", "x": 0, "y": 199},
        {"action_type": "input_text", "text": "naïve 开"},
        {"action_type": "scroll", "direction": "down"},
        {"action_type": "navigate_back"},
        {"action_type": "navigate_home"},
        {"action_type": "wait"},
    ]
    records = [
        record("Join the meeting", actions),
        record("Fly", [{"action_type": "fly"}], 20),
        record("Type", [{"action_type": "type", "x": 1, "y": 1, "text": "a"}], 22),
        record("Beside it", [CLICK, {"action_type": "click", "x": 540, "y": 1200}], 24),
        record("One too few", [CLICK], 28, screens=1),
        record("", [CLICK], 30),
    ]
    (tmp_path / "sets").mkdir()
    written(tmp_path / "sets" / "android_control-00000-of-00020", records)
    data = made("android-control", tmp_path / "sets", tmp_path / "set")
    (episode,) = data
    assert episode.task.goal == "Join the meeting" and episode.outcome == "unknown" and episode.last_screen is not None
    kinds = [step.action.type for step in episode.steps]
    assert kinds == ["open_app", "tap", "long_press", "type", "scroll", "back", "home", "wait"]
    tap, press = episode.steps[1].action, episode.steps[2].action
    assert (tap.x, tap.y) == pytest.approx((0.505, 0.5025), abs=0.006) and press.y > 0.99
    assert data.screen(episode.steps[1].screen) == image(1)
    counts = {reason: one["rows"] for reason, one in data.about["rejected"].items()}
    assert counts == {"action": 2, "coordinates": 1, "row": 2}
    low = made("android-control", tmp_path / "sets", tmp_path / "low", level="low")
    assert [one.task.goal for one in low][:3] == ["step 0", "step 1", "step 2"] and len(low) == 10
    with pytest.raises(DataError, match="level=middle; known are high, low"):
        list(sources.read("android-control", tmp_path / "sets", {"level": "middle"}))


def odyssey(folder: Path, name: str, steps: list[tuple[str, Any]], **task: Any) -> None:
    (folder / "annotations").mkdir(exist_ok=True)
    (folder / "screenshots").mkdir(exist_ok=True)
    listed = []
    for place, (action, info) in enumerate(steps):
        file = f"{name}_{place}.png"
        (folder / "screenshots" / file).write_bytes(image(hash((name, place)) % 1000))
        listed.append({"step": place, "screenshot": file, "action": action, "info": info, "ps": ""})
    about = {"task": "the task", "instruction": f"Find {name}", **task}
    document = {"episode_id": name, "task_info": about, "step_length": len(steps), "steps": listed}
    (folder / "annotations" / f"{name}.json").write_text(json.dumps(document))


def test_gui_odyssey(tmp_path: Path) -> None:
    taps = [("CLICK", [[500, 250]]), ("LONG_PRESS", [[0, 1000]]), ("SCROLL", [[500, 800], [500, 200]])]
    keys = [("CLICK", "KEY_HOME"), ("CLICK", "KEY_APPSELECT"), ("BACK", "")]
    odyssey(tmp_path, "a", [*taps, ("TYPE", "東京"), *keys, ("COMPLETE", "")])
    odyssey(tmp_path, "b", [("CLICK", [[500, 250]]), ("IMPOSSIBLE", "")])
    odyssey(tmp_path, "c", [("CLICK", [[540, 1200]])])
    odyssey(tmp_path, "d", [("CLICK", [[1, 2], [3, 4]])])
    odyssey(tmp_path, "e", [("PINCH", "")])
    odyssey(tmp_path, "f", [("BACK", "")], instruction=None)
    odyssey(tmp_path, "g", [("BACK", "")])
    (tmp_path / "screenshots" / "g_0.png").unlink()
    (tmp_path / "annotations" / "h.json").write_text("{")
    data = made("gui-odyssey", tmp_path / "annotations", tmp_path / "set")
    first, second = data
    assert first.task.goal == "Find a" and (first.outcome, second.outcome) == ("success", "unknown")
    kinds = [step.action.type for step in first.steps]
    assert kinds == ["tap", "long_press", "swipe", "type", "home", "app_switch", "back", "terminate"]
    tap, swipe = first.steps[0].action, first.steps[2].action
    assert (tap.x, tap.y) == pytest.approx((0.5, 0.25), abs=0.01) and swipe.y > swipe.y2
    assert second.steps[-1].action.status == "infeasible"
    counts = {reason: one["rows"] for reason, one in data.about["rejected"].items()}
    assert counts == {"coordinates": 1, "action": 2, "row": 2, "image": 1}
    short = made("gui-odyssey", tmp_path / "annotations" / "a.json", tmp_path / "short", instruction="task")
    assert short[0].task.goal == "the task"
    with pytest.raises(DataError, match="has no JSON file"):
        list(sources.read("gui-odyssey", tmp_path / "screenshots", {}))


def element(words: str | None, bounds: list[float], *children: Any, **more: Any) -> dict[str, Any]:
    return {"text": words, "content-desc": [None], "bounds": bounds, "children": [*children, None], **more}


def test_rico(tmp_path: Path) -> None:
    trace = tmp_path / "filtered_traces" / "com.example" / "trace_0"
    (trace / "screenshots").mkdir(parents=True)
    (trace / "view_hierarchies").mkdir()
    # Bounds are in other pixels than the screenshot's.
    button = element("Save\n it", [144, 256, 720, 512])
    hidden = element("Not this", [144, 256, 300, 300], **{"visible-to-user": False})
    icon = {**element(None, [0, 2048, 720, 2560]), "content-desc": ["Menu"]}
    row = element("All of it", [0, 0, 1440, 1280], button, hidden, element("Beyond", [0, 0, 9999, 9999]))
    root = element(None, [0, 0, 1440, 2560], row, icon)
    gestures = {
        "2": [[0.2, 0.15]], "10": [[0.3, 0.9], [0.305, 0.9]], "11": [[0.5, 0.8], [0.5, 0.2]], "12": [[0.9, 0.9]],
        "13": [[1.2, 0.5]], "14": "left", "15": [], "16": [[0.2, 0.15]], "9" * 5000: [[0.2, 0.15]],
    }  # fmt: skip
    (trace / "gestures.json").write_text(json.dumps(gestures))
    for number in (2, 10, 11, 12, 13, 14, 15, 16):
        (trace / "screenshots" / f"{number}.jpg").write_bytes(image(number, kind="JPEG"))
        text = json.dumps({"activity": {"root": root}}) if number != 16 else "{"
        (trace / "view_hierarchies" / f"{number}.json").write_text(text)
    data = made("rico", tmp_path / "filtered_traces", tmp_path / "set")
    assert [episode.task.goal for episode in data] == ['Tap "Save it"', 'Tap "Menu"']
    [step] = data[0].steps
    assert step.target is not None and step.target.model_dump() == {
        "left": 0.1,
        "top": 0.1,
        "right": 0.5,
        "bottom": 0.2,
    }
    assert (step.action.type, step.action.x, step.action.y) == ("tap", 0.2, 0.15)
    counts = {reason: rows["rows"] for reason, rows in data.about["rejected"].items()}
    assert counts == {"no_goal": 2, "coordinates": 1, "action": 1, "row": 1, "image": 1}

    good = {number: gestures[number] for number in ("2", "10", "11", "15")}
    (trace / "gestures.json").write_text(json.dumps(good))
    goals = tmp_path / "goals.json"
    goals.write_text(json.dumps({"com.example/trace_0": "Save the menu"}))
    [whole] = made("rico", tmp_path / "filtered_traces", tmp_path / "whole", goals=str(goals))
    assert whole.task.goal == "Save the menu" and whole.outcome == "unknown"
    assert [step.action and step.action.type for step in whole.steps] == ["tap", "tap", "swipe", None]
    other = ('{"com.other/trace_0": "Go"}', "names none of the 1 traces, of which the first is com.example/trace_0")
    for wrong, words in (('{"a": 3}', "JSON object of goals"), ("[", "is not JSON"), other):
        goals.write_text(wrong)
        with pytest.raises(DataError, match=words):
            made("rico", tmp_path / "filtered_traces", tmp_path / "none", goals=str(goals))
    with pytest.raises(DataError, match="no gestures.json"):
        made("rico", tmp_path / "whole", tmp_path / "none")
