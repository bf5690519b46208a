"""A server of `spec.models`, vLLM's own: it answers with images and its token alone, is started again when it dies, and
leaves no process behind. It has an event loop, a Ray and a server of its own: the subject is how they start and end."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from PIL import Image

from tapforge_trainer.judges.openai_chat import image_part
from tapforge_trainer.model_source.ref import ModelRef
from tapforge_trainer.model_source.tiny_base import base_folder
from tapforge_trainer.placement.ray_start import start_ray
from tapforge_trainer.serving.servers import ModelServers
from tapforge_trainer.serving.settings import ServerSettings

pytestmark = pytest.mark.long

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
UNTIL = 300.0


@pytest.fixture
def ray() -> Iterator[None]:
    import ray

    start_ray()
    yield
    ray.shutdown()


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    folder = tmp_path / "model"
    shutil.copytree(base_folder(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    small = {"context_tokens": 512, "max_sequences": 2, "kv_cache_mib": 64, "images": 2, "one_machine": True}
    return ServerSettings("tiny", ModelRef.of_folder(folder), "cpu", "float32", "the-token", **small)


async def asked(url: str, token: str) -> tuple[int, str]:
    file = io.BytesIO()
    Image.new("RGB", (96, 160), (10, 120, 30)).save(file, "PNG")
    content = [{"type": "text", "text": "open mail"}, image_part(file.getvalue()), image_part(file.getvalue())]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/chat/completions", json=body, headers=headers) as response,
    ):
        return response.status, await response.text()


async def opened(url: str, path: str) -> int:
    """Without a token."""
    async with aiohttp.ClientSession() as session, session.get(url.removesuffix("/v1") + path) as response:
        return response.status


def processes() -> list[psutil.Process]:
    """Of servers: a guard leads a process group, in which all of them are."""
    everyone = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]]
    guards = {os.getpgid(p.pid) for p in everyone if "tapforge_trainer.serving.guard" in p.info["cmdline"]}
    return [p for p in everyone if p.pid not in guards and os.getpgid(p.pid) in guards]


async def test_it_answers_comes_back_and_leaves_nothing(ray: None, settings: ServerSettings) -> None:
    before = {p.pid for p in processes()}
    servers, heard = ModelServers([settings]), []
    servers.follow(heard.append)
    try:
        await servers.place(print)
        await servers.start()
        (url,) = servers.served["tiny"].urls
        status, text = await asked(url, "the-token")
        assert status == 200 and '"prompt_tokens"' in text, text
        assert (await asked(url, "another"))[0] == 401
        assert [await opened(url, path) for path in ("/health", "/invocations", "/tokenize", "/metrics")] == [
            200,
            *[401] * 3,
        ]
        own = [p for p in processes() if p.pid not in before]
        next(p for p in own if "--inner" in p.info["cmdline"]).kill()
        async with asyncio.timeout(UNTIL):
            while not servers.restarts or not servers.served["tiny"].urls:  # noqa: ASYNC110 - a listener is the subject
                await asyncio.sleep(0.2)
        assert [len(one["tiny"].urls) for one in heard] == [0, 1, 0, 1]
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in own)
        (again,) = servers.served["tiny"].urls
        assert (await asked(again, "the-token"))[0] == 200
        own = [p for p in processes() if p.pid not in before]
    finally:
        await servers.close()
    _, alive = psutil.wait_procs(own, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
