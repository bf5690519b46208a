"""The adb server's socket, with servers that lie, stop and never stop."""

import asyncio
import random
import socket

import pytest
from lying_adb import counted, ended, hostile, packet, refused, said

from tapforge_envs.clients.adb.device import is_address
from tapforge_envs.clients.adb.wire import (
    AdbError,
    AdbServer,
    Attached,
    ServerAddress,
    Trouble,
    read_devices,
    server_address,
    trouble_of,
)


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, ServerAddress("127.0.0.1", 5037)),
        ({"ANDROID_ADB_SERVER_PORT": "5038"}, ServerAddress("127.0.0.1", 5038)),
        ({"ANDROID_ADB_SERVER_ADDRESS": "10.0.0.7"}, ServerAddress("10.0.0.7", 5037)),
        ({"ADB_SERVER_SOCKET": "tcp:7000", "ANDROID_ADB_SERVER_PORT": "1"}, ServerAddress("127.0.0.1", 7000)),
        ({"ADB_SERVER_SOCKET": "tcp:desk:7000"}, ServerAddress("desk", 7000)),
        ({"ADB_SERVER_SOCKET": "tcp:[::1]:7000"}, ServerAddress("::1", 7000)),
        ({"ADB_SERVER_SOCKET": "localfilesystem:/run/adb"}, ServerAddress(path="/run/adb")),
    ],
)
def test_the_server_is_where_adb_would_look(environ, address):
    assert server_address(environ) == address


@pytest.mark.parametrize(
    "environ",
    [
        {"ANDROID_ADB_SERVER_PORT": "x"},
        {"ANDROID_ADB_SERVER_PORT": "70000"},
        {"ADB_SERVER_SOCKET": "udp:5"},
        {"ADB_SERVER_SOCKET": "tcp:"},
        {"ADB_SERVER_SOCKET": "tcp:host:"},
    ],
)
def test_a_variable_that_names_no_server_is_an_error(environ):
    with pytest.raises(ValueError, match="ADB_SERVER"):
        server_address(environ)


def test_devices_by_serial_and_state():
    listing = (
        "R58M123        device usb:1-1 product:a model:b device:c transport_id:1\n"
        "10.0.0.7:5555          offline transport_id:2\n"
        "X1  unauthorized transport_id:3\n"
        "????????????           no permissions; see [http://developer.android.com/tools/device.html]\n"
        "Y2                     no permissions (user in plugdev group; are your udev rules wrong?); see [...]\n"
        "\n"
    )
    assert read_devices(listing) == [
        Attached("R58M123", "device"),
        Attached("10.0.0.7:5555", "offline"),
        Attached("X1", "unauthorized"),
        Attached("Y2", "no permissions"),
    ]


@pytest.mark.parametrize("number", ["", " (2)", " (13)"])
@pytest.mark.parametrize("blanks", [" ", "      "])
@pytest.mark.parametrize("state", ["device", "offline", "no permissions"])
def test_a_serial_that_mdns_numbered_is_one_serial(number: str, blanks: str, state: str):
    serial = f"adb-4f00aa11-Zk3lPq{number}._adb-tls-connect._tcp"
    assert read_devices(f"{serial}{blanks}{state} product:p transport_id:4\n") == [Attached(serial, state)]
    assert is_address(serial)
    for wrong in ("a b", "a (2) b", "a ()", "a (2);x"):
        assert not is_address(wrong)


@pytest.mark.parametrize(
    ("reason", "trouble"),
    [
        ("device 'x' not found", Trouble.NO_DEVICE),
        ("no devices/emulators found", Trouble.NO_DEVICE),
        ("device unauthorized.\nThis adb server's $ADB_VENDOR_KEYS is not set", Trouble.UNAUTHORIZED),
        ("device still authorizing", Trouble.UNAUTHORIZED),
        ("device offline", Trouble.OFFLINE),
        ("closed", Trouble.REFUSED),
    ],
)
def test_a_refusal_by_its_meaning(reason, trouble):
    assert trouble_of(reason) is trouble


async def test_a_server_that_does_not_run_is_named_with_its_start_command():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(AdbError, match=rf"no adb server at 127.0.0.1:{port}.*start-server") as caught:
        await AdbServer(ServerAddress(port=port)).devices()
    assert caught.value.trouble is Trouble.NO_SERVER
    assert ServerAddress().start_command == "adb start-server"
    with pytest.raises(AdbError, match="/nowhere/adb"):
        await AdbServer(ServerAddress(path="/nowhere/adb")).devices()


async def test_a_shell_keeps_output_errors_and_exit_status_apart():
    asked: list[str] = []
    answer = b"OKAY" + packet(1, b"a") + packet(2, b"e") + packet(1, b"") + packet(1, b"b") + packet(3, b"\x07")
    async with hostile({"shell,v2": answer}, asked) as server:
        result = await server.shell("R58", "ls /nowhere")
    assert (result.stdout, result.stderr, result.status) == (b"ab", b"e", 7)
    assert asked == ["host:transport:R58", "shell,v2,raw:ls /nowhere"]


