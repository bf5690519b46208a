"""The first part of a sync's proof: every worker of every engine got and holds the bytes that the learner sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Report:
    """Of one worker, on the weights of a round."""

    #: digests of what arrived, by name
    digests: Mapping[str, int]
    #: by name of what is not held as it came, what should hold it
    wrong: Mapping[str, str]
    #: by name of what can't be read where it is kept, why
    unread: Mapping[str, str] = field(default_factory=dict)


def difference(
    sent: Mapping[str, int], unmerged: Sequence[str], engines: Sequence[tuple[int, Sequence[Report | None]]]
) -> str:
    """What is wrong, with the tensor's name; "" where nothing is. `sent`: digests by name; `unmerged`: what was sent
    without its adapter; `engines`: by index what each worker reports, None from one that got no weights."""
    if not sent:
        return "the learner sent no weights"
    if unmerged:
        return f"the learner sent {_some(unmerged)} without the adapter that it computes with"
    for index, reports in engines:
        for worker, report in enumerate(reports):
            name = f"engine {index}" + (f" (worker {worker})" if len(reports) > 1 else "")
            if report is None:
                return f"{name} got no weights"
            arrived, wrong = report.digests, report.wrong
            if lacking := [tensor for tensor in sent if tensor not in arrived]:
                return f"{name} did not get {_some(lacking)}"
            if other := [tensor for tensor, value in arrived.items() if value != sent.get(tensor)]:
                return f"{name} got other bytes of {_some(other)} than the learner sent"
            if wrong:
                tensor, holder = next(iter(wrong.items()))
                return f"{name} got {_some(list(wrong))} and does not hold it: {holder} has other bytes than {tensor}"
    return ""


def unread(engines: Sequence[tuple[int, Sequence[Report | None]]]) -> dict[str, str]:
    """What workers hold in a way that can't be read, by name of the tensor that arrived, and why."""
    return {
        name: why
        for _, reports in engines
        for report in reports
        if report is not None
        for name, why in report.unread.items()
    }


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
