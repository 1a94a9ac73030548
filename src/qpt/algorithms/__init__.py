"""The methods: one file each, on shared nets, samplers, loop, checkpoints, policy and evaluation."""
