"""One learner rank: the sharded policy, its optimizer, and what a rank does in an update. torch.distributed, no Ray.

Rules:
- Every rank runs the same number of forward and backward passes (`plan_micro_batches` sees to that): gathers and
  reductions are collective, a rank with one pass less would leave the others waiting for ever.
- The loss is this rank's part of the global one, which is divided by global counts. FSDP averages gradients over
  ranks, so it is multiplied by their number. Gradients travel after every micro-batch, and each rank keeps its share of
  their sum; or once per optimizer step, with the last micro-batch, where there is memory for all of them.
- Master weights and optimizer state are fp32; with dtype bfloat16 only the forward and backward passes are narrower.
- Before an update all ranks make sure that they can get at their frames; those of the next micro-batches are fetched
  and decoded in a thread while one is being computed.
- Nothing here draws random numbers: the same samples give the same bits on CPUs. On GPUs flash attention adds up its
  gradients in no fixed order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tapforge_trainer.algorithms.objective import Counts, old_known, recomputed
from tapforge_trainer.frames.frame import FittedFrame
from tapforge_trainer.frames.handles import FramesLost

from ..placement.settings import LearnerSettings, UpdateSettings
from .age import compare_by_age
from .batch_loss import DeviceFigures, batch_loss, imitation_loss
from .batches import MicroBatch, MicroBatchPlan, TokenBatch, frames_of, micro_batch
from .compared import Reference, compared_with
from .critic import critic_of
from .families import ModelConfig, family_of
from .flops import FlopCounter
from .frame_source import FrameSource
from .frame_store import FrameStore, Patches, PixelFormat
from .head import Beside
from .likely import Likely
from .metrics import UpdateMetrics
from .phase_clock import PhaseClock, peak_mib
from .sharding import EngineWeights, SentWeights, load_policy, load_teacher, reshard
from .statistics import OptimizerStep, gathered
from .token_readings import TokenReadings

if TYPE_CHECKING:
    from .packed import PackedPolicy


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step of one rank. Counts are those of all ranks together."""

    plans: tuple[MicroBatchPlan, ...]
    counts: Counts


#: with the patches of its frames
_Ready = tuple[MicroBatchPlan, MicroBatch, dict[str, Patches]]
#: micro-batches that are made ready beyond the one that is being computed
_AHEAD = 2
#: (log-probabilities, indices of response tokens, weights, entropies, and where a teacher's likeliest tokens are given
#: the divergence from them) -> this rank's part of the global loss
Loss = Callable[..., Tensor]


