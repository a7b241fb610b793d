"""The local engine: batched sampling in this process, from the policy's own weights.

Owns the decode loop: each distinct prompt is prefilled once and its cache expanded to the group,
all rows decode together, finished rows leave at once, and new ones enter only when the row budget
is below the number of completions asked for.
Refuses to own how a token is drawn (`sampling`) and the cache's memory (`cache`).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from surefoot import draws
from surefoot.errors import StoppedOnFinding
from surefoot.models.lora import has_adapter, merged_copy, moving_weights
from surefoot.models.memory import out_of_memory
from surefoot.records import Completion, Group, Prompt, StopReason
from surefoot.rollout.cache import cache_argument, join, new_cache, select
from surefoot.rollout.decoder import find_decoder
from surefoot.rollout.engine import Interrupt, Sampling
from surefoot.rollout.sampling import draw, tempered
from surefoot.rollout.stops import StopRule


@dataclass
class _Row:
    """A completion in the making."""

    prompt: int
    sample: int
    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


@dataclass
class _State:
    """The live rows: their cache, the hidden state to draw from, and their columns."""

    rows: list[_Row]
    cache: Cache
    hidden_BH: Tensor
    start_B: Tensor
    """First column of each row that is not padding."""
    columns: int


class LocalEngine:
    """Samples with a copy of the policy in `dtype`, or with the policy itself if it is in `dtype`.

    A policy with an adapter is copied with the adapter merged, anew at each `load`.

    `rows` completions are decoded at once. `interrupt` is called before every token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        settings: Sampling,
        stop_ids: Sequence[int],
        dtype: torch.dtype,
        rows: int,
        seed: int,
        interrupt: Interrupt = lambda: None,
    ) -> None:
        assert rows >= 1, rows
        self.settings = settings
        self.rows = rows
        self.seed = seed
        self.interrupt = interrupt
        self.version = 0
        self._troubles: list[str] = []
        self._live = 0
        """Completions that are decoded at once right now."""
        self.stops = StopRule(tokenizer, stop_ids, settings.stop)
        self._own_copy = model.dtype != dtype or has_adapter(model)
        self.model = _copy(model, dtype) if self._own_copy else model
        self.model.requires_grad_(not self._own_copy)
        self.decoder = find_decoder(self.model, join=self._own_copy)
        self._cache_name = cache_argument(self.model)

    def load(self, model: PreTrainedModel, *, version: int) -> None:
        """Take over the policy's weights, rounded to the engine's precision."""
        self.version = version
        if self._own_copy:
            mine = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, weight in moving_weights(model):
                    mine[name].copy_(weight)
        if self.decoder is not None:
            self.decoder.refresh()

    @torch.inference_mode()
    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        *,
        purpose: str,
        greedy: bool = False,
    ) -> list[Group]:
        """See `Engine.sample`. After running out of memory, fewer rows are decoded at once.

        Raises StoppedOnFinding when one alone does not fit.
        """
        done: dict[tuple[int, int], Completion] = {}
        asked = [(p, g) for p in range(len(prompts)) for g in range(group_size)]
        rows = self.rows
        while True:
            left = [place for place in asked if place not in done]
            try:
                self._decode(left, rows, prompts, done, purpose, greedy=greedy)
                break
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
            # Outside the handler, whose traceback holds the caches.
            rows = self._fewer(len(asked))
        return [
            Group(prompt, tuple(done[p, g] for g in range(group_size)))
            for p, prompt in enumerate(prompts)
        ]

    def troubles(self) -> list[str]:
        """See `Engine.troubles`."""
        told, self._troubles = self._troubles, []
        return told

    def _fewer(self, asked: int) -> int:
        """Rows for the rest of a rollout of `asked` completions, half of those that did not fit.

        Later rollouts begin with half of what this one began with: the last rows are the longest.
        """
        if self._live <= 1:
            raise StoppedOnFinding(
                "sampling ran out of memory with one completion at a time; lower "
                "rollout.max_new_tokens or the length of the prompts, take a smaller model or a "
                "machine with more memory"
            )
        self.rows = max(1, min(self.rows, asked) // 2)
        rows = self._live // 2
        self._troubles.append(
            f"sampling ran out of memory with {self._live} completions at a time; it goes on with "
            f"{rows}, and later with at most {self.rows}"
        )
        return rows

    def _decode(
        self,
        places: Sequence[tuple[int, int]],
        rows: int,
        prompts: Sequence[Prompt],
        done: dict[tuple[int, int], Completion],
        purpose: str,
        *,
        greedy: bool,
    ) -> None:
        """Sample the completions (prompt, sample) at `places` into `done`, so many at once."""
        waiting = deque(places)
        state: _State | None = None
        while waiting or state is not None:
            self.interrupt()
            room = rows - (len(state.rows) if state else 0)
            if waiting and room > 0:
                fresh = [waiting.popleft() for _ in range(min(room, len(waiting)))]
                self._live = (len(state.rows) if state else 0) + len(fresh)
                state = self._enter(state, fresh, prompts)
            assert state is not None
            self._draw(state, prompts, purpose, greedy=greedy)
            finished = self._finish(state, done)
            state = self._keep(state, finished)
            if state is not None:
                self._live = len(state.rows)
                self._advance(state)

    def _enter(
        self, state: _State | None, fresh: Sequence[tuple[int, int]], prompts: Sequence[Prompt]
    ) -> _State:
        """Prefill the prompts of new rows, a length at a time, and join them to the live ones."""
        by_length: dict[int, list[tuple[int, int]]] = {}
        for p, g in fresh:
            by_length.setdefault(len(prompts[p].ids), []).append((p, g))
        parts = [] if state is None else [state]
        for length, members in by_length.items():
            distinct = sorted({p for p, _ in members})
            ids = torch.tensor([prompts[p].ids for p in distinct], device=self.model.device)
            cache = new_cache(self._layers)
            hidden = self._forward(ids, cache, None, None)[:, -1]
            owner = torch.tensor([distinct.index(p) for p, _ in members], device=ids.device)
            select(cache, owner)
            rows = [_Row(p, g) for p, g in members]
            start = torch.zeros(len(rows), dtype=torch.long)
            parts.append(_State(rows, cache, hidden[owner], start, length))
        return _join(parts)

    def _draw(
        self, state: _State, prompts: Sequence[Prompt], purpose: str, *, greedy: bool
    ) -> None:
        """Append one token to every live row."""
        head = self.model.get_output_embeddings() if self.decoder is None else self.decoder.logits
        logits = _finish_logits(self.model, head(state.hidden_BH))
        early = [len(row.ids) < self.settings.min_new_tokens for row in state.rows]
        sampled = tempered(logits, self.settings, blocked=self._blocked(early, logits))
        if any(early) and not all(early):
            free = tempered(logits, self.settings, blocked=None)
            sampled = torch.where(torch.tensor(early, device=free.device)[:, None], sampled, free)
        uniform = None
        if not greedy:
            keyed = draws.uniform(
                self.seed,
                purpose,
                np.array([prompts[row.prompt].position for row in state.rows]),
                np.array([row.sample for row in state.rows]),
                np.array([len(row.ids) for row in state.rows]),
            )
            uniform = torch.from_numpy(keyed).to(sampled.device)
        ids, logps = draw(sampled, uniform)
        for row, token, value in zip(state.rows, ids.tolist(), logps.tolist(), strict=True):
            row.ids.append(token)
            row.logps.append(value)

    def _blocked(self, early: Sequence[bool], logits: Tensor) -> Tensor | None:
        if not any(early):
            return None
        return torch.tensor(self.stops.ids, device=logits.device)

    def _finish(self, state: _State, done: dict[tuple[int, int], Completion]) -> list[bool]:
        """Which rows end with the token just drawn; their completions go to `done`."""
        flags = []
        for row in state.rows:
            long_enough = len(row.ids) >= self.settings.min_new_tokens
            stopped = long_enough and self.stops.ends(row.ids)
            full = len(row.ids) >= self.settings.max_new_tokens
            if stopped or full:
                reason = StopReason.STOP if stopped else StopReason.LENGTH
                done[row.prompt, row.sample] = Completion(
                    ids=tuple(row.ids),
                    logps=tuple(row.logps),
                    stop=reason,
                    version=self.version,
                    sample=row.sample,
                    text=self.stops.text(row.ids),
                )
            flags.append(stopped or full)
        return flags

    def _keep(self, state: _State, finished: Sequence[bool]) -> _State | None:
        """Drop finished rows, and columns that are padding in all the others."""
        if not any(finished):
            return state
        alive = [i for i, flag in enumerate(finished) if not flag]
        if not alive:
            return None
        kept = torch.tensor(alive)
        start = state.start_B[kept]
        spare = int(start.min())
        select(state.cache, kept.to(self.model.device), first_column=spare)
        return _State(
            [state.rows[i] for i in alive],
            state.cache,
            state.hidden_BH[kept.to(self.model.device)],
            start - spare,
            state.columns - spare,
        )

    def _advance(self, state: _State) -> None:
        """Read the tokens just drawn."""
        device = self.model.device
        ids = torch.tensor([row.ids[-1] for row in state.rows], device=device)
        positions = (state.columns - state.start_B).to(device)
        state.columns += 1
        visible = None
        if bool(state.start_B.any()):
            visible = (torch.arange(state.columns) >= state.start_B[:, None]).to(device)
        if self.decoder is not None:
            state.hidden_BH = self.decoder.step(ids, positions, state.cache, visible)
            return
        mask = None if visible is None else visible.long()
        hidden = self._forward(ids[:, None], state.cache, mask, positions[:, None])
        state.hidden_BH = hidden[:, -1]

    def _forward(
        self, ids: Tensor, cache: Cache, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        hidden: Tensor = self.model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache},
        ).last_hidden_state
        return hidden

    @property
    def _layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)


def _copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with its parameters rounded; buffers stay exact (such as rotary frequencies)."""
    if has_adapter(model):
        return merged_copy(model, dtype=dtype)
    own = copy.deepcopy(model)
    for parameter in own.parameters():
        parameter.data = parameter.data.to(dtype)
    return own


def _join(parts: Sequence[_State]) -> _State:
    if len(parts) == 1:
        return parts[0]
    columns = max(part.columns for part in parts)
    return _State(
        [row for part in parts for row in part.rows],
        join([part.cache for part in parts]),
        torch.cat([part.hidden_BH for part in parts]),
        torch.cat([part.start_B + (columns - part.columns) for part in parts]),
        columns,
    )


def _finish_logits(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """The scalar steps that some models take after their output layer."""
    config = model.config.get_text_config().to_dict()
    if config.get("logit_scale"):
        logits = logits * float(config["logit_scale"])
    if config.get("logits_scaling"):
        logits = logits / float(config["logits_scaling"])
    cap = config.get("final_logit_softcapping")
    return logits if cap is None else (logits.float() / cap).tanh() * cap
