"""Networks: the transformer over trajectories, stacked multi-layer perceptrons, and noise that is seeded per episode."""
