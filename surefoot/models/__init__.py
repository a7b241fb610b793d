"""Models: loading, aliases, templates, stop ids, identity and export.

Owns how weights and tokenizers come in and go out.
Refuses to own training, sampling and the run directory.
"""

from __future__ import annotations

from surefoot.models.export import export_directory, save_directory
from surefoot.models.given import GivenModel, adopt, given_model
from surefoot.models.load import OBJECT, LoadedModel, load_model, wrap_model
from surefoot.models.template import PromptTemplate

__all__ = [
    "OBJECT",
    "GivenModel",
    "LoadedModel",
    "PromptTemplate",
    "adopt",
    "export_directory",
    "given_model",
    "load_model",
    "save_directory",
    "wrap_model",
]
