"""What a vLLM engine answers, before and after weights came in: run as a script in a process of its own, because one
process can hold one engine. Reads a pickled `Job` from standard input and writes the pickled answers to the file that
it names."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: seconds after which something that must happen is taken for something that never will
END = 300.0


@dataclass(frozen=True)
class Job:
    #: of `EngineSettings`, whose `allowed_ids` are those of the folder's tokenizer
    settings: dict[str, Any]
    #: of `GenerateRequest`, without the key, by prompt
    requests: list[dict[str, Any]]
    #: name -> bytes of a fitted frame
    frames: dict[str, bytes]
    #: model folders whose weights come in one after another
    weights: list[str] = field(default_factory=list)
    #: files of packed adapters that come in one after another, instead of weights
    adapters: list[str] = field(default_factory=list)
    #: before weights come in, the engine sleeps and wakes around them
    sleeping: bool = False
    answers: str = ""


def payload(folder: Path) -> bytes:
    """All tensors of a model folder in one file under the names of transformers' model, as they travel."""
    from safetensors.torch import load_file, save

    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {_own(name): tensor for name, tensor in load_file(file).items()}
    return save(found)


def _own(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
        return name.replace("model.", "model.language_model.", 1)
    return name


def check_arrivals(workers: list[Any], data: bytes) -> None:
    """Every worker got the bytes and holds them, wherever its family's loader put them."""
    from safetensors.torch import load

    from tapforge_trainer.learner.digest import digest

    sent = {name: int(digest(tensor)) for name, tensor in load(data).items()}
    for report in workers:
        assert report.digests == sent
        assert not report.wrong, report.wrong
        assert not report.unread, report.unread


def _collected(done: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += done.get(timeout=END)
    return found


def renewed_asleep(sampler: Any, version: int, data: bytes, job: Job) -> list[str]:
    """The engine sleeps in the middle of answers and gets new weights on waking, as where it shares its GPU; one more
    request comes while it sleeps. Returns the keys of all that was asked."""
    from tapforge_trainer.engine.wire import GenerateRequest

    requests = [GenerateRequest(f"a/{version}-{k}", **one | {"max_tokens": 40}) for k, one in enumerate(job.requests)]
    sampler.submit(requests[:-1], job.frames)

    def begun() -> bool:
        states = sampler._llm.output_processor.request_states.values()
        return len(states) == len(requests) - 1 and all(state.detokenizer.num_output_tokens() > 1 for state in states)

    while not sampler.call(begun).result(END):
        pass
    sampler.sleep("keep").result(END)
    sampler.submit(requests[-1:], job.frames)
    sampler.wake("weights").result(END)
    sampler.collective("start_weight_update").result(END)
    sampler.collective("watch_arrivals").result(END)
    sampler.collective("update_weights", update_info={"payload": data}).result(END)
    sampler.collective("finish_weight_update").result(END)
    sampler.wake("kv_cache").result(END)
    sampler.proceed(version).result(END)
    check_arrivals(sampler.collective("take_arrivals").result(END), data)
    return [request.key for request in requests]


def main() -> None:
    job: Job = pickle.load(sys.stdin.buffer)  # noqa: S301 - the test's own
    from tapforge_trainer.agents.tokens import Tokens
    from tapforge_trainer.engine.vllm import ADAPTER_ID, environment
    from tapforge_trainer.placement.settings import EngineSettings

    tokens = Tokens.load(Path(job.settings["model"]))
    settings = EngineSettings(allowed_ids=tokens.allowed_ids, stop_ids=tokens.stop_ids, **job.settings)
    os.environ.update(environment(settings, os.environ["TMPDIR"]))
    import queue

    from tapforge_trainer.engine.sampler import Sampler
    from tapforge_trainer.engine.wire import GenerateRequest, GenerateResult

    done: queue.SimpleQueue[list[GenerateResult]] = queue.SimpleQueue()
    sampler = Sampler(settings, done.put)
    sampler.ready.result(END)

    def asked(round_: int) -> list[GenerateResult]:
        requests = [GenerateRequest(f"a/{round_}-{k}", **one) for k, one in enumerate(job.requests)]
        sampler.submit(requests, job.frames)
        found = {result.key: result for result in _collected(done, len(requests))}
        return [found[request.key] for request in requests]

    rounds = [asked(0)]
    for version, folder in enumerate(job.weights, 1):
        data = payload(Path(folder))

        if job.sleeping:
            slept = renewed_asleep(sampler, version, data, job)
            early = [] if done.empty() else done.get()
            assert not early, "an engine that sleeps has answered"
            sampler.release().result(END)
            rounds.append(sorted(_collected(done, len(slept)), key=lambda result: slept.index(result.key)))
            continue

        def load(llm: Any, data: bytes = data) -> None:
            llm.collective_rpc("start_weight_update")
            llm.collective_rpc("watch_arrivals")
            llm.collective_rpc("update_weights", kwargs={"update_info": {"payload": data}})
            llm.collective_rpc("finish_weight_update")

        sampler.renew("keep", load, version).result(END)
        check_arrivals(sampler.collective("take_arrivals").result(END), data)
        sampler.release().result(END)
        rounds.append(asked(version))
    for version, path in enumerate(job.adapters, 1):
        data = Path(path).read_bytes()

        def replace(llm: Any, data: bytes = data) -> None:
            llm.collective_rpc("load_adapter", kwargs={"adapter_id": ADAPTER_ID, "payload": data})

        sampler.renew("keep", replace, version).result(END)
        check_arrivals(sampler.collective("take_arrivals").result(END), data)
        sampler.release().result(END)
        rounds.append(asked(version))
    Path(job.answers).write_bytes(pickle.dumps(rounds))
    sampler.stop()


if __name__ == "__main__":
    main()
