"""Rollouts: how completions are sampled.

Owns the `Engine` protocol and the engines: local (in this process) and scripted (for tests).
Refuses to own scoring, and which prompts are asked.
"""

from __future__ import annotations

from surefoot.rollout.engine import Engine, Sampling
from surefoot.rollout.local import LocalEngine
from surefoot.rollout.scripted import ScriptedEngine

__all__ = ["Engine", "LocalEngine", "Sampling", "ScriptedEngine"]