@pytest.mark.parametrize(
    ("answer", "words", "trouble"),
    [
        (refused("closed"), "closed", Trouble.REFUSED),
        (b"FAIL", "closed the connection", Trouble.BROKEN),
        (b"FAIL00zzx", "hexadecimal", Trouble.BROKEN),
        (b"FAIL-001", "hexadecimal", Trouble.BROKEN),
        (b"FAILffff...", "after 3 of 65535 bytes", Trouble.BROKEN),
        (b"HTTP/1.1 400", "is that an adb server", Trouble.BROKEN),
        (b"", "before an answer", Trouble.BROKEN),
        (b"OK", "before an answer, after 2 of 4", Trouble.BROKEN),
        (b"OKAY", "exit status", Trouble.BROKEN),
        (b"OKAY" + packet(1, b"half")[:-2], "rest of its output", Trouble.BROKEN),
        (b"OKAY" + packet(1, b"all of it"), "exit status", Trouble.BROKEN),
        (b"OKAY" + packet(9, b"x"), "unknown kind 9", Trouble.BROKEN),
        (b"OKAY" + packet(3, b""), "exit status of 0 bytes", Trouble.BROKEN),
        (b"OKAY" + packet(3, b"1234"), "exit status of 4 bytes", Trouble.BROKEN),
        (b"OKAY\x01\xff\xff\xff\xff", "more than 1000 bytes", Trouble.TOO_LONG),
        (b"OKAY" + packet(1, b"") * 300, "more than 1000 bytes", Trouble.TOO_LONG),
    ],
)
async def test_a_shell_that_breaks_off_or_lies_is_an_error(answer, words, trouble):
    async with hostile({"shell,v2": answer}) as server:
        with pytest.raises(AdbError, match=words) as caught:
            await server.shell("R58", "true", limit=1000)
    assert caught.value.trouble is trouble


async def test_output_without_end_is_cut_off_at_its_limit():
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"OKAY")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async with hostile({"exec:": endless}) as server:
        with pytest.raises(AdbError, match="more than 1000000 bytes"):
            await server.exec_out("R58", "yes", limit=1_000_000)


async def test_a_call_that_is_cancelled_cuts_its_connection():
    cut = asyncio.Event()

    async def silent(writer: asyncio.StreamWriter) -> None:
        writer.write(b"OKAY")
        try:
            while True:
                writer.write(packet(1, b"."))
                await writer.drain()
                await asyncio.sleep(0.01)
        except OSError:
            cut.set()
            raise

    async with hostile({"shell,v2": silent}) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await server.shell("R58", "sleep 1000")
        await asyncio.wait_for(cut.wait(), 10)


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        ("connected to 10.0.0.7:5555", None),
        ("already connected to 10.0.0.7:5555", None),
        ("failed to connect to '10.0.0.7:5555': Connection refused", Trouble.NO_DEVICE),
        ("failed to authenticate to 10.0.0.7:5555", Trouble.UNAUTHORIZED),
        ("", Trouble.NO_DEVICE),
    ],
)
async def test_whether_connecting_worked_stands_in_the_servers_words(answer, trouble):
    async with hostile({"host:connect:10.0.0.7:5555": said(answer)}) as server:
        if trouble is None:
            await server.connect("10.0.0.7:5555")
            return
        with pytest.raises(AdbError) as caught:
            await server.connect("10.0.0.7:5555")
    assert caught.value.trouble is trouble


async def test_a_request_that_adb_could_not_take_is_refused_before_it_is_sent():
    asked: list[str] = []
    async with hostile({"shell,v2": ended()}, asked) as server:
        with pytest.raises(AdbError, match="at most 65535"):
            await server.shell("R58", "x" * 70_000)
    assert asked == ["host:transport:R58"]


async def test_whatever_a_server_answers_is_a_result_or_an_adb_error():
    """3,000 answers: noise, and answers of the protocol with bytes changed, left out or doubled."""
    chance = random.Random(5)
    pieces = [b"OKAY", b"FAIL", counted("device offline"), packet(1, b"text"), packet(2, b"no"), packet(3, b"\x00")]
    whole = [ended(0, b"out", b"err"), said("R58 device"), refused("device offline"), b"OKAY" + packet(1, b"z" * 300)]
    now = b""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(now)
        await writer.drain()

    outcomes = {"result": 0, "error": 0}
    async with hostile({"host:": answer, "shell,v2": answer, "exec:": answer}) as server:
        calls = [
            server.devices,
            server.version,
            lambda: server.connect("h:1"),
            lambda: server.shell("R58", "x", 4096),
            lambda: server.exec_out("R58", "x", 4096),
        ]
        for number in range(3000):
            match number % 3:
                case 0:
                    now = chance.randbytes(chance.randrange(40))
                case 1:
                    now = b"".join(chance.choices(pieces, k=chance.randrange(6)))
                case _:
                    data = bytearray(chance.choice(whole))
                    for _ in range(chance.randrange(1, 4)):
                        at = chance.randrange(len(data))
                        data[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
                    now = bytes(data)
            try:
                async with asyncio.timeout(10):
                    await calls[number % 5]()
                outcomes["result"] += 1
            except AdbError:
                outcomes["error"] += 1
    assert outcomes["result"] > 100
    assert outcomes["error"] > 1000
