"""Policy losses by name: ours, and those that installed packages offer.

A loss is a class whose options are keyword-only (a frozen dataclass, say) and whose instances make a `TokenLoss` of
`Tokens`. Wrong values of options are a ValueError when it is made. Others offer one by an entry point in the group
`tapforge.losses`:

    [project.entry-points."tapforge.losses"]
    my_loss = "my_package.module:MyLoss"

Names are strict, as those of estimators (`registry.py`). Needs no torch, unless a loss of another package does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import plugins
from .options import check_options, read_options, unknown
from .token_losses.cispo import Cispo
from .token_losses.clip_cov import ClipCov
from .token_losses.dppo import DppoKl, DppoTv
from .token_losses.dro import Dro
from .token_losses.gmpo import Gmpo
from .token_losses.gspo import Gspo
from .token_losses.kl_cov import KlCov
from .token_losses.ppo import Ppo
from .token_losses.prime_rl import Ipo, PrimeRl
from .token_losses.reinforce import Reinforce
from .token_losses.rollout_is import RolloutIs
from .token_losses.sapo import Sapo
from .token_losses.topr import Topr
from .token_losses.vespo import Vespo
from .tokens import Loss

ENTRY_POINTS = "tapforge.losses"

BUILT_IN: Mapping[str, Callable[..., Loss]] = {
    "cispo": Cispo,
    "clip_cov": ClipCov,
    "dppo_kl": DppoKl,
    "dppo_tv": DppoTv,
    "dro": Dro,
    "gmpo": Gmpo,
    "gspo": Gspo,
    "ipo": Ipo,
    "kl_cov": KlCov,
    "ppo": Ppo,
    "prime_rl": PrimeRl,
    "reinforce": Reinforce,
    "rollout_is": RolloutIs,
    "sapo": Sapo,
    "topr": Topr,
    "vespo": Vespo,
}


def names() -> list[str]:
    """All losses that can be asked for, sorted. Loads no entry point."""
    return sorted({*BUILT_IN, *plugins.names(ENTRY_POINTS)})


def loss_options(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Options as they are written in a file (`options.py`). Raises UnknownName, and ValueError for a value that can't
    be read or makes no sense."""
    options = read_options(name, _kind(name), given)
    loss(name, options)
    return options


def loss(name: str, options: Mapping[str, Any]) -> Loss:
    """Raises UnknownName, ValueError for a senseless value of an option, and TypeError for anything but a loss."""
    kind = _kind(name)
    check_options(name, kind, options)
    try:
        made = kind(**options)
    except ValueError as error:
        raise ValueError(f"loss {name}: {error}") from error
    if not callable(made):
        raise TypeError(f"the loss {name} made {made!r}, which can't be called with tokens")
    return made


def _kind(name: str) -> Callable[..., Loss]:
    point = plugins.find(ENTRY_POINTS, name, BUILT_IN)
    if name in BUILT_IN:
        return BUILT_IN[name]
    if point is None:
        raise unknown("loss", name, names())
    found = point.load()
    if not callable(found):
        raise TypeError(f"the entry point {point.value!r} of the loss {name!r} is not a class: {found!r}")
    return found
