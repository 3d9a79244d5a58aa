"""The folder of compiled kernels: whole files or none, within a bound, whoever writes."""

import os
import subprocess
import sys

import pytest

from cokernel.compiler import cache


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every test has a folder of its own, which does not exist at first."""
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_what_was_written_is_read_and_nothing_else(folder):
    assert cache.read("one") is None
    cache.write("one", b"contents")
    assert cache.read("one") == b"contents"
    assert cache.read("other") is None
    assert [path.name for path in folder.iterdir()] == ["one"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_as_good_as_none(folder, damage):
    cache.write("one", bytes(range(200)))
    stored = (folder / "one").read_bytes()
    flipped = stored[:100] + bytes([stored[100] ^ 1]) + stored[101:]
    contents = {"cut": stored[:-1], "flipped": flipped, "empty": b"", "foreign": bytes(200)}
    (folder / "one").write_bytes(contents[damage])
    assert cache.read("one") is None
    cache.write("one", b"again")
    assert cache.read("one") == b"again"


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "file" / "kernels"))
    cache.write("one", b"contents")
    assert cache.read("one") is None


def test_an_empty_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, "")
    cache.write("one", b"contents")
    assert cache.cache_folder() is None
    assert cache.read("one") is None


def test_the_files_used_longest_ago_go_first(folder):
    for age, name in enumerate("abcdefgh"):
        cache.write(name, bytes(1000))
        os.utime(folder / name, (1_000_000 - age, 1_000_000 - age))
    assert cache.read("h") is not None  # The oldest, which has been used again now.
    cache.trim(folder, 6000)
    left = {path.name for path in folder.iterdir()}
    assert left == {"h", "a", "b", "c"}


def test_processes_that_write_and_read_at_once_see_whole_files(folder):
    program = (
        "from cokernel.compiler import cache\n"
        "import sys\n"
        "mine = sys.argv[1].encode() * 20000\n"
        "for _ in range(100):\n"
        "    cache.write('one', mine)\n"
        "    found = cache.read('one')\n"
        "    assert found is not None and len(found) == 20000 and len(set(found)) == 1\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, name]) for name in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
