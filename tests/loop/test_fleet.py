"""What a driver writes down of its phones, and what `tapforge top` makes of it."""

import asyncio
import io
import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner
from rich.console import Console

from tapforge_envs.slots.source import Verdict
from tapforge_envs.slots.table import SlotTable
from tapforge_trainer.cli.main import cli
from tapforge_trainer.run.fleet import PHONES, FleetError, as_json, drawn, fleet_of, read_fleet, written


def a_fleet(well: int = 3) -> SlotTable:
    """One phone in quarantine, one sick, one leased; the others free."""
    table = SlotTable(["broken", "dirty", "busy", *(f"well-{i}" for i in range(well))], strikes=2)
    for name, times in (("broken", 2), ("dirty", 1)):
        for _ in range(times):
            others = frozenset(table.names) - {name}
            table.give(*table.take(others), Verdict.DIRTY)
            if times == 2 and table.usable == len(table.names):
                table.probed(name, healthy=True)
    assert table.take(frozenset(table.names) - {"busy"})[0] == "busy"
    return table


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to pass")


def text(folder_name: str, fleet, now: float, rows: int | None = None) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(drawn(folder_name, fleet, now, rows))
    return console.export_text()


def test_what_is_written_is_what_is_read(tmp_path):
    fleet = fleet_of(a_fleet(), 1000.0)
    (tmp_path / PHONES).write_text(as_json(fleet))
    assert read_fleet(tmp_path) == fleet


def test_phones_with_troubles_come_first():
    shown = text("my-run", fleet_of(a_fleet(), 1000.0), 1001.0)
    assert "my-run  6 phones: 1 leased, 3 free, 1 sick, 0 probation, 1 quarantined" in shown
    assert "since the start: 1 times into quarantine" in shown
    names = [line.split()[0] for line in shown.splitlines()[3:]]
    assert names == ["broken", "dirty", "busy", "well-0", "well-1", "well-2"]
    assert "and 4 more" in text("my-run", fleet_of(a_fleet(), 1000.0), 1001.0, rows=2)


def test_a_driver_that_is_gone_is_said():
    fleet = fleet_of(a_fleet(), 1000.0)
    assert "its driver is gone" not in text("r", fleet, 1005.0)
    assert "written 60 s ago: the run has ended, or its driver is gone" in text("r", fleet, 1060.0)


async def test_the_driver_writes_again_and_once_at_its_end(tmp_path):
    table = a_fleet()
    async with written(table, tmp_path, every=0.01):
        await until((tmp_path / PHONES).exists)
        before = read_fleet(tmp_path)
        await until(lambda: read_fleet(tmp_path).at > before.at)
        table.add("new")
    assert {phone.name for phone in read_fleet(tmp_path).phones} - {p.name for p in before.phones} == {"new"}
    assert [path.name for path in tmp_path.iterdir()] == [PHONES]


async def test_a_folder_that_can_not_be_written_ends_nothing(tmp_path, caplog):
    folder = tmp_path / "gone"
    async with written(a_fleet(), folder, every=0.01):
        await until(lambda: "phones.json can't be written (No such file or directory)" in caplog.text)
        folder.mkdir()  # it was for a moment only
        await until((folder / PHONES).exists)
    assert caplog.text.count("can't be written") == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"at": 1, "counts": {}, "phones": [1]}', '{"at": {}}'])
def test_a_file_that_is_none_is_named(tmp_path, content):
    (tmp_path / PHONES).write_text(content)
    with pytest.raises(FleetError, match="phones.json is not a list of phones"):
        read_fleet(tmp_path)


def test_what_a_later_version_says_is_left_out(tmp_path):
    found = json.loads(as_json(fleet_of(a_fleet(), 1000.0)))
    found["counts"]["charging"] = found["phones"][0]["battery"] = 7
    (tmp_path / PHONES).write_text(json.dumps(found))
    assert read_fleet(tmp_path) == fleet_of(a_fleet(), 1000.0)


def test_the_command_prints_one_table_where_nobody_looks(tmp_path):
    (tmp_path / PHONES).write_text(as_json(fleet_of(a_fleet(), 1000.0)))
    shown = CliRunner().invoke(cli, ["top", str(tmp_path), "--rows", "1"])
    assert shown.exit_code == 0 and "broken" in shown.output and "dirty " not in shown.output.splitlines()[-2]
    missing = CliRunner().invoke(cli, ["top", str(tmp_path / "none")])
    assert missing.exit_code == 2 and "name the folder of a run" in missing.output
