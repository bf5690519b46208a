"""GraphGPO (arXiv:2605.26684): a step is worth how near to the goal it led, on the graph of all that its group walked.

Each step is an edge of its group's graph of states (`state_graph.py`), worth q = goal_reward * omega^e. Edges that
leave the same state are compared, repeated ones counted each time: (q - mean) / (std + epsilon), "mean": q - mean. To
that comes the episode's advantage as in `grpo`: A = episode_weight * episode + weight * graph.

`form` says what e is, with d the least number of edges from a state to the goal:
- `code` (the default, the authors' recipe): d(next). `paper` (equation 4): d(next) + 1, so q is omega times as large,
  which shows only beside epsilon and with normalization mean.
- `gain` (the recipe's `normalize_distance`): d(next) - d(state) + 1, what the step gained, the same at any distance.

`omega` is 0.9 here and 0.1 as published: with 0.1 the differences of q sink under epsilon. The right edge against one
that stays has 0.71 near the goal, 0.04 at 9 edges from it and nothing beyond 10, while episodes take 15 steps and more.
`row_statistics` is the recipe's `cross_steps`: the episode's statistics over one entry per step. The default is one per
trajectory, as in the port to Relax. `min_deviation` is of the episode's statistics alone: q is in other units.

Conventions: a state from which no trajectory got to the goal is one edge farther than the farthest from which one did,
so that a group in which none succeeded has no graph term. An edge that nothing is compared with has 0. A group of one
has no episode term (the recipe: the raw return). A step without a state key is a node of its own. Which trajectories
succeeded is `Steps.goal`, needed whatever the signal is. Where a failure's last step led is `Steps.final_state`; where
that isn't known, `unknown_end` says what it counts as: `left_out` (default: no edge, and no graph term for that step)
or `dead_end` (a state that no step left). Where outcomes gate, a group that ended alike has 0; in a mixed one every
state counts, also one that only failures saw: distances come of what all did.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .choices import one_of, within
from .episodes import episodes_of, spread
from .group_statistics import Normalization, compare, mixed
from .grpo import episode_advantage
from .state_graph import graph_of, powers
from .steps import Advantages, Steps, need

Form = Literal["code", "paper", "gain"]
UnknownEnd = Literal["left_out", "dead_end"]


def graphgpo(
    steps: Steps,
    *,
    normalization: Normalization = "mean_std",
    omega: float = 0.9,
    form: Form = "code",
    weight: float = 1.0,
    episode_weight: float = 1.0,
    row_statistics: bool = False,
    min_deviation: float = 0.0,
    unknown_end: UnknownEnd = "left_out",
    goal_reward: float = 10.0,
    epsilon: float = 1e-6,
) -> Advantages:
    """Raises ValueError for an unknown option, and for steps without `goal` or `final_state`."""
    one_of("normalization", normalization, Normalization)
    one_of("form", form, Form)
    one_of("unknown_end", unknown_end, UnknownEnd)
    within("omega", omega, 0, 1)
    within("weight", weight, 0, 1e6)
    within("episode_weight", episode_weight, 0, 1e6)
    within("goal_reward", goal_reward, 0, 1e6)
    if not episode_weight and not (weight and goal_reward):
        raise ValueError("episode_weight is 0, and weight or goal_reward too: nothing is left to learn from")
    goal = need(steps.goal, "graphgpo", "goal", "say which trajectories succeeded, or use gigpo")
    remedy = "give the state after each trajectory's last step (NO_STATE where it isn't known), or use gigpo"
    final_state = need(steps.final_state, "graphgpo", "final_state", remedy)

    graph = graph_of(steps, goal, final_state)
    edge = graph.known if unknown_end == "left_out" else np.ones(len(graph.known), dtype=bool)
    distance = graph.distance[graph.target]
    if form == "paper":
        distance = distance + 1
    elif form == "gain":
        distance = distance - graph.distance[graph.source] + 1
    worth = goal_reward * powers(omega, np.where(edge, distance, 0))
    own = np.zeros(len(worth))
    own[edge] = compare(worth[edge], graph.source[edge], graph.nodes, normalization, epsilon, 0.0, None)
    episodes = episodes_of(steps)
    counts = mixed(episodes.group, episodes.groups, episodes.success)[episodes.group][episodes.of_step]
    step = weight * np.where(counts, own, 0.0)
    episode = episode_weight * episode_advantage(steps, normalization, min_deviation, row_statistics, epsilon)
    leaving = np.bincount(graph.source[edge], minlength=graph.nodes)[graph.source]
    size = np.zeros(len(steps), dtype=np.int64)
    size[steps.valid] = np.where(edge, leaving, 1)
    return Advantages(
        spread(steps.valid, episode + step), spread(steps.valid, episode), spread(steps.valid, step), size
    )