class Rank:
    """All methods are collective: every rank calls them in the same order."""

    def __init__(self, settings: LearnerSettings, rank: int, store: dist.Store):
        """`store`: the process group's, one and the same for all ranks."""
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.settings, self.rank, self.world = settings, rank, settings.ranks
        self.device = torch.device("cpu")
        if settings.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        # Offloaded shards and checkpoints are reduced and gathered in the host's memory.
        backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=self.world)
        self.mesh = init_device_mesh(settings.device, (self.world,))
        self.form = PixelFormat.of_folder(Path(settings.model))
        self.policy, self.vocabulary = load_policy(settings, self.form, self.mesh)
        self.reference = Reference(settings, self.form, self.mesh, self.policy)
        #: whose log-probabilities of the policy's tokens a distillation has
        self.teacher = load_teacher(settings, self.form, self.mesh)
        self.store = FrameStore(self.form)
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self.clock = PhaseClock(self.device)
        config = ModelConfig.of_folder(Path(settings.model))
        self.family = family_of(config)
        shape = self.family.shape(config)
        self.flops = FlopCounter(shape, settings, self.clock.device_name)
        self.critic = critic_of(settings, shape.hidden, self.policy)
        #: the only thread that uses the store
        self._loader = ThreadPoolExecutor(1, "frames")
        #: vLLM's trainer side and the engines that it is connected to, once `sync/gpu.py` has connected it
        self.transfer: Any = None
        #: in the last round of weights, until `sync/sync.py` has asked
        self.sent: SentWeights | None = None
        self.saving: Any = None  #: `rank_state.Saving`, from the first checkpoint on
        self.steps = 0  #: optimizer steps so far: what the warm-up counts

    # --- learning -----------------------------------------------------------------------------------------------------

    def update(
        self,
        data: TokenBatch,
        frames: FrameSource,
        batches: Sequence[MiniBatch],
        settings: UpdateSettings,
        version: int,
    ) -> UpdateMetrics:
        """One optimizer step per mini-batch. Old log-probabilities are the engine's where those are the truth (one
        step, newest weights, nothing to correct); else the learner's before the first step: for that one those of its
        own pass, detached; for later ones computed beforehand. With the anchor `behavior` there are none."""
        metrics = UpdateMetrics(tokens=TokenReadings())
        self.clock.read()  # what was computed since the last update
        figures = DeviceFigures(metrics)
        for number, (batch, loss, likely) in enumerate(self.losses(data, frames, batches, settings, figures)):
            newest, steps = version if number == 0 else None, len(batches)
            given = (data, frames, batch, settings, loss, metrics, figures)
            self._step(*given, compare_with=newest, steps=steps, likely=likely)
        return self._close(metrics)

    def losses(
        self,
        data: TokenBatch,
        frames: FrameSource,
        batches: Sequence[MiniBatch],
        settings: UpdateSettings,
        figures: DeviceFigures,
    ) -> Iterator[tuple[MiniBatch, Loss, Likely | None]]:
        """Mini-batches with their losses, which read the policy before a step, and with what a teacher finds likely.
        Raises FramesLost on all ranks."""
        everything = [plan for batch in batches for plan in batch.plans]
        with self.clock.host("prepare"):
            self.agree_on(data, everything, frames)
        objective = settings.objective
        off, corrected = settings.off_policy, bool(objective.corrections)
        own = recomputed(objective.anchor, off_policy=off, steps=len(batches), corrected=corrected)
        later = [plan for batch in batches[1:] for plan in batch.plans] if own else []
        old = self.logprobs(data, frames, later, settings.temperature) if later else data.behavior
        compared = own or objective.anchor == "behavior"
        read = partial(self.read, data=data, frames=frames, plans=everything, temperature=settings.temperature)
        beside = compared_with(objective, self.reference.entered, self.teacher, read, len(data.index))
        for number, batch in enumerate(batches):
            before = old if old_known(objective.anchor, own=own, first=number == 0) else None
            step = OptimizerStep(data, batch.plans, before, settings.seed * 1_000_003 + number)
            mine = partial(self.read, self.policy, data, frames, batch.plans, settings.temperature)
            against = (data, before, beside.reference, beside.teacher)
            given = (*against, objective, batch.counts, figures, len(batches), compared)
            found = gathered(objective, step, mine, self.world)
            yield batch, partial(batch_loss, *given, gathered=found, seed=step.seed), beside.likely

    def supervised(
        self,
        data: TokenBatch,
        frames: FrameSource,
        batches: Sequence[MiniBatch],
        settings: UpdateSettings,
    ) -> UpdateMetrics:
        """Cross-entropy on the response tokens, by weight; the samples' advantages and log-probabilities are unused."""
        metrics = UpdateMetrics()
        figures = DeviceFigures(metrics)
        self.clock.read()
        for batch in batches:
            loss = partial(imitation_loss, batch.counts, figures, len(batches))
            self._step(data, frames, batch, settings, loss, metrics, figures)
        return self._close(metrics)

    def _step(
        self,
        data: TokenBatch,
        frames: FrameSource,
        batch: MiniBatch,
        settings: UpdateSettings,
        loss: Loss,
        metrics: UpdateMetrics,
        figures: DeviceFigures,
        **how: Any,
    ) -> None:
        """`how`: as `accumulate` takes it."""
        started = time.perf_counter()
        self.accumulate(data, frames, batch, settings, loss, metrics, figures, **how)
        self._apply(settings, metrics)
        metrics.add("seconds", (time.perf_counter() - started) / self.world)

    def accumulate(
        self,
        data: TokenBatch,
        frames: FrameSource,
        batch: MiniBatch,
        settings: UpdateSettings,
        loss: Loss,
        metrics: UpdateMetrics,
        figures: DeviceFigures,
        *,
        compare_with: int | None = None,
        steps: int = 1,
        likely: Likely | None = None,
    ) -> None:
        """Gradients of the whole batch, reduced over ranks, in `.grad`. `compare_with`: the version of the weights, by
        which tokens are compared with the log-probabilities that they were sampled with (`age.py`). `figures`: those of
        `loss`, for `metrics`; `steps`: of the update; `likely`: of a teacher, for `loss`."""
        self._drop_gradients()
        self.flops.begin()
        beside: Beside = "entropy_with_gradient" if settings.objective.entropy_bonus else "entropy"
        for index, (plan, micro, shown) in enumerate(self._micro_batches(data, batch.plans, frames)):
            last = index + 1 == len(batch.plans)
            self.policy.set_requires_gradient_sync(last or self.settings.sharded_gradients)
            with self.clock.device("forward"):
                chosen = micro.response
                taught = None if likely is None else likely.at(chosen, self.device)
                logp, entropy, *more = self.policy(micro, shown, settings.temperature, beside, taught)
                apart = [] if taught is None else [more.pop(0)]
                counted = torch.from_numpy(data.weight[chosen] * (0.0 if plan.padding else 1.0))
                weight = counted.to(logp.device)
                value = loss(logp, chosen, weight, entropy, *apart)
                if self.critic is not None and data.target is not None:
                    value = value + self.critic.loss(more[0], data, chosen, weight, batch.counts, figures, steps)
            with self.clock.device("backward"):
                (value * self.world).backward()
            figures.add("entropy", (entropy.detach() * weight).sum())
            mine = figures.read(logp, entropy)
            metrics.add("positions", micro.tokens)
            if plan.padding:
                continue
            metrics.keep(chosen, mine)
            metrics.add("tokens", micro.tokens)
            metrics.add("response_tokens", len(chosen))
            metrics.add("flops", self.flops.passes(micro.lengths, len(chosen), shown, micro.before))
            metrics.add("weight", float(counted.sum()))
            if compare_with is not None:
                compare_by_age(mine[0], data, chosen, compare_with, metrics.add)

    def _micro_batches(
        self, data: TokenBatch, plans: Sequence[MicroBatchPlan], frames: FrameSource
    ) -> Iterator[_Ready]:
        """In order. The next ones are fetched, decoded and laid out in a thread while one is being computed."""
        coming: deque[Future[_Ready]] = deque()
        try:
            for index in range(len(plans)):
                for plan in plans[index + len(coming) : index + 1 + _AHEAD]:
                    coming.append(self._loader.submit(self._ready, data, plan, frames))
                with self.clock.host("prepare"):
                    ready = coming.popleft().result()
                yield ready
        finally:
            for left in coming:
                left.cancel()

    def _ready(self, data: TokenBatch, plan: MicroBatchPlan, frames: FrameSource) -> _Ready:
        found: dict[str, FittedFrame] = {}
        for episode, names in frames_of(data, [plan]).items():
            if missing := [name for name in names if name not in self.store and name not in found]:
                found |= frames.read(episode, missing)
        shown = self.store.get((name for k in plan.samples for name in data.frames[k]), found)
        grids = {name: (patches.rows, patches.columns) for name, patches in shown.items()}
        place = self.family.positions
        return plan, micro_batch(data, plan, grids, self.vocabulary, place=place), shown

    def agree_on(self, data: TokenBatch, plans: Sequence[MicroBatchPlan], frames: FrameSource) -> None:
        """Raises FramesLost on every rank if one of them can't get at what it needs: together, before anything is
        computed, so that no rank waits for another and the learner goes on."""
        lost = frames.lost(frames_of(data, plans))
        if self.world > 1:
            of_all: list[list[str]] = [[]] * self.world
            dist.all_gather_object(of_all, lost)
            lost = [episode for of_one in of_all for episode in of_one]
        if lost:
            raise FramesLost(set(lost))

    def _apply(self, settings: UpdateSettings, metrics: UpdateMetrics) -> None:
        """Clips, and moves the weights; or, if the gradient is not a number, raises and leaves them."""
        gradients = [p for p in self.policy.parameters() if p.grad is not None]
        with self.clock.device("optimizer"):
            norm = torch.nn.utils.clip_grad_norm_(gradients, settings.gradient_clip)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        metrics.top("gradient_norm", float(norm))
        sound = self.critic is None or self.critic.reduce(self.world)
        if not (sound and bool(torch.isfinite(norm))):
            self._drop_gradients()
            raise FloatingPointError(
                f"the gradient's norm is {float(norm)}{'' if sound else ', and that of the critic is not finite,'} "
                f"at optimizer step {self.steps}; nothing was updated. Lower the learning rate, or look at the samples "
                "of this update"
            )
        self.steps += 1
        rate = settings.learning_rate * min(1.0, self.steps / max(1, settings.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.clock.device("optimizer"):
            self.optimizer.step()
            if self.critic is not None:
                self.critic.step()
        self._drop_gradients()
        metrics.top("learning_rate", rate)

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.forget_gradients()

    def _close(self, metrics: UpdateMetrics) -> UpdateMetrics:
        for phase, seconds in self.clock.read().items():
            metrics.add(f"seconds_{phase}", seconds / self.world)
        metrics.top("peak_flops", self.flops.peak)
        metrics.top("peak_mib", peak_mib(self.device))
        return metrics

    # --- reading ------------------------------------------------------------------------------------------------------

    def logprobs(
        self,
        data: TokenBatch,
        frames: FrameSource,
        plans: Sequence[MicroBatchPlan],
        temperature: float,
        *,
        masked: bool = True,
    ) -> np.ndarray:
        """[response tokens] of all samples; those of other ranks' plans stay nan. `masked`: over what the policy may
        say; else over the whole vocabulary."""
        allowed = self.policy.allowed
        try:
            if not masked:
                self.policy.allowed = torch.ones_like(allowed)
            return self.read(self.policy, data, frames, plans, temperature)[0]
        finally:
            self.policy.allowed = allowed

    def read(
        self,
        policy: PackedPolicy,
        data: TokenBatch,
        frames: FrameSource,
        plans: Sequence[MicroBatchPlan],
        temperature: float,
        beside: Beside = "entropy",
        likely: Likely | None = None,
    ) -> np.ndarray:
        """Log-probabilities, what `beside` says, and where there is a critic its values, each [response tokens] of all
        samples; nan where another rank has it. `likely`, which is empty, is filled."""
        result = np.full((2 if policy.critic is None else 3, len(data.index)), np.nan, np.float32)
        with torch.no_grad():
            for plan, micro, shown in self._micro_batches(data, plans, frames):
                with self.clock.device("forward"):
                    k = 0 if likely is None else likely.k
                    logp, other, *more = policy(micro, shown, temperature, beside, likely=k)
                if likely is not None:
                    likely.put(micro.response, more.pop(0), more.pop(0))
                found = torch.stack([logp, other, *more])
                if not plan.padding or np.isnan(result[:, micro.response]).any():
                    result[:, micro.response] = found.float().cpu().numpy()
        reshard(policy)
        return result

    def weights(self) -> dict[str, Tensor]:
        """Whole tensors under checkpoint names in the engine's dtype; gathered by all ranks, kept by the first."""
        found: dict[str, Tensor] = {}
        self.sent = SentWeights(digested=self.rank == 0)
        for name, tensor in EngineWeights(self.policy.model, getattr(torch, self.settings.dtype), sent=self.sent):
            if self.rank == 0:
                found[name] = tensor.cpu()
        return found
