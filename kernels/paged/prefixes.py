"""Which tokens the requests of a batch share, as kernels are told: what `decode` takes as `prefixes`.

A group is some requests that begin with the same pages. Groups may be nested: a system's prompt that all share, in it a
document that some share, and so on. Each run of tokens between two such ends is an item of append.cu, read once for all
of its group; what a request has alone is an item, too.
"""

import numpy as np
import torch

from lab.arguments import expect_count

LEVELS = 4  # groups that a request is in, one in the other
LEAST = 128  # tokens that are worth a group, where groups are looked for
TO_THE_END = 2**31 - 1


class Prefixes:
    """Groups of a batch of requests, in tensors that stay the same when they are told anew: for a captured graph.

        prefixes = cache.shared_prefixes(requests)           # finds the groups
        out = decode(q, cache, requests, prefixes=prefixes)   # may be captured
        prefixes.update(requests)                             # other requests, as many as before, or other groups

    groups  [(places in the batch, tokens)] that were found or given, an outer one before those in it

    items, count, rows, levels: see kernels.paged.appending.shared_tensors. Lengths are read by the card, so what
    requests append needs no update; forks and new requests do, and requests that were freed.
    """

    def __init__(self, cache, requests, groups=None, *, levels=LEVELS):
        n = len(requests)
        expect_count("shared_prefixes", "levels", levels, low=0)
        self.cache, self.n_requests, self.most_levels = cache, n, levels
        rows = n * (levels + 1)  # and items, if each is of one request: groups that are given may be so small
        sizes = 5 * rows, 1, rows, rows
        self._ends = np.cumsum(sizes)
        self._words = torch.zeros(int(self._ends[-1]), dtype=torch.int32, device=cache.device)
        parts = torch.tensor_split(self._words, self._ends[:-1].tolist())
        self.items, self.count, self.rows = parts[0].view(-1, 5), parts[1], parts[2]
        self.levels = parts[3].view(n, levels + 1)
        self.update(requests, groups)

    def update(self, requests, groups=None, *, _where="shared_prefixes"):
        """Find groups, or take those given: [(requests, tokens)], tokens of whole pages that all of them begin with.
        requests: None in place of one is nobody.

        ValueError names the group that does not share what it claims, and the first page that differs."""
        self.cache._expect_no_capture(_where)
        pool, requests = self.cache.pool, list(requests)
        if len(requests) != self.n_requests:
            raise ValueError(f"{_where}: requests must be {self.n_requests}, as before, got {len(requests)}")
        known = iter(pool.expect(_where, [one for one in requests if one is not None]))
        slots = [-1 if one is None else next(known) for one in requests]
        if groups is None:
            found = find_groups(pool, slots, self.most_levels)
        else:
            found = check_groups(_where, pool, requests, slots, groups, self.most_levels)
        words = torch.from_numpy(self._told(pool.page_size, slots, found))
        self.slots, self.groups = tuple(slots), [(members, end * pool.page_size) for members, _, end in found]
        words = words.pin_memory() if self._words.is_cuda else words
        self._words.copy_(words, non_blocking=True)

    def _told(self, page_size, slots, found):
        words = np.zeros(self._ends[-1], np.int32)
        items, count, rows, levels = np.split(words, self._ends[:-1])
        items, levels = items.reshape(-1, 5), levels.reshape(self.levels.shape)
        levels[:], seen, at = -1, np.zeros(len(slots), np.int32), 0
        alone = [([place], 0, None) for place in range(len(slots))]
        for members, _, end in found:  # an outer one first
            for place in members:
                alone[place] = [place], end, None
        largest_first = sorted(found, key=lambda group: -len(group[0]))
        for number, (members, begin, end) in enumerate(largest_first + alone):
            tokens = TO_THE_END if end is None else (end - begin) * page_size
            items[number] = slots[members[0]], begin * page_size, tokens, at, len(members)
            rows[at : at + len(members)] = members
            levels[members, seen[members]] = range(at, at + len(members))
            seen[members] += 1
            at += len(members)
        count[:] = len(found) + len(alone)
        return words


