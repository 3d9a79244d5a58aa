"""What is read from a scheduled module of XLA."""

import pytest

from cokernel.aot import schedule

SPARSE = (
    'async_execution_thread="sparsecore", to_apply=%f, frontend_attributes={{kernel_name="k"{}}}'
)
TENSOR = 'custom_call_target="tpu_custom_call", frontend_attributes={{kernel_name="k"{}}}'

START = "  %s.call-start = ((), (), s32[]) call-start(), " + SPARSE
UPDATE = "  %s.call-update = (f32[8], f32[8]) call-update(%s.call-start, %x, /*index=1*/%box)"
TC = "  %t.1 = f32[8]{{0:T(8)}} custom-call(%box), " + TENSOR
DONE = "  ROOT %s.call-done = f32[8] call-done(%s.call-update)"
ALLOCATE = "  %a.1 = f32[8] custom-call(), " + TENSOR


def module(*instructions):
    body = "\n".join(("  %x = f32[8] parameter(0)", *instructions))
    return f"HloModule m, is_scheduled=true\n\nENTRY %main.1 (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def part(name):
    return f', kernel_part="{name}"'


def calls(*order, allocated="%box"):
    texts = {
        "allocate": ALLOCATE.format(part("allocate")).replace("%a.1", "%box"),
        "start": START.format(part("sparse")),
        "update": UPDATE,
        "tensor": TC.format(part("tensor")).replace("%box", allocated),
        "done": DONE,
    }
    return schedule.calls(module(*(texts[name] for name in order)))


def test_calls_overlap_between_start_and_end_of_the_sparse_one():
    found = calls("allocate", "start", "update", "tensor", "done")
    assert [(call.name, call.unit, call.part) for call in found] == [
        ("box", "TensorCore", "allocate"),
        ("s.call-start", "SparseCore", "sparse"),
        ("t.1", "TensorCore", "tensor"),
    ]
    assert [(a.name, b.name) for a, b in schedule.overlapping(found)] == [("s.call-start", "t.1")]
    assert schedule.problems(found) == []


@pytest.mark.parametrize(
    "order",
    [
        ("allocate", "start", "update", "done", "tensor"),
        ("allocate", "tensor", "start", "update", "done"),
        # It has no inputs before its update.
        ("allocate", "start", "tensor", "update", "done"),
    ],
)
def test_calls_one_after_the_other_are_a_problem(order):
    [problem] = schedule.problems(calls(*order))
    assert "kernel 'k' has programs on SparseCores and on a TensorCore" in problem
    assert "one after the other" in problem


def test_a_copy_of_what_both_calls_share_is_a_problem():
    [problem] = schedule.problems(
        calls("allocate", "start", "update", "tensor", "done", allocated="%copy.1")
    )
    assert "XLA gives t.1 a copy of what box has made" in problem


def test_a_call_that_is_gone_is_a_problem():
    [problem] = schedule.problems(calls("allocate", "start", "update", "done"))
    assert "merged or dropped" in problem


def test_calls_in_bodies_of_loops_are_found_and_those_of_a_sparse_cores_thread_are_not():
    text = module("  %w = f32[8] while(%x), body=%body") + (
        f"\n%body (p: f32[8]) -> f32[8] {{\n{TC.format('')}\n}}\n"
        f'\n%f (p: f32[8]) -> f32[8] {{\n{TC.format("")}\n}}, execution_thread="sparsecore"\n'
    )
    [call] = schedule.calls(text)
    assert call.computation == "body"


def test_sizes_are_those_that_the_compiler_names():
    used = '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}]'
    text = module(
        TC.format("") + f", backend_config={{{used}}}",
        START.format("") + ', backend_config={"program_size":"9088"}',
        UPDATE,
        DONE,
    )
    by_unit = {call.unit: call for call in schedule.calls(text)}
    assert by_unit["TensorCore"].vmem_bytes == 4096
    assert by_unit["SparseCore"].code_bytes == 9088


def test_calls_of_one_launch_are_those_that_share_what_was_allocated():
    def launch(number):
        def own(text):
            for name in ("%box", "%s.", "%t.1"):
                text = text.replace(name, f"%n{number}{name[1:]}")
            return text

        texts = (ALLOCATE.replace("%a.1", "%box"), START, UPDATE, TC, DONE.replace("ROOT ", ""))
        names = ("allocate", "sparse", "", "tensor", "")
        return [
            own(text.format(part(name)) if name else text)
            for text, name in zip(texts, names, strict=True)
        ]

    # The SparseCore's part of the second launch begins first, for it needs no more than is there.
    (a1, s1, u1, t1, d1), (a2, s2, u2, t2, d2) = launch(1), launch(2)
    assert schedule.problems(schedule.calls(module(a1, a2, s1, u1, t1, d1, s2, u2, t2, d2))) == []
    assert schedule.problems(schedule.calls(module(a2, s2, u2, a1, t2, d2, s1, u1, t1, d1))) == []
    [problem] = schedule.problems(schedule.calls(module(a2, s2, u2, d2, a1, s1, u1, t1, d1, t2)))
    assert "n2s.call-start at" in problem
    assert "n2t.1 at" in problem


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (r"a \"quoted\" name", 'a "quoted" name'),
        (r"it\'s", "it's"),
        (r"back\\slash", "back\\slash"),
        (r"\303\274ber", "über"),
        (r"two\nlines\tand a tab", "two\nlines\tand a tab"),
    ],
)
def test_a_kernels_name_may_have_any_character(written, name):
    text = module(TC.format("").replace('"k"', f'"{written}"'))
    assert [call.kernel for call in schedule.calls(text)] == [name]
