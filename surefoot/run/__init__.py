"""The run directory: what a run writes down, and how it is read back.

Owns every file of a run directory except `report.html`. `checkpoint` is the only module of this
room that imports torch, so import it by its own name.
Refuses to own what is written: rows, tensors and findings come from the other rooms.
"""
