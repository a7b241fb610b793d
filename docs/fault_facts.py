"""The 36 rows of the fault matrix: what goes wrong, and what a run does then.

Owns plain data for `docs/generate.py`, which finds the tests of each row by itself.
Refuses to own anything that computes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Outcome = Literal[
    "goes on", "stops", "refused", "goes on, or stops", "refused, or goes on", "refused, or stops"
]


class Fault(NamedTuple):
    fault: str
    """In our words."""
    outcome: Outcome
    """Refused: before anything is trained. Stops: with its state saved, so that it can go on."""
    expected: str


FAULTS: dict[int, Fault] = {
    1: Fault(
        "the process is killed while a checkpoint is written",
        "goes on",
        "the newest whole checkpoint is taken; the half-written one is not looked at and removed",
    ),
    2: Fault(
        "the process is killed between two moves of saving: written, renamed, old ones retired",
        "goes on",
        "after every move there is a checkpoint that verifies",
    ),
    3: Fault(
        "the process is killed while sampling, scoring or updating",
        "goes on",
        "the step is redone; final weights, moments and ledger rows are those of an undisturbed "
        "run, byte for byte, no row twice and none missing",
    ),
    4: Fault(
        "SIGINT, SIGTERM or SIGUSR1",
        "stops",
        "at the next safe place, with a checkpoint and exit code 75; a second signal, or no safe "
        "place within `run.grace`, ends the process at once, resumable as after a kill",
    ),
    5: Fault(
        "the disk is full when a checkpoint is due",
        "goes on, or stops",
        "older checkpoints stay as they are, no partial one is left, an event says so; training "
        "goes on until the next one is due; a second failure in a row, or one at the end, stops "
        "the run with exit code 3",
    ),
    6: Fault(
        "the disk is full when metrics or samples are written",
        "goes on",
        "rows wait in memory and are written when there is room; one warning; the gap is an event",
    ),
    7: Fault(
        "a file of a checkpoint is cut short, or a bit of it flips",
        "goes on",
        "found by size or sha256; the checkpoint is renamed `.corrupt`, the one before it is "
        "taken, and the message names the file",
    ),
    8: Fault(
        "a run is resumed with another recipe, model, tokenizer, template or data",
        "refused",
        "what alters the learning is listed, old beside new, unless `run.allow_change` names it, "
        "other data and another template too; another model or tokenizer never goes on",
    ),
    9: Fault(
        "a run is resumed with another token budget of the micro-batches, or other workers",
        "goes on",
        "the same losses up to rounding, because every denominator is that of the whole step",
    ),
    10: Fault(
        "two processes train in one run directory",
        "refused",
        "the second is told process and host of the first; the lock of a dead process is taken "
        "over",
    ),
    11: Fault(
        "a checkpoint holds a pickle or a file that is not ours",
        "refused",
        "by the name of the file; nothing is unpickled",
    ),
    12: Fault(
        "a loss or a gradient is NaN or infinite",
        "goes on, or stops",
        "the optimizer step is left out, weights and moments stay as they are, an event names the "
        "rows; the third in a row stops with exit code 3 and a checkpoint that is good",
    ),
    13: Fault(
        "the engine gives a log-probability that is not finite",
        "goes on",
        "the token is in no loss and no denominator, and counted as `nonfinite_logps`",
    ),
    14: Fault(
        "NaN where nothing is to be read: padding, absent completions, prompts",
        "goes on",
        "it stays there; loss, gradient and metrics are those of a run without it",
    ),
    15: Fault(
        "a log-ratio explodes: log-probabilities of then and now lie 80 or 10,000 nats apart",
        "goes on, or stops",
        "ratios are held within 20 nats and counted as `ratio/clamped`; what is not held (a KL "
        "against the reference) is refused as row 12 where it overflows",
    ),
    16: Fault(
        "all rewards of every group are equal",
        "goes on",
        "no optimizer step, so that neither momentum nor weight decay moves a weight; counted as "
        "`steps_without_signal`",
    ),
    17: Fault(
        "step after step nothing can be learned",
        "stops",
        "after `run.stop_without_signal` steps, with exit code 3, the mean reward and what to "
        "change; sampling again for groups with a spread is bounded too",
    ),
    18: Fault(
        "the learner runs out of memory",
        "goes on, or stops",
        "the step is redone in micro-batches of half the budget, with the same result up to "
        "rounding, and the budget is kept; where pieces cannot get smaller the run stops with what "
        "to change. A step of which some weights have changed is never saved",
    ),
    19: Fault(
        "the engine runs out of memory or fails",
        "goes on, or stops",
        "fewer completions are decoded at once, by the same draws, and an event says so; where one "
        "alone does not fit, the run stops with what to change",
    ),
    20: Fault(
        "trainer and engine disagree about the log-probabilities of the sampled tokens",
        "goes on, or stops",
        "the mismatch is in every row of the metrics; from `run.stop_at_mismatch` nats a token on "
        "the run stops with exit code 3, unless it samples from a cut distribution on purpose",
    ),
    21: Fault(
        "the engine samples with old weights",
        "goes on, or stops",
        "every completion carries the version of its weights; one of other weights is counted, "
        "never trained, and three steps in a row with such stop the run",
    ),
    22: Fault(
        "a reward function raises",
        "goes on, or stops",
        "its sample alone is missing, each distinct error is logged once with its traceback; above "
        "`run.stop_at_failure_rate` the run stops",
    ),
    23: Fault(
        "a reward function hangs",
        "goes on",
        "its process is killed at the deadline; its sample alone is missing, no other waits longer",
    ),
    24: Fault(
        "a reward gives NaN, infinity, text or a list of the wrong length",
        "refused, or goes on",
        "`audit reward` names it; in a run what is no number is missing, a wrong list makes its "
        "whole call missing, None is a part that does not apply",
    ),
    25: Fault(
        "the judge's server is busy, down or silent",
        "goes on, or stops",
        "asked again after pauses that grow and that keep to `Retry-After`, within a deadline; "
        "then the sample is missing; a server that stays down stops the run",
    ),
    26: Fault(
        "the judge's server refuses: key, model, question",
        "refused, or stops",
        "no second try; its message is passed on at once. Once it has answered in this run, the "
        "run stops with its state saved",
    ),
    27: Fault(
        "the judge gives no verdict, or will not answer",
        "goes on",
        "one more question, then the sample is missing, never 0; the rates are metrics",
    ),
    28: Fault(
        "the sandbox cannot be started",
        "goes on, or stops",
        "a second try, then that sample is missing; many failures in a row stop the run before it "
        "trains on the step",
    ),
    29: Fault(
        "a generated program forges a pass",
        "goes on",
        "it scores 0, and the count of `tamper` says so where the forgery is seen",
    ),
    30: Fault(
        "a generated program forks, floods, fills memory or disk, reads secrets, uses the network",
        "goes on",
        "it is held inside the sandbox and scores 0; the machine is afterwards as it was",
    ),
    31: Fault(
        "data with malformed lines, missing columns, wrong types, or an id used twice",
        "refused, or goes on",
        "the file and line are named; with `skip_invalid` such rows are left out and counted, up "
        "to `max_invalid`",
    ),
    32: Fault(
        "a gold answer is empty, unreadable, or wrong by its own verifier",
        "refused, or goes on",
        "`audit data` lists it; in a run the row cannot be scored, its group is dropped, and it is "
        "not asked again",
    ),
    33: Fault(
        "a prompt is empty, or longer than the context with its template",
        "refused, or goes on",
        "left out when the data is read, and counted; the engine is never asked",
    ),
    34: Fault(
        "control tokens, lone surrogates, NUL, right-to-left marks, lines of a megabyte",
        "refused, or goes on",
        "in data left out or read as text; in completions they are text; every file of the run "
        "stays valid UTF-8, and pages are escaped",
    ),
    35: Fault(
        "a completion is empty, cut off, the prompt again, or answers twice",
        "goes on",
        "it gets the score that the reward gives it; `truncated` says what a cut one counts as; "
        "nothing is divided by a length of 0",
    ),
    36: Fault(
        "a tracker is down, slow or not installed",
        "goes on",
        "training does not wait for it, `metrics.jsonl` is whole, and one event says what is wrong",
    ),
}
