"""Procedural documents: a header with a random record, then that record in several notations.

What makes them good for experiments: a small model learns them in minutes; most of an answer follows from the
header, so long drafts can be right; and the values must be copied, so no answer runs into a loop.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

_SYLLABLES = [
    "ba",
    "ko",
    "ri",
    "to",
    "su",
    "ne",
    "la",
    "mi",
    "du",
    "ve",
    "ga",
    "po",
    "shi",
    "ren",
    "fal",
    "zor",
]
_TAGS = ["red", "deep", "quick", "old", "north", "small", "loud", "dry", "late", "round", "sharp", "plain"]
NOTATIONS = ("sql", "json", "code", "xml", "text")


class Record(NamedTuple):
    """One record and the notations it is asked for, in order."""

    name: str
    city: str
    age: int
    score: float
    tags: tuple[str, ...]
    order: tuple[str, ...]

    @property
    def header(self) -> str:
        """The prompt."""
        values = (
            f"name={self.name} city={self.city} age={self.age} score={self.score} tags={','.join(self.tags)}"
        )
        return f"{values} order={','.join(self.order)}"

    @property
    def body(self) -> str:
        """The answer."""
        return "\n".join(_WRITERS[notation](self) for notation in self.order)


def records(seed: int) -> Iterator[Record]:
    """Endless records, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        yield Record(
            name=f"{_word(rng)} {_word(rng)}",
            city=_word(rng),
            age=rng.randint(18, 90),
            score=rng.randint(10, 999) / 10,
            tags=tuple(rng.sample(_TAGS, rng.randint(1, 3))),
            order=tuple(rng.sample(NOTATIONS, rng.randint(2, 4))),
        )


def _word(rng: random.Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4))).capitalize()


def _sql(r: Record) -> str:
    tags = " ".join(r.tags)
    return (
        "INSERT INTO people (name, city, age, score, tags)\n"
        f"VALUES ('{r.name}', '{r.city}', {r.age}, {r.score}, '{tags}');"
    )


def _json(r: Record) -> str:
    tags = ", ".join(f'"{tag}"' for tag in r.tags)
    return f'{{"name": "{r.name}", "city": "{r.city}", "age": {r.age}, "score": {r.score}, "tags": [{tags}]}}'


def _code(r: Record) -> str:
    first = r.name.split()[0].lower()
    lines = [f'{first} = Person("{r.name}", age={r.age})', f'{first}.move_to("{r.city}")']
    lines += [f'{first}.add_tag("{tag}")' for tag in r.tags]
    return "\n".join([*lines, f"{first}.set_score({r.score})"])


def _xml(r: Record) -> str:
    tags = "".join(f"<tag>{tag}</tag>" for tag in r.tags)
    return (
        f"<person><name>{r.name}</name><city>{r.city}</city>"
        f"<age>{r.age}</age><score>{r.score}</score>{tags}</person>"
    )


def _text(r: Record) -> str:
    verdict = "well above" if r.score >= 60 else "near" if r.score >= 30 else "below"
    return (
        f"{r.name} lives in {r.city}, is {r.age} years old and is described as {' and '.join(r.tags)}. "
        f"The score of {r.score} is {verdict} the average."
    )


_WRITERS = {"sql": _sql, "json": _json, "code": _code, "xml": _xml, "text": _text}
