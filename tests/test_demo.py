"""The demo: its kernel against jax.numpy and known answers, its input, and what it prints."""

import jax
import numpy as np
import pytest

import cokernel
from cokernel import demo
from cokernel.demo import corpus, kernel


@pytest.fixture
def bags() -> list[np.ndarray]:
    """More than one block of bags, of the sizes at which something changes in the kernel."""
    random = np.random.default_rng(0)
    window, chunk = kernel.WINDOW, kernel.CHUNK
    sizes = [0, 1, window - 1, window, window + 1, chunk - 1, chunk, chunk + 1, 3 * chunk + 5]
    sizes += random.integers(1, 300, 140).tolist()
    return [random.integers(0, corpus.WORDS, size, np.int32) for size in sizes]


def run(bags, table, **options):
    layout = corpus.lay_out(bags)
    with cokernel.target("v6e"):
        kernels = kernel.make(layout.num_modules, **options)
    sums, tiles = kernels(layout.ids, layout.bounds, table)
    return layout, np.asarray(sums), corpus.assemble(np.asarray(tiles), layout.num_modules)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_sums_of_whole_numbers_are_exact(num_workers, bags):
    random = np.random.default_rng(1)
    table = random.integers(-9, 9, (corpus.WORDS, kernel.WIDTH)).astype(np.float32)
    params = cokernel.CompilerParams(num_workers=num_workers, time_limit_s=120)
    _, sums, _ = run(bags, table, compiler_params=params)
    for module, bag in enumerate(bags):
        np.testing.assert_array_equal(sums[module], table[bag].sum(0))
    np.testing.assert_array_equal(sums[len(bags) :], 0)


def test_similarities_are_those_of_jax_numpy(bags):
    table = corpus.word_vectors(bags)
    layout, sums, similarities = run(bags, table)
    expected_sums, expected = kernel.reference(layout.ids, layout.owners, table, layout.num_modules)
    np.testing.assert_allclose(sums, expected_sums, atol=1e-3)
    np.testing.assert_allclose(similarities, expected, atol=1e-5)
    np.testing.assert_allclose(np.diag(similarities)[1 : len(bags)], 1, atol=1e-5)


def test_modules_of_equal_words_are_alike_and_modules_without_any_are_like_none():
    bag = np.arange(500, dtype=np.int32)
    table = np.random.default_rng(0).standard_normal((corpus.WORDS, kernel.WIDTH), np.float32)
    _, _, similarities = run([bag, bag[::-1], bag[:0]], table)
    np.testing.assert_allclose(similarities[:2, :2], 1, atol=1e-5)
    np.testing.assert_array_equal(similarities[2], 0)


def test_the_broken_copy_ends_in_a_deadlock_that_names_all_three_programs(bags):
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        run(bags, corpus.word_vectors(bags), forgetful=True)
    text = str(caught.value)
    assert "Deadlock" in text
    for part in ("stage", "pool", "compare", "empty", "full", "ready", "15", "16"):
        assert part in text


def test_a_layout_places_every_bag_where_its_bounds_say(bags):
    layout = corpus.lay_out(bags)
    assert layout.num_modules == 2 * kernel.BLOCK
    assert not np.any(layout.bounds[:, 0] % kernel.ALIGNMENT)
    for module, bag in enumerate(bags):
        start, size = layout.bounds[module, :2]
        np.testing.assert_array_equal(layout.ids[start : start + size], bag)
        np.testing.assert_array_equal(layout.owners[start : start + size], module)
        assert start + size + kernel.CHUNK <= len(layout.ids)
    assert np.count_nonzero(layout.owners < layout.num_modules) == sum(map(len, bags))


def test_the_standard_library_is_read_by_the_names_of_its_modules():
    read = corpus.read_standard_library()
    assert {"argparse", "json", "json.decoder", "http.client"} <= set(read.names)
    assert not any(name.startswith(("test.", "site-packages")) for name in read.names)
    assert len(set(read.names)) == len(read.names) == len(read.bags)
    assert all(bag.min() >= 0 and bag.max() < corpus.WORDS for bag in read.bags)
    again = corpus.read_standard_library(limit=20)
    assert again.names == read.names[:20]
    np.testing.assert_array_equal(again.bags[7], read.bags[7])


def test_the_demo_shows_answers_times_cores_and_a_deadlock(capsys):
    assert demo.main(["--limit", "140"]) == 0
    out = capsys.readouterr().out
    assert "Read 140 modules" in out
    for part in ("Most alike", "jax.numpy", "Largest difference", "vector subcores", "Deadlock"):
        assert part in out
    assert "\x1b[" not in out
    assert max(map(len, out.splitlines())) <= 100
