"""What is slow to make, kept in files by the content of all that shaped it, for the processes to come.

    key = digest("ptx", source, ...)       of everything that shaped the result
    data = find(key)                       its bytes, or None
    keep(key, data)

The environment's SIMT_KEEP_IN names the folder; where it is not set or empty, nothing is kept. Processes may do this
at the same time: a file is put in its place whole, in one step, and is believed only if its checksum is right. What is
damaged or cannot be read counts as not there. The folder stays small: what was used longest ago goes first.
"""

import contextlib
import hashlib
import os
import tempfile
import time
import zlib
from pathlib import Path

FOLDER = "SIMT_KEEP_IN"
MOST = 256 * 2**20  # bytes in the folder, or a little more where several processes write
RECENT = 3600  # seconds: a use is noted when the last one noted is older
_room = {}  # folder -> bytes that this process may write before it looks at the folder again


def digest(*parts):
    """A key: the hash of texts."""
    return hashlib.sha256("\0".join(f"{len(part)} {part}" for part in parts).encode()).hexdigest()


def find(key):
    """The bytes kept for a key, or None."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    path = Path(folder, key)
    try:
        stored = path.read_bytes()
        data = zlib.decompress(stored[32:])
        if hashlib.sha256(data).digest() != stored[:32]:
            return None
        if time.time() - path.stat().st_mtime > RECENT:
            os.utime(path)
    except (OSError, zlib.error):
        return None
    return data


def keep(key, data):
    """Keep bytes for a key. Where that cannot be (no space left, a read-only folder), nothing happens."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    stored = hashlib.sha256(data).digest() + zlib.compress(data, 1)
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        if _room.get(folder, 0) < len(stored):
            _room[folder] = _make_room(folder)
        _room[folder] -= len(stored)
        handle, part = tempfile.mkstemp(suffix=".part", dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(stored)
            os.replace(part, Path(folder, key))
        except BaseException:
            os.unlink(part)
            raise


def _make_room(folder):
    """Where the folder is full, remove what was used longest ago, down to half. Returns the bytes that are free."""
    files = []
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError):  # another process makes room, too
            files.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    held = sum(size for _, size, _ in files)
    if held > MOST * 3 // 4:
        for _, size, path in sorted(files):
            if held <= MOST // 2:
                break
            held -= size
            with contextlib.suppress(OSError):
                os.unlink(path)
    return MOST - held
