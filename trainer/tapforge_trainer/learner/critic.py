"""A critic on the policy's own backbone: what was to be expected of a step, for estimators that compare with that.

- The value of a step is read where its answer's first token is predicted: of all that the policy had seen, and of
  nothing that it said.
- value = weight . hidden / width + bias, in fp32; 0 before it has learned. Divided by the width, a rate means the same
  for every model: one step of Adam moves values by about the rate.
- It is one vector. Every rank holds all of it, and its gradients are averaged over ranks as FSDP averages the policy's.
- It has an optimizer of its own, and is not part of the model: checkpoints have it, engines and exports don't.
- Loss: half the squared distance to the step's return, mean over the steps of an optimizer step; with `clip` the larger
  one of that and of the value's that moved at most so far from what it was before the update (PPO, arXiv:1707.06347, as
  in published code).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tapforge_trainer.algorithms.objective import Counts

from ..placement.settings import CriticSettings, LearnerSettings
from .batch_loss import DeviceFigures
from .batches import TokenBatch

if TYPE_CHECKING:
    from .packed import PackedPolicy


def critic_of(settings: LearnerSettings, width: int, policy: PackedPolicy) -> Critic | None:
    """As the settings want one; `policy`, whose hidden states have `width` numbers, gives its values from then on."""
    if settings.critic is None:
        return None
    critic = Critic(width, settings.critic, policy.device, settings.betas)
    policy.critic = critic.values
    return critic


class Critic:
    def __init__(self, width: int, settings: CriticSettings, device: torch.device, betas: tuple[float, float]):
        self.settings = settings
        self.weight = torch.zeros(width, device=device, requires_grad=True)
        self.bias = torch.zeros(1, device=device, requires_grad=True)
        self.optimizer = torch.optim.AdamW(
            [self.weight, self.bias], lr=settings.learning_rate, betas=betas, weight_decay=0.0
        )

    def values(self, hidden: Tensor) -> Tensor:
        """[tokens], of what predicts them: `hidden` [tokens, width]."""
        if not self.settings.shared:
            hidden = hidden.detach()
        return hidden.float() @ self.weight / self.weight.numel() + self.bias

    def loss(
        self,
        value: Tensor,
        data: TokenBatch,
        chosen: np.ndarray,
        weight: Tensor,
        counts: Counts,
        figures: DeviceFigures,
        steps: int,
    ) -> Tensor:
        """This rank's part. `value`, `weight` [tokens] of the response tokens `chosen`; `steps`: of the update."""
        assert data.target is not None and data.value is not None
        span = data.span[chosen]
        first = np.flatnonzero(np.diff(span, prepend=-1))
        here = torch.from_numpy(first).to(value.device)
        target, before = (
            torch.from_numpy(values[chosen][first]).to(value.device) for values in (data.target, data.value)
        )
        now, weight = value.index_select(0, here), weight.index_select(0, here)
        error = (now - target).square()
        if self.settings.clip is not None:
            held = before + (now - before).clamp(-self.settings.clip, self.settings.clip)
            error = torch.maximum(error, (held - target).square())
        loss = 0.5 * (weight * error).sum() / max(counts.sequences, 1e-12)
        figures.add("value_loss", loss.detach(), steps)
        return self.settings.coefficient * loss

    def reduce(self, world: int) -> bool:
        """Averages the gradients of the optimizer step over ranks, which all have some or none. Collective. Returns
        whether they are numbers."""
        finite = True
        for parameter in (self.weight, self.bias):
            if (grad := parameter.grad) is not None:
                if world > 1:
                    dist.all_reduce(grad)
                    grad /= world
                finite &= bool(torch.isfinite(grad).all())
        return finite

    def step(self) -> None:
        """Moves the critic by its gradients. A step that taught it nothing, as of a warm start, leaves it and its
        moments alone: zeros would count as steps, and old moments move it."""
        if self.weight.grad is not None:
            self.optimizer.step()

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All that it has, the same on every rank."""
        found = {"weight": self.weight.detach(), "bias": self.bias.detach()}
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            kept: dict[str, Any] = self.optimizer.state.get(parameter, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{moment}.{name}"] = kept.get(moment, torch.zeros_like(parameter.detach()))
            found[f"step.{name}"] = kept.get("step", torch.zeros(()))
        return found

    def load(self, state: dict[str, Tensor], moments: bool) -> None:
        """`moments`: the optimizer's as well; else it begins afresh."""
        self.optimizer.state.clear()
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            with torch.no_grad():
                parameter.copy_(state[name])
            if moments and float(state[f"step.{name}"]) > 0:
                self.optimizer.state[parameter] = {
                    "step": state[f"step.{name}"].clone().float().cpu(),
                    **{key: state[f"{key}.{name}"].clone() for key in ("exp_avg", "exp_avg_sq")},
                }
