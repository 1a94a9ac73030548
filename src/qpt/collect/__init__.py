"""Collect: from a simulator with a cost to a dataset of DSRL's kind."""
