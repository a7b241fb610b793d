"""The learner: how weights change.

Owns layouts, the Scorer, the loss of a row, the optimizer and the update.
Refuses to own sampling, rewards, credit and the run directory.
"""
