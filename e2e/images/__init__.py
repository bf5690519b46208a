"""The images of the Dockerfile, built on this machine: no engine, no registry, no downloads but packages.

    python -m e2e.images [operator] [phone] [trainer]

The base is a small Debian made by debootstrap (base.py), the build is buildah's (build.py). What is built lies in the
cache of e2e/cluster, by the hash of everything that goes into it. Root is needed, as for the real node that runs them.

Seen on 2 cores that were busy with other work: from nothing 150 s, of which the base takes 74; after a change of code
16 to 60 s; nothing changed 0.1 s. Compressed the operator has 68 MiB and the phone 93, of which they share 48. The
trainer for CPUs has 7.4 GB and takes 12 minutes and 25 GB of disk to build, so tests don't: they mount the packages of
this machine instead (e2e/cluster/node/host.py).
"""

from .build import IMAGES, ensure

__all__ = ["IMAGES", "ensure"]
