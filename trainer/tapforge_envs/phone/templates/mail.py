"""Tasks in the mail app."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tapforge_envs.phone.apps.mail import letter
from tapforge_envs.phone.apps.world import PEOPLE, TOPICS, email
from tapforge_envs.phone.device import State
from tapforge_envs.phone.judge import Apps
from tapforge_envs.phone.tasks import Do, Errs, Params

from .making import Plan, chore, combine, drop, fill, find, has, impossible, question, taps, unless

_HERE = ("mail",)
_REPLIES = ("Yes, gladly", "Sorry, not this week", "I will call you")
_TEXTS = ("See the attached plan", "Can we talk on Monday?")


def about(apps: Apps, subject: str) -> State:
    found: State = find(apps["mail"]["mails"], subject=subject)
    return found


def received(apps: Apps, subject: str, rng: Random, folder: str = "inbox") -> None:
    """Sees to one mail with this subject in a folder, without a star."""
    mails = apps["mail"]["mails"]
    if not has(mails, subject=subject):
        mails.append(letter(rng.choice(list(PEOPLE)), subject, rng))
    about(apps, subject).update(folder=folder, starred=False)


def to_mail(subject: str) -> Iterator[Do]:
    yield Do(app="mail")
    yield Do(tap=f"mail:{subject}")


def _tool_plan(tool: str) -> Plan:
    def plan(params: Params, errs: Errs) -> Iterator[Do]:
        yield from to_mail(params["subject"])
        yield Do(tap=tool)

    return plan


def _reply_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield from to_mail(params["subject"])
    yield Do(tap="reply")
    yield fill("body", params["text"])
    yield from unless(errs, "send")


def sent(apps: Apps, to: str, subject: str, text: str) -> None:
    apps["mail"]["mails"].append(
        {"folder": "sent", "from": "Me", "address": to, "subject": subject, "body": text, "starred": False}
    )


def _reply_wish(params: Params, apps: Apps) -> None:
    sent(apps, about(apps, params["subject"])["address"], f"Re: {params['subject']}", params["text"])


def write_plan(to: str, subject: str, text: str, errs: Errs) -> Iterator[Do]:
    yield Do(app="mail")
    yield Do(tap="write")
    yield fill("to", to)
    yield fill("subject", subject)
    yield fill("body", text)
    yield from unless(errs, "send")


def with_code(apps: Apps, params: Params, rng: Random) -> None:
    """The mail holds a code."""
    received(apps, params["subject"], rng)
    about(apps, params["subject"])["body"] = f"Hello,\nyour code is {rng.randint(1000, 9999)}.\nIt is good for a day."


def code(params: Params, apps: Apps) -> list[str]:
    words = about(apps, params["subject"])["body"].replace(".", " ").split()
    return [next(word for word in words if word.isdecimal())]


def _back_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield Do(app="mail")
    yield from taps("folders", "folder:archive", f"mail:{params['subject']}")
    yield from unless(errs, "inbox")


TEMPLATES = (
    chore(
        "star_mail",
        combine(subject=TOPICS),
        lambda q: f'Star the mail with the subject "{q["subject"]}".',
        _HERE,
        _tool_plan("star"),
        lambda q, apps: about(apps, q["subject"]).update(starred=True),
        setup=lambda apps, q, rng: received(apps, q["subject"], rng),
    ),
    impossible(
        "star_missing_mail",
        combine(subject=TOPICS),
        lambda q: f'Star the mail with the subject "{q["subject"]}".',
        _HERE,
        lambda q, errs: iter((Do(app="mail"), *taps("folders", "folder:archive"))),
        setup=lambda apps, q, rng: drop(apps["mail"]["mails"], subject=q["subject"]),
    ),
    chore(
        "archive_mail",
        combine(subject=TOPICS),
        lambda q: f'Archive the mail with the subject "{q["subject"]}".',
        _HERE,
        _tool_plan("archive"),
        lambda q, apps: about(apps, q["subject"]).update(folder="archive"),
        setup=lambda apps, q, rng: received(apps, q["subject"], rng),
    ),
    chore(
        "delete_mail",
        combine(subject=TOPICS),
        lambda q: f'Put the mail with the subject "{q["subject"]}" into the trash.',
        _HERE,
        _tool_plan("delete"),
        lambda q, apps: about(apps, q["subject"]).update(folder="trash"),
        setup=lambda apps, q, rng: received(apps, q["subject"], rng),
    ),
    chore(
        "restore_mail",
        combine(subject=TOPICS),
        lambda q: f'Move the archived mail with the subject "{q["subject"]}" back to the inbox.',
        _HERE,
        _back_plan,
        lambda q, apps: about(apps, q["subject"]).update(folder="inbox"),
        setup=lambda apps, q, rng: received(apps, q["subject"], rng, "archive"),
        only="test",
    ),
    chore(
        "reply_to_mail",
        combine(subject=TOPICS, text=_REPLIES),
        lambda q: f'Reply to the mail with the subject "{q["subject"]}": "{q["text"]}".',
        _HERE,
        _reply_plan,
        _reply_wish,
        setup=lambda apps, q, rng: received(apps, q["subject"], rng),
        steps=14,
    ),
    chore(
        "send_mail",
        combine(first=tuple(PEOPLE)[:6], subject=("Hello", "The plan"), text=_TEXTS),
        lambda q: f'Write a mail to {email(q["first"])} with the subject "{q["subject"]}" and the text "{q["text"]}".',
        _HERE,
        lambda q, errs: write_plan(email(q["first"]), q["subject"], q["text"], errs),
        lambda q, apps: sent(apps, email(q["first"]), q["subject"], q["text"]),
        steps=18,
    ),
    question(
        "ask_code_in_mail",
        combine(subject=TOPICS),
        lambda q: f'Which code is in the mail with the subject "{q["subject"]}"?',
        _HERE,
        lambda q, errs: to_mail(q["subject"]),
        code,
        setup=with_code,
    ),
)
