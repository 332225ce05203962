"""Several texts at once: who has ended leaves, and who waits enters (continuous batching).

Each text is what it would be alone: its tokens are chosen from its own logits, by its own seed and its own positions.
Where texts lie, and what a step of all of them is, a `places` object says:

    places.most                     texts at a time
    places.fits(tokens)             whether a text of so many tokens has room now
    places.enter(ids, tokens)       (key, logits (vocab,)): a text's first tokens; it will have so many in all
    places.step([(key, token)])     logits (texts, vocab): each of these texts goes on by a token
    places.leave(key)               its room is free

    Turns     on the processor: a cache for each text, and a step of each in turn
    Pages     on a card: models/paged.py
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from models.sampling import choose, uniform


@dataclass
class Text:
    """A text to be written: its number, its first tokens, how many more at most, and its seed."""

    number: int
    ids: list
    most: int
    seed: int
    key: object = None
    written: int = field(default=0)
    token: int = -1


def write(places, texts, context, stops, sampling):
    """An iterator of (number, token id) of texts, in order of their steps.

    context   tokens that a text may hold, at most
    stops     ids that end a text, and are not given out
    sampling  (temperature, top_k, top_p), of all
    """
    waiting, running = deque(text for text in texts if text.most), []
    while waiting or running:
        while waiting and len(running) < places.most and places.fits(tokens_of(waiting[0], context)):
            text = waiting.popleft()
            text.key, logits = places.enter(text.ids, tokens_of(text, context))
            running.append(text)
            yield from _choose(places, running, [text], logits[None], context, stops, sampling)
        if running:
            now = list(running)
            logits = places.step([(text.key, text.token) for text in now])
            yield from _choose(places, running, now, logits, context, stops, sampling)


def tokens_of(text, context):
    """What the cache will hold of a text, at most: its last token is never read."""
    return min(len(text.ids) + text.most - 1, context)


def _choose(places, running, texts, logits, context, stops, sampling):
    """The next token of each of these; who has ended leaves."""
    temperature = sampling[0]
    likeliest = logits.argmax(1).tolist() if temperature == 0 else None  # one look at the card for all
    for n, text in enumerate(texts):
        if likeliest is None:
            place = uniform(text.seed, len(text.ids) + text.written)
            text.token = int(choose(logits[n], place, *sampling))
        else:
            text.token = likeliest[n]
        text.written += 1
        ended = text.token in stops
        full = text.written == text.most or len(text.ids) + text.written > context
        if ended or full:
            places.leave(text.key)
            running.remove(text)
        if not ended:
            yield text.number, text.token


class Turns:
    """Texts on the processor take turns: a step reads the weights for each of them, as for one text alone."""

    def __init__(self, engine, most):
        self.engine, self.most = engine, most
        engine.reset()
        self.text = engine.text

    def fits(self, tokens):
        return True

    def enter(self, ids, tokens):
        self._expect_ours()
        self.engine.reset()
        self.text = self.engine.text
        logits = self.engine.prefill(torch.tensor(ids))[0]
        return self.engine.cache, logits

    def step(self, texts):
        found = []
        for cache, token in texts:
            self._expect_ours()
            self.engine.cache = cache
            found.append(self.engine.step(token))
        return torch.stack(found)

    def leave(self, key):
        pass

    def _expect_ours(self):
        expect_ours(self.engine, self.text)


def expect_ours(engine, text):
    """RuntimeError where another text has begun on this engine."""
    if engine.text is not text:
        raise RuntimeError("generate_several: this model has begun another text since")
