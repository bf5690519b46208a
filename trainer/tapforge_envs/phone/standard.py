"""The standard phone: fifteen apps with real content around a launcher, and its task suite."""

from __future__ import annotations

from .apps import (
    browser,
    calculator,
    calendar,
    clock,
    contacts,
    files,
    home,
    mail,
    messages,
    music,
    notes,
    photos,
    settings,
    shop,
    todo,
    weather,
)
from .device import HOME, PhoneImage
from .shell import SHELL
from .tasks import Template
from .templates import across, media, papers, people, time
from .templates import mail as mail_tasks
from .templates import settings as settings_tasks

_APPS = {
    module.NAME: module.APP
    for module in (
        browser, calculator, calendar, clock, contacts, files, mail, messages, music, notes, photos, settings, shop,
        todo, weather,
    )
}  # fmt: skip
_ICONS = {name: (app.glyph, app.color) for name, app in _APPS.items()}

IMAGE = PhoneImage("standard", {HOME: home.launcher(_ICONS), "recents": home.switcher(_ICONS), **_APPS}, shell=SHELL)

TEMPLATES: tuple[Template, ...] = (
    *settings_tasks.TEMPLATES,
    *people.TEMPLATES,
    *mail_tasks.TEMPLATES,
    *time.TEMPLATES,
    *papers.TEMPLATES,
    *media.TEMPLATES,
    *across.TEMPLATES,
)
