"""Who claims shows a token to the right broker only, and learns what to do when it is refused."""

import pytest
from broker_lab import a_lab, environment
from phones import until
from small_broker import Authority

from tapforge_envs.slots.broker_calls import Access
from tapforge_envs.slots.source import SlotError, Verdict


async def test_a_rotated_token_is_read_again(tmp_path):
    async with a_lab(tmp_path, 1) as lab, lab.claimed(1) as slots:
        lease = await slots.acquire(30)
        lab.broker.tokens = {"second-token"}
        await lab.broker.put(lab.server.url(0))
        await slots.release(lease, Verdict.DIRTY)
        await until(lambda: "the token is not known" in slots.describe())
        lab.authority.access(lab.broker.port, "second-token")
        assert (await slots.acquire(30)).slot == "slot-1"


async def test_a_renewed_ca_is_read_again(tmp_path):
    async with a_lab(tmp_path, 2, up=False) as lab:
        async with lab.broker.serving(lab.authority):
            slots = lab.slots(1)
            await slots.start()
            await until(lambda: slots.usable == 1)
        newer = Authority(tmp_path / "newer")
        async with lab.broker.serving(newer):
            await slots.release(await slots.acquire(1), Verdict.DIRTY)
            await until(lambda: "doesn't vouch for" in slots.describe())
            lab.authority.ca.write_bytes(newer.ca.read_bytes())
            await until(lambda: lab.broker.given and slots.usable == 1)
            await slots.close()


async def test_a_broker_that_another_ca_vouches_for_is_refused(tmp_path):
    async with a_lab(tmp_path, 1) as lab:
        stranger = Authority(tmp_path / "stranger")
        access = Access.of({**environment(lab, tmp_path), "TAPFORGE_BROKER_CA": str(stranger.ca)})
        with pytest.raises(SlotError, match="shows a certificate that .*stranger.* doesn't vouch for"):
            await lab.slots(1, access=access).start()
        assert not lab.broker.calls, "nothing was shown to it"


async def test_a_broker_under_another_name_than_its_certificates_is_refused(tmp_path):
    async with a_lab(tmp_path, 1) as lab:
        url = f"https://localhost:{lab.broker.port}"
        access = Access.of({**environment(lab, tmp_path), "TAPFORGE_BROKER_URL": url})
        with pytest.raises(SlotError, match="doesn't vouch for.*localhost"):
            await lab.slots(1, access=access).start()


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (
            401,
            b'{"reason": "Unauthorized", "message": "expired"}',
            ["401 Unauthorized: expired", "kubectl create token"],
        ),
        (403, b'{"reason": "Forbidden", "message": "not yours"}', ["403 Forbidden: not yours", "emulatorpools/claim"]),
        (404, b'{"reason": "PoolNotFound", "message": "no such"}', ["404 PoolNotFound", "get emulatorpools -n lab"]),
        (400, b'{"reason": "BadRequest", "message": "slots: too many"}', ["400 BadRequest: slots: too many"]),
        (404, b"<html>nothing here</html>", ["404: '<html>nothing here</html>'"]),
        (302, b"", ["302"]),
        (200, b"<html>a portal</html>", ["a portal", "is TAPFORGE_BROKER_URL the address"]),
        (200, b'{"claims": [{"id": "some-claim", "secret": "0123456789abcdef"}]}', ["claims.0.slot: Field required"]),
    ],
)
async def test_a_refusal_at_the_start_says_what_to_do(tmp_path, status, body, words):
    async with a_lab(tmp_path, 1) as lab:
        lab.broker.refusing["acquire"] = (status, body)
        with pytest.raises(SlotError) as caught:
            await lab.slots(1).start()
        for word in words:
            assert word in str(caught.value)
        assert "0123456789abcdef" not in str(caught.value), "secrets are not repeated"
        assert lab.broker.calls.count("acquire") <= 2, "a refusal is not asked again"


async def test_a_pool_that_is_not_there(tmp_path):
    async with a_lab(tmp_path, 1) as lab:
        with pytest.raises(SlotError, match="claims on the pool 'fones' in namespace 'lab'.*no pool fones"):
            await lab.slots(1, pool="fones").start()


@pytest.mark.parametrize(
    ("content", "words"), [(None, "can't be read"), ("", "holds no token"), ("two words", "holds no token")]
)
async def test_a_bad_token_file_is_named(tmp_path, content, words):
    async with a_lab(tmp_path, 1) as lab:
        slots = lab.slots(1)
        path = lab.authority.folder / "token"
        path.unlink()
        if content is not None:
            path.write_text(content)
        with pytest.raises(SlotError, match=f"the token file {path}.*{words}"):
            await slots.start()


async def test_a_bad_ca_file_is_named(tmp_path):
    async with a_lab(tmp_path, 1) as lab:
        for content in (None, "no certificate"):
            path = tmp_path / "other.crt"
            if content:
                path.write_text(content)
            access = Access.of({**environment(lab, tmp_path), "TAPFORGE_BROKER_CA": str(path)})
            with pytest.raises(SlotError, match="other.crt .TAPFORGE_BROKER_CA. can't be used"):
                await lab.slots(1, access=access).start()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TAPFORGE_BROKER_URL": ""}, "spec.environment.source.pool needs .*\n  TAPFORGE_BROKER_URL: the address"),
        ({"TAPFORGE_BROKER_CA": ""}, "needs .*\n  TAPFORGE_BROKER_CA: the file"),
        ({"TAPFORGE_BROKER_TOKEN_FILE": ""}, "needs .*\n  TAPFORGE_BROKER_TOKEN_FILE: the file of a token"),
        ({"TAPFORGE_NAMESPACE": ""}, "needs .*\n  TAPFORGE_NAMESPACE: the namespace"),
        ({"TAPFORGE_NAMESPACE": "a/b"}, "name of a namespace, not 'a/b'"),
        ({"TAPFORGE_BROKER_URL": "http://broker:80"}, "to begin with https: 'http://broker:80' would show the token"),
        ({"TAPFORGE_BROKER_URL": "http://10.0.0.7:80"}, "to begin with https"),
        ({"TAPFORGE_BROKER_URL": "http://localhost.evil:80"}, "to begin with https"),
        ({"TAPFORGE_BROKER_URL": "broker:8443"}, "to be a URL such as"),
        ({"TAPFORGE_BROKER_URL": "https://user:word@broker"}, "to be a URL such as"),
        ({"TAPFORGE_BROKER_URL": "https://broker:99999"}, "to be a URL"),
    ],
)
def test_what_the_surroundings_lack_is_named(changes, words):
    whole = {
        "TAPFORGE_BROKER_URL": "https://broker",
        "TAPFORGE_BROKER_CA": "ca",
        "TAPFORGE_BROKER_TOKEN_FILE": "token",
        "TAPFORGE_NAMESPACE": "lab",
    }
    assert Access.of(whole).namespace == "lab"
    with pytest.raises(SlotError, match=words):
        Access.of({**whole, **changes})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "[::1]", "localhost"])
def test_plain_http_is_for_this_machine(host):
    access = Access.of(
        {
            "TAPFORGE_BROKER_URL": f"http://{host}:8080/below",
            "TAPFORGE_BROKER_TOKEN_FILE": "token",
            "TAPFORGE_NAMESPACE": "lab",
        }
    )
    assert access.ca is None and access.url.path == "/below"
