"""Several drafters and block sizes beside plain decoding of a target: what was measured, answer by answer."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np

from dscout_jax import ops
from dscout_jax.decode import Decoder, Generation, Request, Sampling, mat, seed_of, serve
from dscout_jax.models import Target, target_head
from infer import latency
from infer.contestants import Contestant, called, drafter_of
from infer.figures import COUNTS, Record, counts, figures, ratio, speed
from infer.fingerprint import digest
from infer.records import Records

Asks = Mapping[int, Sequence[int]]
"""Ids of the prompts of one turn, by the number of the conversation."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """What all contestants share: budget of an answer, how it is drawn, answers decoded side by side.

    sampling: its seed is a job's: each prompt's own follows from it.
    plain_rows: the form of plain decoding; None: the faster of 1 and 2.
    """

    max_new_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    concurrency: int = 1
    plain_rows: int | None = None


class Contest:
    """Measures what the records lack.

    A key is (dataset, conversation, turn, mode, *contestant), the mode one of plain, speculative,
    same_program and divergence; (dataset, turn, "queue", first conversation, mode, *contestant) are the
    seconds of a whole queue. Plain decoding has no contestant: it is one baseline for all. A record counts
    while it is of the very prompt that is asked. `session` is when the contest began that wrote it.
    """

    def __init__(self, records: Records, decoders: Mapping[Contestant, Decoder], terms: Terms) -> None:
        self.records, self.decoders, self.terms = records, decoders, terms
        some = next(iter(decoders.values()))
        wanted = (1, 2) if terms.plain_rows is None else (terms.plain_rows,)
        self._forms = {rows: some.plain(rows) for rows in wanted}
        self._plain_rows = terms.plain_rows
        self._gap = make_gap(some.target)
        self._target_params = some.weights.target
        self._warm: set[tuple] = set()
        self._measured = 0
        self._session = datetime.now(UTC).isoformat()

    def plain_rows(self, prompt: Sequence[int]) -> int:
        """The faster form of plain decoding, chosen once; a resumed run keeps the choice of its records."""
        if self._plain_rows is None and ("plain_rows",) in self.records:
            self._plain_rows = self.records[("plain_rows",)]["rows"]
        if self._plain_rows is None:
            times = {rows: [] for rows in self._forms}
            batch, tokens = [prompt] * self.terms.concurrency, min(24, self.terms.max_new_tokens)
            for _ in range(4):
                for rows, decoder in self._forms.items():
                    g, *_ = decoder.generate(batch, tokens, stop_ids=[[]] * len(batch))
                    times[rows].append(g.decode_seconds)
            # The first of each warms up.
            best = {rows: min(seconds[1:]) for rows, seconds in times.items()}
            self._plain_rows = min(best, key=best.get)
            self.records.add(("plain_rows",), {"rows": self._plain_rows, "tokens": tokens, "seconds": best})
        return self._plain_rows

    def decoder(self, at: Contestant, prompt: Sequence[int]) -> Decoder:
        """What answers for a contestant; a block of one slot is the baseline itself, in the form it has."""
        return self._forms[self.plain_rows(prompt)] if at[1] == 1 else self.decoders[at]

    def measure(self, dataset: str, turn: int, asks: Asks) -> None:
        """Measures every mode of these prompts that is missing, the modes next to one another in time.

        Side by side as one queue where concurrency says so, else one by one; callers then give one at a time.
        """
        some = next(iter(asks.values()))
        jobs = [(("plain",), self._forms[self.plain_rows(some)])]
        jobs += [(("speculative", *at), self.decoder(at, some)) for at in self.decoders]
        jobs = [job for job in jobs if not self._has(dataset, turn, asks, job[0])]
        # Every other time in the other order, so that drift of the machine favours no mode.
        for mode, decoder in jobs if self._measured % 2 == 0 else jobs[::-1]:
            self._record(dataset, turn, asks, mode, decoder)
        self._measured += 1
        for at in self.decoders:
            for index, prompt in asks.items():
                self._compare(dataset, index, turn, prompt, at)

    def check_same_program(self, dataset: str, turn: int, asks: Asks, at: Contestant) -> None:
        """Decodes prompts plainly through the program that speculates."""
        mode = ("same_program", *at)
        if not self._has(dataset, turn, asks, mode):
            decoder = self.decoder(at, next(iter(asks.values())))
            self._record(dataset, turn, asks, mode, decoder, live_slots=1)

    def _has(self, dataset: str, turn: int, asks: Asks, mode: tuple) -> bool:
        known = all(self._of((dataset, index, turn, *mode), prompt) for index, prompt in asks.items())
        if self.terms.concurrency == 1:
            return known
        # A queue is one measurement: with other prompts in it, it is another.
        key = (dataset, turn, "queue", next(iter(asks)), *mode)
        if not known or key not in self.records:
            return False
        queue = self.records[key]
        return (queue["asked"], queue["prompts"]) == ([*asks], digest([*asks.values()]))

    def _of(self, key: tuple, prompt: Sequence[int]) -> bool:
        """Whether there is a record of this very prompt: a file may be edited, or another of its name."""
        return key in self.records and self.records[key]["prompt"] == digest(prompt)

    def _warm_up(self, decoder: Decoder, requests: Sequence[Request]) -> None:
        """A program's first run is a slow one."""
        if self.terms.concurrency == 1:
            if (id(decoder),) not in self._warm:
                [request] = requests
                decoder.generate([request.prompt], min(8, self.terms.max_new_tokens))
                self._warm.add((id(decoder),))
            return
        slots = min(self.terms.concurrency, len(requests))
        key = (id(decoder), slots, decoder.shape(requests))
        if key not in self._warm:
            # Every slot has a short answer, and the first that ends makes room; the longest request, with its
            # whole budget, gives the caches the size that they will have.
            brief = min(2, self.terms.max_new_tokens)
            short = [dataclasses.replace(r, max_new_tokens=brief) for r in requests[:slots]]
            list(serve(decoder, [*short, max(requests, key=lambda r: len(r.prompt))], slots))
            self._warm.add(key)

    def _record(
        self,
        dataset: str,
        turn: int,
        asks: Asks,
        mode: tuple,
        decoder: Decoder,
        live_slots: int | None = None,
    ) -> None:
        draws = self.terms.sampling
        seeds = {i: draws._replace(seed=seed_of(draws.seed, prompt)) for i, prompt in asks.items()}
        requests = decoder.requests([*asks.values()], self.terms.max_new_tokens, sampling=[*seeds.values()])
        self._warm_up(decoder, requests)
        answers = self._answers(decoder, requests, live_slots)
        for (index, prompt), g in zip(asks.items(), answers, strict=True):
            row = {
                "session": self._session,
                "prompt": digest(prompt),
                "prompt_tokens": len(prompt),
                "tokens": g.tokens,
                "accepted": g.accepted,
                "finish": g.finish,
                "prefill_seconds": g.prefill_seconds,
                "decode_seconds": g.decode_seconds,
            }
            self.records.add((dataset, index, turn, *mode), row)
        if self.terms.concurrency > 1:
            seconds = max(g.done_seconds for g in answers)
            key = (dataset, turn, "queue", next(iter(asks)), *mode)
            row = {"asked": [*asks], "prompts": digest([*asks.values()]), "seconds": seconds}
            self.records.add(key, row)

    def _answers(
        self, decoder: Decoder, requests: Sequence[Request], live_slots: int | None
    ) -> list[Generation]:
        if self.terms.concurrency > 1:
            served = dict(serve(decoder, requests, self.terms.concurrency, live_slots))
            return [served[i] for i in range(len(requests))]
        return [
            decoder.generate([r.prompt], r.max_new_tokens, sampling=r.sampling, live_slots=live_slots)[0]
            for r in requests
        ]

    def _compare(self, dataset: str, index: int, turn: int, prompt: Sequence[int], at: Contestant) -> None:
        """Where the two outputs part; for argmaxes, how close the two best logits were there."""
        key = (dataset, index, turn, "divergence", *at)
        plain = self.records[dataset, index, turn, "plain"]["tokens"]
        speculative = self.records[dataset, index, turn, "speculative", *at]["tokens"]
        if plain == speculative:
            return
        place = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
        place = min(len(plain), len(speculative)) if place is None else place
        if self._of(key, prompt) and self.records[key]["at"] == place:
            return
        gap = None
        if not self.terms.sampling.temperature:
            gap = self._gap(self._target_params, [*prompt, *plain[:place]])
        self.records.add(key, {"prompt": digest(prompt), "at": place, "gap": gap})

    def line(self, dataset: str, turn: int, indices: Sequence[int]) -> str:
        """Figures of these prompts for the log."""

        def all_of(*mode: str | int) -> list[Record]:
            return [self.records[dataset, i, turn, *mode] for i in indices]

        plain = all_of("plain")
        parts = [f"plain {speed(plain):.1f} tok/s"]
        for at in self.decoders:
            spec = all_of("speculative", *at)
            odd = sum(a["tokens"] != b["tokens"] for a, b in zip(plain, spec, strict=True))
            same = f"{odd} differ" if odd else "same"
            parts.append(
                f"{called(at)} {speed(spec):.1f} (MAT {mat([r['accepted'] for r in spec]):.2f}, {same})"
            )
        return ", ".join(parts)

    def parts(self, prompt_tokens: int, calls: int, repeats: int = 3) -> None:
        """Times draft, verify and a whole round of each contestant, once; programs of their own, in turns."""
        missing = {at: d for at, d in self.decoders.items() if ("parts", *at) not in self.records}
        timers: dict[tuple, Callable[[], float]] = {}
        for at in missing:
            prompts = latency.made_up(self.decoders[at], self.terms.concurrency, prompt_tokens)
            decoder = self.decoder(at, prompts[0])
            parts = latency.part_timers(decoder, prompts, calls, drafts=at[1] > 1)
            timers |= {(at, name): t for name, t in parts.items()}
        samples = latency.take_turns(timers, repeats)
        for at, decoder in missing.items():
            ms = {f"{name}_ms": statistics.median(samples[at, name]) for (a, name) in timers if a == at}
            ms = {"draft_ms": 0.0} | ms
            # With several sizes a round verifies at whichever holds what is sent: no one verify, no rest.
            rest = ms["round_ms"] - ms["draft_ms"] - ms["verify_ms"] if len(decoder.sizes) == 1 else None
            self.records.add(("parts", *at), ms | {"other_ms": rest, "prompt_tokens": prompt_tokens})

    def row(self, dataset: str, asked: Sequence[tuple[int, Asks]], at: Contestant) -> dict[str, Any]:
        """A dataset's figures of one contestant, over (turn, prompts) as they were measured."""
        prompts = {(i, turn): prompt for turn, asks in asked for i, prompt in asks.items()}
        places = [*prompts]

        def all_of(*mode: str | int) -> list[Record]:
            return [self.records[dataset, i, turn, *mode] for i, turn in places]

        def queue(*mode: str | int) -> float:
            keys = ((dataset, turn, "queue", next(iter(asks)), *mode) for turn, asks in asked)
            return sum(self.records[key]["seconds"] for key in keys)

        plain, spec = all_of("plain"), all_of("speculative", *at)
        queued = self.terms.concurrency > 1
        queues = (queue("plain"), queue("speculative", *at)) if queued else None
        apart = [
            self.records[dataset, i, turn, "divergence", *at]
            for (i, turn), a, b in zip(places, plain, spec, strict=True)
            if a["tokens"] != b["tokens"]
        ]
        gaps = [part["gap"] for part in apart if part["gap"] is not None]
        row = {
            "drafter": drafter_of(at),
            "block_size": at[1],
            "concurrency": self.terms.concurrency,
            "plain_rows": self._plain_rows,
            "plain_measured_beside": sum(
                a["session"] == b["session"] for a, b in zip(plain, spec, strict=True)
            ),
            **figures(plain, spec, [i for i, _ in places], at[1], queues),
            "divergence_rate": len(apart) / len(places),
            "first_divergence_min": min((part["at"] for part in apart), default=None),
            "first_divergence_median": float(np.median([part["at"] for part in apart])) if apart else None,
            "logit_gap_median": float(np.median(gaps)) if gaps else None,
            "logit_gap_max": max(gaps) if gaps else None,
            # What `compare` pairs by.
            "answers": {
                "conversation": [i for i, _ in places],
                "turn": [turn for _, turn in places],
                "prompt": [r["prompt"] for r in plain],
                **dict(zip(COUNTS, map(list, zip(*counts(plain, spec), strict=True)), strict=True)),
            },
        }
        if ("parts", *at) in self.records:
            timed = self.records[("parts", *at)]
            row |= {name: timed[name] for name in ("draft_ms", "verify_ms", "other_ms")}
            row["parts_prompt_tokens"] = timed["prompt_tokens"]
        same_program = ((dataset, i, turn, "same_program", *at) for i, turn in places)
        if all(map(self._of, same_program, prompts.values())):
            same = all_of("same_program", *at)
            equal = sum(a["tokens"] == b["tokens"] for a, b in zip(same, spec, strict=True))
            slower = speed(plain), speed(same)
            row |= {"identical_same_program": equal, "same_program_cost": ratio(*slower)}
        return row


def make_gap(target: Target, bucket: int = 256) -> Callable[[Any, Sequence[int]], float]:
    """gap(params, ids): the best logit after `ids` minus the second best, by one full forward."""

    @jax.jit
    def two_best(params, tokens_1xT, last):
        hidden = target.apply({"params": params}, tokens_1xT).hidden[0, last]
        return jax.lax.top_k(ops.head_logits(hidden[None], target_head(params))[0], 2)[0]

    def gap(params: Any, ids: Sequence[int]) -> float:
        tokens = np.zeros((1, -(-len(ids) // bucket) * bucket), np.int32)
        tokens[0, : len(ids)] = ids
        first, second = two_best(params, tokens, len(ids) - 1)
        return float(first - second)

    return gap
