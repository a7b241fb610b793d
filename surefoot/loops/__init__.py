"""The loops: one step as data, from prompts to an update (DESIGN section 4).

Owns the order of things and what a run does when something is missing.
Refuses to own what any room does: each line of a step calls one.
"""
