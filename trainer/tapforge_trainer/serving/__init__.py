"""Models that a run serves beside its policy (`spec.models`): servers that are placed, started, watched and started
again."""
