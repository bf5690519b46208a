"""Runs on a Kubernetes cluster, from a laptop or a notebook: what `tapforge cluster` does, as functions.

    from tapforge_trainer.remote import Cluster

    cluster = Cluster(namespace="research")            # by the kubeconfig; in a Pod by its service account
    run = cluster.submit("run.yaml", overrides=["spec.seed=3"])
    run.wait()
    run.fetch("runs")                                  # runs/NAME, which `tapforge view` reads

1. Everything blocks, and every request has a deadline.
2. What can go wrong though the program is right is a `ClusterError`, whose message names the thing and the remedy, or a
   `SpecError` for a file. `Refused`, one of the former, is the caller's to change.
3. Importing this imports neither the Kubernetes client nor anything that trains.
"""

from .api import ClusterError, Refused
from .cluster import Cluster, Run
from .fetch import Fetched
from .status import RunStatus
from .submit import Applied

__all__ = ["Applied", "Cluster", "ClusterError", "Fetched", "Refused", "Run", "RunStatus"]
