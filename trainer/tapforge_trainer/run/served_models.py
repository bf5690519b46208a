"""From `spec.models` to the servers of a session.

A run starts the models that the judges of this session ask: of a run with stages, those of the stage. `collect` starts
its teacher, and the models of judges that it asks (`models_alone`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tapforge_api import TrainingRun
from tapforge_api.models import own_models
from tapforge_api.rewards import Rewards

from ..model_source.ref import ModelError, ModelRefused
from ..model_source.resolve import resolve
from ..placement.actor_log import NUMBER
from ..placement.machine import Device
from ..placement.ray_start import in_cluster, ray_here
from ..serving.servers import ModelServers
from ..serving.settings import ServerSettings
from ..telemetry.start_progress import waiting_shown
from .assembly import ConfigurationError, SetupError
from .devices import device_found
from .model_pin import model_of
from .served_model_errors import folder_errors, images_sent
from .shutdown import StopSignal, unless_stopped


def asks_models(run: TrainingRun, *, learner: bool) -> bool:
    """Whether a session that plays asks models of the run's own. One that learns nothing measures, or tries tasks: it
    asks judges where they say how measured episodes end."""
    return bool(own_models([run.spec.rewards])) and (learner or run.spec.evaluation.judged)


def counted(run: TrainingRun, *, learner: bool, engines: bool) -> TrainingRun:
    """The run as its GPUs are counted for a session. All models count where it trains, so that a later stage finds
    room for its own; none where none is started."""
    if (learner and engines) or (engines and asks_models(run, learner=learner)):
        return run
    return run.model_copy(update={"spec": run.spec.model_copy(update={"models": ()})})


async def servers_of(
    run: TrainingRun, folder: Path, device: Device, logs: Path, *, learner: bool, keep: bool
) -> ModelServers | None:
    """Nothing of them runs yet; None: this session's judges ask none. `logs`: a folder. Raises SetupError."""
    if not asks_models(run, learner=learner):
        return None
    log = str(logs / f"model-{NUMBER}.log") if device == "cuda" else None
    sent = images_sent([run.spec.rewards])
    return ModelServers(await asyncio.to_thread(server_settings, run, folder, device, sent, keep=keep, log=log))


@asynccontextmanager
async def models_alone(
    run: TrainingRun,
    folder: Path,
    sent: Mapping[str, int],
    stop: StopSignal,
    logs: Path,
    report: Callable[[str], None],
) -> AsyncIterator[ModelServers | None]:
    """Servers of these models, by name with the images of a request at most, for a command without a policy: placed,
    answering, and ended with the block, as is the Ray that they were started in; None: no model is named. `folder`: of
    the run; `logs`: a folder. Raises SetupError, and Interrupted when a stop was requested."""
    if not sent:
        yield None
        return
    _, device = await device_found(run, stop, report, [model for model in run.spec.models if model.name in sent])
    if device == "cuda":
        logs.mkdir(parents=True, exist_ok=True)
    log = str(logs / f"model-{NUMBER}.log") if device == "cuda" else None
    servers = ModelServers(await asyncio.to_thread(server_settings, run, folder, device, sent, keep=False, log=log))
    async with ray_here() as start_ray:
        try:
            async with waiting_shown(report, servers.waiting):
                await unless_stopped(stop, models_placed(servers, start_ray, report))
                await unless_stopped(stop, models_started(servers))
            yield servers
        finally:
            await servers.close()


async def models_started(servers: ModelServers | None) -> None:
    """Raises SetupError or ConfigurationError in the words of what a node lacks, and EngineError."""
    if servers is None:
        return
    from ..engine.client import EngineError

    try:
        await servers.start()
    except EngineError as error:
        cause = getattr(error.__cause__, "cause", None)
        if isinstance(cause, ModelError):
            raise (ConfigurationError if isinstance(cause, ModelRefused) else SetupError)(str(cause)) from error
        raise


async def models_placed(
    servers: ModelServers | None, start_ray: Callable[[], Awaitable[None]], report: Callable[[str], None]
) -> None:
    """They get their GPUs before a policy does. Raises SetupError."""
    if servers is None:
        return
    from ..placement.placement import PlacementError

    await start_ray()
    try:
        await servers.place(report)
    except PlacementError as late:
        raise SetupError(str(late)) from late


def server_settings(
    run: TrainingRun, folder: Path, device: Device, sent: Mapping[str, int], *, keep: bool, log: str | None
) -> list[ServerSettings]:
    """Of the models named in `sent`, with the images of a request at most; pinned, and looked at. `folder`: of the run;
    `keep`: as `model_of` has it. Blocks. Raises SetupError."""
    found = []
    for model in run.spec.models:
        if model.name not in sent:
            continue
        try:
            ref = model_of(run, folder, keep=keep, served=model)
            described = resolve(ref, weights=False, quantized=True)
        except (SetupError, ModelError) as error:
            kind = type(error) if isinstance(error, SetupError) else SetupError
            raise kind(str(error).replace("spec.model.source", f"spec.models[{model.name}].source")) from error
        if wrong := folder_errors(model, described, sent[model.name], device):
            raise ConfigurationError("\n".join(wrong))
        found.append(
            ServerSettings(
                model.name,
                ref,
                device,
                model.dtype or ("bfloat16" if device == "cuda" else "float32"),
                secrets.token_urlsafe(32),
                replicas=model.replicas,
                tensor_parallel=model.tensor_parallel if device == "cuda" else 1,
                context_tokens=model.context_tokens,
                max_sequences=model.max_concurrent_sequences,
                images=sent[model.name],
                gpu_memory_share=model.gpu_memory_share,
                kv_cache_mib=model.kv_cache_mib,
                enforce_eager=model.enforce_eager,
                threads=model.threads,
                seed=run.spec.seed,
                start_seconds=run.spec.deadlines.start_seconds,
                restarts_per_hour=model.max_restarts_per_hour,
                one_machine=not in_cluster(),
                log=log,
            )
        )
    return found


def without_own_models(rewards: Iterable[Rewards], command: str) -> None:
    """For commands that start no servers. Raises ConfigurationError."""
    if names := sorted(own_models(rewards)):
        raise ConfigurationError(
            f"spec.rewards: {', '.join(names)} of spec.models is served by `run` and `collect` alone; for {command} "
            f"start it yourself, such as with `vllm serve MODEL --served-model-name {names[0]}`, and give the judge "
            "its url"
        )
