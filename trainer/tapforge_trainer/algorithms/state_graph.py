"""The graph of states that the trajectories of each group walked, and how far each state is from the goal.

Nodes are the states of a group; a step is an edge from its state to the next one's, of length 1. The last step of a
trajectory that reached its goal leads to the group's goal, another's to its final state. All groups are one graph,
since no edge leaves a group. A breadth-first search from the goals walks each edge once, all of a distance together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .group_statistics import distinct, labels
from .steps import NO_STATE, Bools, Floats, Ints, Steps


@dataclass(frozen=True, slots=True)
class StateGraph:
    """One entry per *valid* step."""

    #: node that the step leaves, and that it leads to; a node that no step leaves has a number too
    source: Ints
    target: Ints
    nodes: int
    #: whether it is known where the step leads
    known: Bools
    #: edges to the goal, by node; a node from which no trajectory got there has one more than the farthest of its group
    distance: Ints


def graph_of(steps: Steps, goal: Bools, final_state: Ints) -> StateGraph:
    """`goal` and `final_state` as in `Steps`. An edge to a final state that is not known is left out of the search."""
    valid = steps.valid
    trajectory, goal, final = steps.trajectory[valid], goal[valid], final_state[valid]
    group, groups = labels(steps.group[valid])
    n = len(group)
    order = np.argsort(trajectory, kind="stable")
    following = np.full(n, -1, dtype=np.int64)
    following[order[:-1]] = np.where(trajectory[order][1:] == trajectory[order][:-1], order[1:], -1)
    last = following < 0
    # Steps' states and final states are numbered together; those without a key are nodes of their own.
    state = distinct(np.concatenate([steps.state[valid], final]))
    node, count = labels(np.concatenate([group, group]), state)
    source, ends = node[:n], node[n:]
    target = np.where(last, np.where(goal, count + group, ends), source[following])
    known = ~last | goal | (final != NO_STATE)
    nodes = count + groups
    far = _distances(source[known], target[known], nodes, count + np.arange(groups))
    of = np.concatenate([np.zeros(count, dtype=np.int64), np.arange(groups)])
    of[node] = np.concatenate([group, group])
    farthest = np.zeros(groups, dtype=np.int64)
    np.maximum.at(farthest, of, far)
    distance = np.where(far < 0, farthest[of] + 1, far)
    return StateGraph(source, target, nodes, known, distance)


def _distances(source: Ints, target: Ints, nodes: int, goals: Ints) -> Ints:
    """Least number of edges from each node to one of `goals`; -1 where there is no way."""
    order = np.argsort(target, kind="stable")
    begin = np.searchsorted(target[order], np.arange(nodes + 1))
    found = np.full(nodes, -1, dtype=np.int64)
    found[goals] = 0
    front, distance = goals, 0
    while len(front):
        distance += 1
        length = begin[front + 1] - begin[front]
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        nearer = source[order[np.repeat(begin[front], length) + within]]
        front = np.unique(nearer[found[nearer] < 0])
        found[front] = distance
    return found


def powers(base: float, exponent: Ints) -> Floats:
    """base^exponent for exponents of at least 0, equal for equal ones to the last bit."""
    return (base ** np.arange(exponent.max(initial=0) + 1))[exponent]
