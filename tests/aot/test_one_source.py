"""Every kernel of the tests and examples that names only TPU features, compiled for three TPUs."""

import pytest

from tests.aot import corpus, table


@pytest.fixture(scope="module")
def cases(compiler_for):
    # Nothing has to be run where nothing can be compiled.
    for chip in table.TPUS:
        compiler_for(chip)
    return corpus.collect()


@pytest.fixture(scope="module")
def reports(cases, compiler_for):
    return table.reports(cases, compiler_for)


def test_there_are_kernels_of_all_kinds_of_meshes(reports):
    kinds = {frozenset(type(mesh).__name__ for mesh in case.params["meshes"]) for case in reports}
    assert frozenset({"VectorSubcoreMesh"}) in kinds
    assert frozenset({"TensorCoreMesh"}) in kinds
    assert frozenset({"ScalarSubcoreMesh", "VectorSubcoreMesh"}) in kinds
    assert frozenset({"ScalarSubcoreMesh", "VectorSubcoreMesh", "TensorCoreMesh"}) in kinds


def test_kernels_of_several_programs_on_sparse_cores_compile_for_every_tpu(reports):
    several = [c for c in reports if len(c.params["meshes"]) > 1 and not c.is_mixed]
    assert several
    for case in several:
        for report in reports[case].values():
            assert report.accepted, f"{case.source}: {report}"


def test_every_stock_example_compiles_for_every_tpu(reports):
    stock = [case for case in reports if case.source.startswith("examples/stock/")]
    assert {case.chip for case in stock} == set(table.TPUS)
    for case in stock:
        assert reports[case].keys() == {case.chip}
        assert reports[case][case.chip].accepted, f"{case.source}: {reports[case][case.chip]}"


def test_a_mixed_kernel_is_refused_only_for_a_semaphore_that_a_tensor_core_cannot_reach(
    reports,
):
    for case in reports:
        for report in reports[case].values():
            if case.is_mixed and not report.accepted:
                assert "which TensorCores cannot signal" in report.message


def test_no_compiler_crashes(reports):
    crashed = [
        f"{case.source}: {report}"
        for case, by_chip in reports.items()
        for report in by_chip.values()
        if report.crashed
    ]
    assert crashed == []


def test_every_refusal_names_a_line(reports):
    for by_chip in reports.values():
        for report in by_chip.values():
            if not report.accepted:
                assert report.place.line.startswith(str(corpus.ROOT))


def test_the_page_says_what_the_compilers_say(reports):
    page = table.PAGE.read_text()
    assert table.page_with("TPUs", table.text(reports), page) == page, (
        "docs/platforms.md is out of date: run scripts/platforms.py"
    )
