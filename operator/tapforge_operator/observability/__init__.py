"""What the operator says of itself: metrics, health, logs."""
