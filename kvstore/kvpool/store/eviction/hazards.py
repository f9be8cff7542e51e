"""When chunks of a class are used again: hazards learned from uses, and the index made of them.

Age is counted in *references*, the chunks used or stored in the whole store since an entry's last
use: a clock that neither stands still nor depends on anyone's unit of time. (Measured: as good as
seconds on the public traces; see `docs/eviction.md`.)

Per class and age bucket there are hits and exposure, so hazard = hits / exposure. What a class has
not lived through it inherits: unseen ages decay as 1/age, and a class starts from what all classes,
those of its kind and those of its hint have in common::

    hazard(class, age) ~ pooled(age) x ratio(kind, age) x ratio(hint, age), shrunk to what was seen

The index of an entry is Gittins': the best rate of reuse per reference of holding it that any
horizon offers, ``max over k of P(reuse in [a, k]) / E[references held in [a, k]]``. (J. Gittins,
"Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41, 1979.)
"""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

KINDS = 18
"""Classes without hints: 6 breadths of the request x 3 touch counts."""
HINTS = 4
CLASSES = HINTS * KINDS
BUCKETS = 40
GROWTH = 1.32
FIRST_BUCKET = 5.0
"""References; with the growth, the last of 40 buckets begins at 1.9e5 times that."""
POOLED_WEIGHT = 20.0
CLASS_WEIGHT = 100.0
"""Uses that the prior of a hazard counts for: of all classes together, of one class. Chunks of one
request are used together, so that a hundred uses may be a handful of requests."""
_FIRST_HAZARD = 0.3 / FIRST_BUCKET
_SMOOTHING = np.exp(-0.5 * np.arange(-1, 2) ** 2)
_FORMAT = 2

Floats = NDArray[np.float64]
Classes = NDArray[np.uint8]

LIMITS: Floats = np.concatenate([[0.0], FIRST_BUCKET * GROWTH ** np.arange(BUCKETS)])
"""Bucket b holds the ages in ``[LIMITS[b], LIMITS[b + 1])``; the last one all that is older."""
WIDTHS: Floats = np.diff(LIMITS)
FIRST_AGES = np.ceil(LIMITS[1:-1]).astype(np.int64)
"""Of all buckets but the first."""


