"""The demo's input: the words of Python's standard library, module by module."""

import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cokernel.demo.kernel import ALIGNMENT, BLOCK, CHUNK, LANES, WIDTH

WORDS = 16_384
# Tests and demonstrations resemble each other in little but how they begin and end, and
# site-packages is not Python's own.
_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "turtledemo", "__pycache__")
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]+")
_COMMENT = re.compile(r"#.*")


@dataclass(frozen=True)
class Corpus:
    """Modules and their words.

    Attributes:
      names: the modules, as one would import them.
      bags: for each module, int32[n] with the ids of its words, 0 <= id < WORDS.
    """

    names: list[str]
    bags: list[np.ndarray]


@dataclass(frozen=True)
class Layout:
    """The bags of a corpus in one array, as the kernel wants them.

    Attributes:
      num_modules: the number of modules, filled up with empty ones to a multiple of BLOCK.
      ids: int32[n], each module's at a multiple of ALIGNMENT, CHUNK more behind the last.
      bounds: int32[num_modules, LANES]; start and number of a module's ids, then padding.
      owners: int32[n], the module of each id, `num_modules` where there is none.
    """

    num_modules: int
    ids: np.ndarray
    bounds: np.ndarray
    owners: np.ndarray


def _source_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            yield path


def _module_name(relative: Path) -> str:
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


def read_standard_library(limit: int | None = None) -> Corpus:
    """Reads the modules of the running Python, the first `limit` or all.

    Names in the code are the words. A word's id is a hash that is the same everywhere. Files that
    cannot be read as UTF-8 and those with fewer than 30 words are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    ids: dict[str, int] = {}
    names: list[str] = []
    bags: list[np.ndarray] = []
    for path in _source_files(root):
        if limit is not None and len(names) == limit:
            break
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        words = _NAME.findall(_COMMENT.sub("", text))
        if len(words) < 30:
            continue
        for word in words:
            if word not in ids:
                ids[word] = zlib.crc32(word.lower().encode()) % WORDS
        names.append(_module_name(path.relative_to(root)))
        bags.append(np.array([ids[word] for word in words], np.int32))
    return Corpus(names, bags)


def word_vectors(bags: Sequence[np.ndarray]) -> np.ndarray:
    """Returns float32[WORDS, WIDTH]: a random direction per word, longer for a rarer one.

    Sums of such vectors have nearly the angles that the sparse vectors of tf-idf weights have.
    """
    modules_with = np.zeros(WORDS)
    for bag in bags:
        modules_with[np.unique(bag)] += 1
    weights = np.log(len(bags) / np.maximum(modules_with, 1))
    directions = np.random.default_rng(0).standard_normal((WORDS, WIDTH), np.float32)
    return (directions * (weights / np.sqrt(WIDTH))[:, None]).astype(np.float32)


def lay_out(bags: Sequence[np.ndarray]) -> Layout:
    """Puts the bags of a corpus one after the other."""
    num_modules = -(-max(len(bags), 1) // BLOCK) * BLOCK
    sizes = np.zeros(num_modules, np.int64)
    sizes[: len(bags)] = [len(bag) for bag in bags]
    rooms = -(-sizes // ALIGNMENT) * ALIGNMENT
    starts = np.cumsum(rooms) - rooms
    length = int(rooms.sum()) + CHUNK
    ids = np.zeros(length, np.int32)
    owners = np.full(length, num_modules, np.int32)
    for module, bag in enumerate(bags):
        place = slice(starts[module], starts[module] + len(bag))
        ids[place] = bag
        owners[place] = module
    bounds = np.zeros((num_modules, LANES), np.int32)
    bounds[:, 0], bounds[:, 1] = starts, sizes
    return Layout(num_modules, ids, bounds, owners)


def assemble(tiles: np.ndarray, num_modules: int) -> np.ndarray:
    """Returns the whole symmetric matrix whose lower triangle the kernel returned in tiles."""
    matrix = np.zeros((num_modules, num_modules), np.float32)
    tile = iter(tiles)
    for row in range(0, num_modules, BLOCK):
        for column in range(0, row + 1, BLOCK):
            block = next(tile)
            matrix[column : column + BLOCK, row : row + BLOCK] = block.T
            matrix[row : row + BLOCK, column : column + BLOCK] = block
    return matrix
