"""The folder in which compiled kernels are kept between processes.

Any number of processes may use it at the same time. A file is written beside its place and renamed,
so that nobody reads half of one; it carries a digest of its contents, so that a damaged one is as
good as none.
"""

import hashlib
import os
import pathlib
import tempfile
import threading

CACHE_VARIABLE = "COKERNEL_CACHE"
# What the folder may hold, and how much of that is kept once it holds more.
LIMIT_BYTES = 1 << 29
KEPT_SHARE = 0.75
# The folder is looked through at a process's first write and then at every so many.
WRITES_BETWEEN_TRIMS = 64

_MAGIC = b"cokernel1\n"
_DIGEST_BYTES = 32
_trim_lock = threading.Lock()
_writes = 0


def cache_folder() -> pathlib.Path | None:
    """Where compiled kernels are kept between processes; None if COKERNEL_CACHE is set to the empty
    string.
    """
    setting = os.environ.get(CACHE_VARIABLE)
    if setting == "":
        return None
    if setting is not None:
        return pathlib.Path(setting)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "cokernel"


def read(name: str) -> bytes | None:
    """The contents stored under a name, or None if there are none that are whole."""
    folder = cache_folder()
    if folder is None:
        return None
    path = folder / name
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    header = len(_MAGIC) + _DIGEST_BYTES
    contents = stored[header:]
    if stored[:header] != _MAGIC + hashlib.sha256(contents).digest():
        return None
    try:
        # What was used last goes last.
        os.utime(path)
    except OSError:
        # Someone else's folder, or somebody has just removed the file: what was read is good.
        return contents
    return contents


def write(name: str, contents: bytes) -> None:
    """Stores contents under a name. A cache that can't be written to only costs time, so that is no
    error.
    """
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(_MAGIC + hashlib.sha256(contents).digest() + contents)
        os.replace(file.name, folder / name)
    except OSError:
        return
    _trim_sometimes(folder)


def _trim_sometimes(folder: pathlib.Path) -> None:
    global _writes
    with _trim_lock:
        is_time = _writes % WRITES_BETWEEN_TRIMS == 0
        _writes += 1
    if is_time:
        trim(folder, LIMIT_BYTES)


def trim(folder: pathlib.Path, limit: int) -> None:
    """Removes the files used longest ago if the folder holds more than `limit` bytes."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                # Another process has removed it.
                continue
            if entry.is_file(follow_symlinks=False):
                files.append((status.st_mtime_ns, status.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    if total <= limit:
        return
    for _, size, path in sorted(files):
        if total <= limit * KEPT_SHARE:
            return
        try:
            os.unlink(path)
        except OSError:
            continue
        total -= size
