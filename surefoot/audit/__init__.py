"""Before a run: is the data sound, is the reward sound.

Owns what can be found out without training, the verdict over it, and the mending of a file.
Refuses to own the reading of rows and the scoring of completions, and never changes its input.
"""
