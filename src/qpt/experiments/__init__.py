"""The experiments room: grids of runs as jobs that resume, and the executors that carry them out."""
