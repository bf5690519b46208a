"""What the broker answers, made of what the ledger knows. Pure."""

from __future__ import annotations

from typing import Final, Literal

from tapforge_api.claims import Acquire, Renewed
from tapforge_api.claims import Claim as ClaimMessage
from tapforge_api.claims import Held as HeldMessage
from tapforge_operator.broker.claim_record import SlotView
from tapforge_operator.broker.devices import ADB, told
from tapforge_operator.broker.types import Claim, Counts, Holder, QuotaUse, Want
from tapforge_operator.kube.types import PoolObject

WRONG_SECRET: Final = "the secret is not that of this claim"
UNPROVED: Final = (
    "the operator lost the key of this claim: it stays on the slot until its holder is gone, or the key is put back"
)
_DEFAULT_PORT: Final = 8000


def claim_message(claim: Claim, secret: str, view: SlotView, pool: PoolObject) -> ClaimMessage:
    return ClaimMessage(
        id=claim.id,
        secret=secret,
        slot=view.name,
        url=url_of(view, pool),
        fence=claim.record.fence,
        ttl_seconds=claim.record.ttl,
        # A silent holder's Pod is looked at. What else the holder does to an external device can't be observed.
        hold_seconds=None if claim.record.pod and not view.lasting else claim.ends - claim.renewed_at,
    )


def url_of(view: SlotView, pool: PoolObject) -> str:
    protocol = str(pool.spec.get("protocol") or "")
    if view.lasting:
        return told(view.address, protocol)
    host = f"[{view.address}]" if ":" in view.address else view.address
    where = f"{host}:{int(pool.spec.get('port') or _DEFAULT_PORT)}"
    return where if protocol == ADB else f"http://{where}"


def said(given: HeldMessage, state: Literal["held", "recalled", "lost"], reason: str = "") -> Renewed:
    # Thousands at once, all of them made of what was checked before.
    return Renewed.model_construct(id=given.id, state=state, reason=reason[:256])


def want_of(pool_uid: str, holder: Holder, ask: Acquire) -> Want:
    """What is asked for, within the limits of the run that asks."""
    return Want(
        pool_uid,
        holder.name,
        holder.run,
        ask.request,
        ask.slots,
        ask.ttl_seconds,
        holder.bounded(ask.priority),
        hold=ask.hold_seconds,
        pod=holder.pod,
        session=ask.session,
        number=ask.number,
        limit=holder.slots,
    )


def why_none(
    ask: Acquire, holder: Holder, mine: int, counts: Counts, repeated: bool, use: QuotaUse | None = None
) -> str:
    """`mine`: slots of the pool that the holder has."""
    if repeated:
        return f"request {ask.request} was answered before and its claims have ended; ask with a new one"
    if holder.slots and mine >= holder.slots:
        return (
            f"TrainingRun {holder.run} holds {mine} phones of this pool, as many as the `slots` of its "
            f"spec.environment.source allows ({holder.slots}): give one back first"
        )
    if use is not None and use.held >= use.quota:
        who = use.account.removeprefix("user/") if "/" in use.account else f"namespace {use.account}"
        flag = "--person-claim-quota" if "/" in use.account else "--claim-quota"
        return (
            f"QuotaExceeded: {who} holds {use.held} slots over all pools, of a quota of {use.quota} ({flag} of the "
            "operator): one has to be given back first"
        )
    return (
        f"no slot came free within {ask.wait_seconds:g} s: of {counts.slots} slots {counts.held} are claimed, "
        f"{counts.booting} boot, {counts.cooldown} rest after trouble, {counts.terminating} are being replaced; "
        f"others wait for {counts.waiting}"
    )
