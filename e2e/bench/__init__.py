"""How fast the operator is, against a real API server on this machine: `python -m e2e.bench`, `make bench-operator`.

Each scenario is a file with its own fresh cluster, ends by itself, and returns plain figures. What they have in common:

- The operator is a process of its own, started as in a cluster, with a user of its own; its CPU and memory are its own.
- Times are the API server's: its audit log says in microseconds when every write came in and when it was answered, so
  that no observer takes part in what is measured. Claims and the first grant are timed by the caller.
- Everything shares the machine: API server, etcd, controllers, load and operator. So ratios within one run count.
"""
