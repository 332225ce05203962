"""What a server did over time: when its tokens came, what ran, what room was taken; and the figures of that."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Report:
    """What a simulation saw.

    tokens   for each request when its tokens came, s: arrays
    steps    begin, end (s), requests that run and that wait, tokens held, tokens of room taken: (steps, 6)
    begun_again  how often a request gave up its room, to begin again later
    """

    requests: list
    tokens: list
    steps: np.ndarray
    begun_again: int

    @property
    def seconds(self):
        """From 0 to the last token."""
        return float(self.steps[-1, 1]) if len(self.steps) else 0.0

    @property
    def throughput(self):
        """Tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds if len(self.steps) else 0.0

    @property
    def first(self):
        """From arrival to the first token, s: (requests,)."""
        return np.array([times[0] - request.arrives for request, times in zip(self.requests, self.tokens)])

    @property
    def between(self):
        """From each token to the next one of the same request, s: all in one array."""
        return np.concatenate([np.zeros(0), *map(np.diff, self.tokens)])

    @property
    def in_system(self):
        """From arrival to the last token, s: (requests,)."""
        return np.array([times[-1] - request.arrives for request, times in zip(self.requests, self.tokens)])

    def mean(self, column):
        """The mean over time of a column of steps: 2 run, 3 wait, 4 held, 5 room."""
        if not len(self.steps):
            return 0.0
        return float(np.diff(self.steps[:, :2])[:, 0] @ self.steps[:, column]) / self.seconds

    @property
    def wasted(self):
        """Share of the room taken, over time, that held no token."""
        taken = self.mean(5)
        return 1 - self.mean(4) / taken if taken else 0.0

    @property
    def most(self):
        """Requests that ran at a time, at most."""
        return int(self.steps[:, 2].max(initial=0))

    def row(self):
        """The figures of a table: {name: number}."""
        gaps, first = self.between, self.first
        middle, late = (1e3 * np.quantile(gaps, q) if len(gaps) else 0.0 for q in (0.5, 0.99))
        return {
            "tokens/s": self.throughput,
            "between tokens, median, ms": middle,
            "p99, ms": late,
            "to the first token, median, s": float(np.median(first)) if len(first) else 0.0,
            "requests at a time, most": self.most,
            "room without tokens, %": 100 * self.wasted,
        }
