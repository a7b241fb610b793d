"""Where prompts and examples come from: sources, validation, the eval split, the keyed stream.

Owns everything between a recipe's `data` section and the prompts that an engine samples from, or
the demonstrations, pairs, labels and rankings that supervised and preference training learn from.
Refuses to own tokenizers (it asks an encoder), rewards, and the rows' use in a step.
"""

from surefoot.data.build import SOURCES, Data, build
from surefoot.data.build_examples import Examples, build_examples
from surefoot.data.encode import ExampleEncoder, TrainOn
from surefoot.data.example_report import ExampleReport, ExampleSourceReport
from surefoot.data.examples import KINDS, Demonstration, Example, Label, Pair, Ranking
from surefoot.data.from_run import Harvest, demonstrations_from_run, pairs_from_run
from surefoot.data.packing import PackedRow, pack
from surefoot.data.prompts import PromptEncoder
from surefoot.data.report import DataReport, SourceReport
from surefoot.data.rows import Quarantined
from surefoot.data.schedule import Span
from surefoot.data.stream import Lane, Stream
from surefoot.data.window import LOOK_AGAIN_AFTER

__all__ = [
    "KINDS",
    "LOOK_AGAIN_AFTER",
    "SOURCES",
    "Data",
    "DataReport",
    "Demonstration",
    "Example",
    "ExampleEncoder",
    "ExampleReport",
    "ExampleSourceReport",
    "Examples",
    "Harvest",
    "Label",
    "Lane",
    "PackedRow",
    "Pair",
    "PromptEncoder",
    "Quarantined",
    "Ranking",
    "SourceReport",
    "Span",
    "Stream",
    "TrainOn",
    "build",
    "build_examples",
    "demonstrations_from_run",
    "pack",
    "pairs_from_run",
]
