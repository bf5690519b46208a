"""What a plan says of which tasks are practised more often, and what of that does nothing where the file has it."""

from __future__ import annotations

from tapforge_api.environment import Tasks


def sampler_line(tasks: Tasks) -> str:
    from ..tasks.samplers.registry import described  # pays for numpy

    line = described(tasks.sampler.name, {one.name: one.value for one in tasks.sampler.options})
    if tasks.sampler.name == "uniform":
        line += ", every task in its turn"
    else:
        line += f"; results count half after {tasks.half_life:,} updates"
    if (rule := tasks.cooldown) is not None:
        when = [
            f"{number:,} groups in a row that all {what}"
            for number, what in ((rule.after_failed, "failed"), (rule.after_solved, "succeeded"))
            if number is not None
        ]
        line += f"; a task pauses for {rule.updates:,} updates after {' or '.join(when)}"
    return line


def notes_on_tasks(tasks: Tasks) -> list[str]:
    notes = []
    if tasks.cooldown is not None and tasks.file is None and tasks.max_tasks is None:
        notes.append(
            f"tasks.cooldown has no effect: suite {tasks.suite} makes a new task each time, and none comes twice; set "
            "tasks.maxTasks"
        )
    if tasks.sampler.name == "uniform" and tasks.half_life != Tasks.model_fields["half_life"].default:
        notes.append("tasks.halfLife has no effect with the sampler uniform, which looks at no results")
    return notes
