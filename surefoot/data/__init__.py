"""Where prompts come from: sources, validation, the eval split and the keyed stream.

Owns everything between a recipe's `data` section and the prompts that an engine samples from.
Refuses to own tokenizers (it asks a `PromptEncoder`), rewards, and the rows' use in a step.
"""

from surefoot.data.build import SOURCES, Data, build
from surefoot.data.prompts import PromptEncoder
from surefoot.data.report import DataReport, SourceReport
from surefoot.data.rows import Quarantined
from surefoot.data.schedule import Span
from surefoot.data.stream import Lane, Stream
from surefoot.data.window import LOOK_AGAIN_AFTER

__all__ = [
    "LOOK_AGAIN_AFTER",
    "SOURCES",
    "Data",
    "DataReport",
    "Lane",
    "PromptEncoder",
    "Quarantined",
    "SourceReport",
    "Span",
    "Stream",
    "build",
]
