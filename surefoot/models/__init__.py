"""Models: loading, aliases, templates, stop ids, identity and export.

Owns how weights and tokenizers come in and go out.
Refuses to own training, sampling and the run directory.
"""

from __future__ import annotations

from surefoot.models.export import export_directory
from surefoot.models.load import LoadedModel, load_model, wrap_model
from surefoot.models.template import PromptTemplate

__all__ = ["LoadedModel", "PromptTemplate", "export_directory", "load_model", "wrap_model"]
