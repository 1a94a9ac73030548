"""The data room: files, trajectories, augmentation and samplers."""
