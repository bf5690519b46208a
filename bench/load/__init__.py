"""What the rollout benchmarks share: a policy that costs nothing, phones that are slow on demand, machine facts."""
