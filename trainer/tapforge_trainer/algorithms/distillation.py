"""What a teacher's log-probabilities at the policy's own tokens do to the loss. Plain data and arithmetic, no torch.

With d = logp - teacher, whose mean over the policy's own tokens is the reverse KL, KL(policy || teacher):

    k1    -weight * d is added to each token's advantage, a constant: the policy gradient of the reverse KL
          (arXiv:2306.13649; slime `apply_opd_kl_to_advantages`, NeMo-RL `OPDAdvantageEstimator`, verl
          `use_policy_gradient`)
    k2    weight * d^2 / 2 is a term of the loss: the same gradient on policy, without clip (verl)
    k3    weight * min(exp(-d) + d - 1, 10) is a term of the loss, with its own gradient (verl's default)

The fourth kind reads more of the teacher than the token that was sampled:

    forward_kl    weight * max(0, sum_v t(v) (log t(v) - log p(v))) is a term of the loss, over the teacher's `top`
                  likeliest tokens v at each place (`losses.forward_kl`; verl `compute_forward_kl_topk`); over all of
                  them it is KL(teacher || policy) (arXiv:2306.13649)

d and p are of the policy as it is at each optimizer step. `alone`: advantages of rewards count 0, and the teacher is
all that is learned from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

#: the first three are of the reverse KL
DistillationKind = Literal["k1", "k2", "k3", "forward_kl"]


@dataclass(frozen=True, slots=True)
class Distillation:
    kind: DistillationKind = "forward_kl"
    weight: float = 1.0
    #: rewards teach nothing
    alone: bool = False
    #: of `forward_kl`: tokens of the teacher at each place
    top: int = 64

    def __post_init__(self) -> None:
        if self.kind not in get_args(DistillationKind):
            raise ValueError(
                f"distillation kind is {self.kind!r}; it is one of {', '.join(get_args(DistillationKind))}"
            )
        if not 0.0 < self.weight < math.inf:
            raise ValueError(f"distillation weight is {self.weight}; it must be over 0")
        if self.top < 1:
            raise ValueError(f"distillation top is {self.top}; it must be at least 1")

    def advantage(self, advantage: Any, logp: Any, teacher: Any) -> Any:
        """[tokens], in arrays or tensors without gradient: what each token is pushed by."""
        own = 0.0 * advantage if self.alone else advantage
        return own + self.weight * (teacher - logp) if self.kind == "k1" else own

    @property
    def likely(self) -> int:
        """How many of the teacher's tokens are needed beside the policy's own."""
        return self.top if self.kind == "forward_kl" else 0