def find_groups(pool, slots, levels):
    """[(places in the batch, first page, page behind the last)] of what at least two have in common; an outer one
    before those in it. Who shares a page shares all pages before it: requests get them by forks."""
    whole = [pool.lens[slot] // pool.page_size if slot >= 0 else 0 for slot in slots]  # full pages
    pages, found, least = [pool.pages[slot] if slot >= 0 else () for slot in slots], [], -(-LEAST // pool.page_size)

    def split(places, begin, end, level):
        """Of requests that share the pages up to `end`, of which those up to `begin` are groups' already."""
        first, low, high = pages[places[0]], end, min(whole[place] for place in places)
        while low < high:  # so many pages are common to all
            middle = (low + high + 1) // 2
            same = all(pages[place][middle - 1] == first[middle - 1] for place in places)
            low, high = (middle, high) if same else (low, middle - 1)
        if low - begin >= least:
            found.append((places, begin, low))
            begin, level = low, level + 1
        by_page = {}
        for place in places:
            if whole[place] > low:
                by_page.setdefault(pages[place][low], []).append(place)
        for some in by_page.values():
            if len(some) > 1 and level < levels:
                split(some, begin, low + 1, level)

    by_page = {}
    for place, count in enumerate(whole):
        if count:
            by_page.setdefault(pages[place][0], []).append(place)
    for some in by_page.values():
        if len(some) > 1:
            split(some, 0, 1, 0)
    return found


def check_groups(where, pool, requests, slots, groups, levels):
    """The same of groups that are given."""
    size, places, found = pool.page_size, {}, []
    for place, one in enumerate(requests):
        if one is not None:
            places.setdefault(one, []).append(place)
    for number, group in enumerate(groups):
        name = f"{where}: prefixes[{number}]"
        some, tokens = _pair(name, group)
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1 or tokens % size:
            raise ValueError(f"{name} must be of whole pages, a multiple of {size} tokens, got {tokens!r}")
        pool.expect(name, some)
        if missing := [n for n, one in enumerate(some) if one not in places]:
            raise ValueError(f"{name} must have requests of the batch, got one that is not, number {missing[0]}")
        members = sorted({place for one in some for place in places[one]})
        _expect_shared(name, pool, slots, members, tokens)
        if members:
            found.append((members, tokens // size))
    found.sort(key=lambda group: group[1])  # an outer one first
    ends, depth, told = [0] * len(slots), [0] * len(slots), []
    for members, end in found:
        begins = {ends[place] for place in members}
        if len(begins) > 1 or any(members[0] in some and not set(members) <= set(some) for some, _, _ in told):
            raise ValueError(
                f"{where}: prefixes must be nested or apart, got a group of {end * size} tokens of which some are in "
                "another that others are not in"
            )
        begin = begins.pop()
        if begin == end:
            raise ValueError(f"{where}: prefixes must not hold a request twice with {end * size} tokens")
        told.append((members, begin, end))
        for place in members:
            ends[place], depth[place] = end, depth[place] + 1
    if max(depth, default=0) > levels:
        raise ValueError(f"{where}: prefixes must be nested at most {levels} deep, got {max(depth)}")
    return told


def _pair(name, group):
    if not (isinstance(group, (list, tuple)) and len(group) == 2 and isinstance(group[0], (list, tuple))):
        raise TypeError(f"{name} must be (requests, tokens), got {group!r}")
    return group


def _expect_shared(name, pool, slots, members, tokens):
    count = tokens // pool.page_size
    for place in members:
        if (length := pool.lens[slots[place]]) < tokens:
            raise ValueError(
                f"{name} must share what it claims: requests[{place}] has {length} tokens, fewer than {tokens}"
            )
        first, mine = (pool.pages[slots[one]][:count] for one in (members[0], place))
        if first != mine:
            page = next(n for n, (a, b) in enumerate(zip(first, mine)) if a != b)
            raise ValueError(
                f"{name} must share what it claims, {tokens} tokens: page {page} is {mine[page]} for "
                f"requests[{place}], and {first[page]} for requests[{members[0]}]"
            )


def prefixes_of(where, cache, requests, asked):
    """The Prefixes that `decode` was asked for: one that is given, "shared", or groups. What was found is kept until a
    request is forked or freed."""
    if isinstance(asked, Prefixes):
        if asked.cache is not cache:
            raise ValueError(f"{where}: prefixes must be of the same cache")
        if isinstance(requests, torch.Tensor):
            if requests.dtype is not torch.int32 or requests.shape != (asked.n_requests,):
                raise TypeError(
                    f"{where}: requests must be int32 slots of the {asked.n_requests} requests of prefixes, got "
                    f"{requests.dtype} {tuple(requests.shape)}"
                )
        elif tuple(cache.pool.expect(where, requests)) != asked.slots:
            raise ValueError(f"{where}: prefixes must be of the same requests, in the same order")
        return asked
    if isinstance(asked, str) and asked != "shared" or not isinstance(asked, (str, list, tuple)):
        raise TypeError(f'{where}: prefixes must be "shared", [(requests, tokens)] or Prefixes, got {asked!r}')
    if isinstance(requests, torch.Tensor):
        raise TypeError(
            f"{where}: prefixes must be Prefixes (cache.shared_prefixes) where requests is a tensor of slots"
        )
    requests = cache._listed(where, requests)
    groups = None
    if asked != "shared":
        pairs = [_pair(f"{where}: prefixes[{number}]", group) for number, group in enumerate(asked)]
        groups = tuple((tuple(some), tokens) for some, tokens in pairs)
    key, version = (tuple(requests), groups), cache.pool.version
    found = cache._prefixes.get(key)
    if found is None or found[0] != version:
        if len(cache._prefixes) >= 16:
            cache._prefixes.clear()
        found = cache._prefixes[key] = version, Prefixes(cache, requests, groups)
    return cache._kept_for_graph(found[1])


__all__ = ["Prefixes", "prefixes_of"]
