"""Which failures are words, and which exit code they are: what can go wrong though the program is right.

Whatever is not listed here is a programming error, and shows its traceback.
"""

from __future__ import annotations

from tapforge_api.progress import EXIT_CONFIGURATION, EXIT_FAILED


def in_words(error: BaseException) -> tuple[int, str] | None:
    """Exit code and message of a failure; None for a programming error. Imports heavy rooms: only for what failed."""
    if isinstance(error, _configuration()):
        code = EXIT_CONFIGURATION
    elif isinstance(error, _failures()):
        code = EXIT_FAILED
    else:
        return None
    return code, words_of(error)


def words_of(error: BaseException) -> str:
    """The message with its notes."""
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    return "\n".join([text, *getattr(error, "__notes__", ())])


def _configuration() -> tuple[type[Exception], ...]:
    from tapforge_api import SpecError

    from .assembly import ConfigurationError

    return SpecError, ConfigurationError


def _failures() -> tuple[type[Exception], ...]:
    from tapforge_envs.phone.catalog import UnknownTask
    from tapforge_envs.slots.source import SlotError

    from .assembly import SetupError
    from .frames import FrameError
    from .policy.checkpoints import CheckpointError
    from .policy.engine_client import EngineError
    from .policy.learner import LearnerError
    from .policy.sync import SyncMismatch
    from .report import ReportError
    from .rollout.recording import RecordingError
    from .rollout.scheduler import RolloutError
    from .tasks.source import TaskError

    setup = (SetupError, SlotError, TaskError, UnknownTask)
    policy = (LearnerError, EngineError, SyncMismatch, CheckpointError)
    return (*setup, *policy, RolloutError, RecordingError, FrameError, ReportError, OSError)
