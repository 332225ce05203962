"""What every kind of config.json is read by: its entries, or a sentence about what is wrong with one."""

import json
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OfAText:
    """What a folder says of texts, beside a model's sizes.

    context  tokens, the most                      stops  token ids that end a text
    tied     whether head and embedding are one    begin  the token id that begins one, or None
    """

    context: int
    tied: bool
    stops: tuple
    begin: int | None


class BadModel(ValueError):
    """A folder that holds no model that can be run; the message says what is wrong and where."""


def read_json(path):
    """What a JSON file holds, an object; BadModel if it is missing, unreadable or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadModel(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise BadModel(f"{path}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadModel(f"{path}: must hold a JSON object, got {type(found).__name__}")
    return found


def expect_size(folder, found, name):
    """The entry of that name, a whole number of 1 or more, or BadModel."""
    size = found.get(name)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise BadModel(f"{folder}/config.json: {name} must be a whole number, 1 or more, got {size!r}")
    return size


def positions(folder, found):
    """(theta, scaling) as ref.llm.rope_frequencies takes them."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}  # since transformers 5, and before
    theta = rope.get("rope_theta", found.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        if kind == "default":
            return float(theta), None
        if kind == "linear":
            return float(theta), ("linear", float(rope["factor"]))
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return float(theta), ("llama3", *(float(rope[name]) for name in names))
    except KeyError as missing:
        raise BadModel(f"{folder}/config.json: rope scaling {kind!r} must have {missing}") from None
    raise BadModel(f"{folder}/config.json: rope scaling must be default, linear or llama3, got {kind!r}")


def ends(folder, found):
    """(ids that end a text, the id that begins one): generation_config.json says it, where there is one."""
    path = folder / "generation_config.json"
    if path.exists():
        found = {**found, **{k: v for k, v in read_json(path).items() if v is not None}}
    stops, begin = found.get("eos_token_id"), found.get("bos_token_id")
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    return tuple(stops), begin[0] if isinstance(begin, list) else begin
