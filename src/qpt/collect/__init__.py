"""Collect: from a simulator with a cost to a data set of DSRL's kind."""
