"""The simulated phone that is like MobileWorld's server, over a real socket, with what may stand in its way."""

from contextlib import asynccontextmanager
from dataclasses import dataclass

from hostile import Rough, serving
from phones import PATIENT, Stopping

from tapforge_api.environment import Settle
from tapforge_envs import protocol as p
from tapforge_envs.clients.http import new_session
from tapforge_envs.clients.mobileworld import MobileWorldClient
from tapforge_envs.clients.mobileworld_memory import MobileWorldPhones
from tapforge_envs.phone.faults import FAULTS
from tapforge_envs.phone.injection import Injector
from tapforge_envs.phone.mobileworld.devices import TaskNames
from tapforge_envs.phone.mobileworld.server import MobileWorld, application
from tapforge_envs.protocol import Task

AT_ONCE = Settle(mode="none")
NAMES = TaskNames(("quickstart", "standard"), 12)
TASK = Task(suite="mobileworld", template="quickstart-train-1")
TAP = p.Tap(x=0.5, y=0.5)


@dataclass
class House:
    server: MobileWorld
    rough: Rough
    url: str
    phones: MobileWorldPhones
    stopping: Stopping
    session: object

    def client(self, query: str = "") -> MobileWorldClient:
        return MobileWorldClient(self.url + query, self.session, self.phones, PATIENT, "phone-0", AT_ONCE)

    def sent(self, words: str) -> int:
        return sum(words in line for line in self.rough.seen)

    def hung(self) -> int:
        return self.rough.hanging + self.stopping.hung


@asynccontextmanager
async def a_house(width=96, height=160, faults=(), **options):
    stopping, rough = Stopping(), Rough()
    injector = Injector(FAULTS.validate_python(list(faults)), stopping)
    server = MobileWorld(width, height, ("quickstart", "standard"), NAMES, injector, **options)
    app = application([server])
    app.middlewares.insert(0, rough.stand_before)
    phones = MobileWorldPhones()
    async with serving(app) as url, new_session() as session:
        try:
            yield House(server, rough, url, phones, stopping, session)
        finally:
            stopping.set()
            await phones.close()