def buckets_of(ages: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bucket of each age."""
    found: NDArray[np.int64] = FIRST_AGES.searchsorted(ages, "right")
    return found


class Hazards:
    """Learns from ends of observation, and ranks (class, age)."""

    def __init__(self) -> None:
        self.hits = np.zeros((CLASSES, BUCKETS))
        self._ends = np.zeros((CLASSES, BUCKETS))
        self._spent = np.zeros((CLASSES, BUCKETS))  # references in the bucket of the end
        self.references = 0
        """In which all this was seen."""
        self.index = np.tile(1.0 / LIMITS[1:], (CLASSES, 1))
        """Shape (CLASSES, BUCKETS); the higher, the more an entry is worth keeping."""

    @property
    def observed(self) -> int:
        """Uses that it has learned from."""
        return int(self.hits.sum())

    def observe(self, classes: Classes, ages: NDArray[np.int64], *, hit: bool) -> None:
        """Entries of these classes were used again (`hit`), or lost from sight, at these ages."""
        cells, ends, spent = _ends(classes, ages)
        self._ends += ends
        self._spent += spent
        if hit:
            self.hits += np.bincount(cells, minlength=CLASSES * BUCKETS).reshape(CLASSES, BUCKETS)

    def rank(self, classes: Classes, ages: NDArray[np.int64], weights: Floats) -> None:
        """Recomputes `index`; takes a few milliseconds.

        The arguments sample the entries that wait for their next use: each stands for as many as
        its weight says.
        """
        _, waiting, waited = _ends(classes, ages, weights)
        ends = self._ends + waiting
        spent = self._spent + waited
        beyond = ends.sum(axis=1, keepdims=True) - ends.cumsum(axis=1)
        exposure = spent + beyond * WIDTHS
        self.index = gittins(_hazards(self.hits, exposure))

    def dump(self) -> bytes:
        """All that was learned, as JSON."""
        tables = {"hits": self.hits, "ends": self._ends, "spent": self._spent}
        shape = {"format": _FORMAT, "classes": CLASSES, "buckets": BUCKETS}
        shape["references"] = self.references
        cells = {name: np.round(table, 1).tolist() for name, table in tables.items()}
        return json.dumps(shape | cells).encode()

    def load(self, dumped: bytes) -> None:
        """Starts from what `dump` gave. `ValueError` for anything else."""
        try:
            tables = json.loads(dumped)
            shape = (tables["format"], tables["classes"], tables["buckets"])
            if shape != (_FORMAT, CLASSES, BUCKETS):
                raise ValueError(f"tables of another format: {shape}")
            hits, ends, spent = (_table(tables[name]) for name in ("hits", "ends", "spent"))
            references = int(tables["references"])
            if references < 0:
                raise ValueError(f"{references} references")
        except (KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"these are no hazard tables: {error!r}") from error
        self.hits, self._ends, self._spent = hits, ends, spent
        self.references = references
        self.rank(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0))


def gittins(hazards: Floats) -> Floats:
    """The index of each class (row) at the beginning of each bucket (column).

    Horizons become longer bucket by bucket: what is expected of a bucket and all up to a horizon
    is what the bucket gives, and what those behind it give to who lasts that long.
    """
    hazards = np.ascontiguousarray(hazards.T)  # a row per bucket: faster
    reused = -np.expm1(-hazards * WIDTHS[:, None])  # probability within it, given its beginning
    spent = reused / hazards
    lasting = 1 - reused
    uses, held, best = reused, spent, reused / spent
    for longer in range(1, BUCKETS):
        uses = reused[:-longer] + lasting[:-longer] * uses[1:]
        held = spent[:-longer] + lasting[:-longer] * held[1:]
        np.maximum(best[:-longer], uses / held, out=best[:-longer])
    return np.ascontiguousarray(best.T)


def _ends(
    classes: Classes, ages: NDArray[np.int64], weights: Floats | None = None
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """The flat cell of each observation; per cell their number and the references spent in it."""
    buckets = buckets_of(ages)
    cells = classes.astype(np.int64) * BUCKETS + buckets
    size, shape = CLASSES * BUCKETS, (CLASSES, BUCKETS)
    rests = ages - LIMITS[buckets]
    ends = np.bincount(cells, weights, minlength=size).reshape(shape)
    spent = np.bincount(
        cells, rests if weights is None else rests * weights, minlength=size
    ).reshape(shape)
    return cells, ends.astype(np.float64), spent.astype(np.float64)


def _hazards(hits: Floats, exposure: Floats) -> Floats:
    """Hazard per class and bucket, each level shrunk to the one above it."""
    pooled = _shrunk(hits.sum(0), exposure.sum(0), None, POOLED_WEIGHT)
    shared = _shrunk(_shared(hits), _shared(exposure), pooled, CLASS_WEIGHT)
    hints, kinds = shared[:HINTS, None], shared[None, HINTS:]
    expected = (hints * kinds / pooled).reshape(hits.shape)
    smooth_hits, smooth_exposure = _smooth(hits), _smooth(exposure)
    out: Floats = (smooth_hits + CLASS_WEIGHT) / (smooth_exposure + CLASS_WEIGHT / expected)
    return out


def _shared(table: Floats) -> Floats:
    """What the classes of each hint, then of each kind, have together."""
    cube = table.reshape(HINTS, KINDS, BUCKETS)
    return np.concatenate([cube.sum(1), cube.sum(0)])


def _shrunk(hits: Floats, exposure: Floats, above: Floats | None, weight: float) -> Floats:
    """Hazards along age, each bucket's prior being that of the bucket before.

    With `above`, the *ratio* to it is what goes on from bucket to bucket; without, hazards decay
    as 1/age where nothing was seen.
    """
    hits, exposure = _smooth(hits), _smooth(exposure)
    out = np.empty_like(hits)
    ratio = np.ones(hits.shape[:-1])
    prior = np.full(hits.shape[:-1], _FIRST_HAZARD * GROWTH)
    for b in range(BUCKETS):
        prior = prior / GROWTH if above is None else above[b] * ratio
        prior = out[..., b] = (hits[..., b] + weight) / (exposure[..., b] + weight / prior)
        if above is not None:
            ratio = prior / above[b]
    return out


def _smooth(table: Floats) -> Floats:
    """Each bucket with some of its neighbours."""
    left, middle, right = _SMOOTHING
    out: Floats = middle * table
    out[..., 1:] += left * table[..., :-1]
    out[..., :-1] += right * table[..., 1:]
    return out


def _table(cells: object) -> Floats:
    table = np.array(cells, np.float64)
    if table.shape != (CLASSES, BUCKETS) or not (np.isfinite(table) & (table >= 0)).all():
        raise ValueError(f"a table of shape {table.shape}")
    return table
