"""Networks: the transformer over trajectories, stacked perceptrons, and noise that is seeded per episode."""
