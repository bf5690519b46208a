"""A real node beside a cluster's fake ones (node.py), and what it takes to have one (prerequisites.py)."""

from .network import Addresses
from .node import LABEL, NAME, NODE, RealNode
from .prerequisites import CannotRun

__all__ = ["LABEL", "NAME", "NODE", "Addresses", "CannotRun", "RealNode"]
