"""Where rules are found."""

import jax.extend
import pytest
from jax import lax

from cokernel.compiler.ops import families, load_rules, registry


def test_families_looked_through_first_are_modules_of_the_package():
    assert len(set(families())) == len(families())
    load_rules()  # Fails for a name without a module.


@pytest.mark.parametrize("is_added", [False, True])
def test_a_rule_is_found_before_its_family_was_imported(is_added, monkeypatch):
    name = "ADDED_RULES" if is_added else "RULES"
    found, primitive = object(), object()

    def load(family):
        if family == families()[-1]:
            getattr(registry, name)[primitive] = found

    monkeypatch.setattr(registry, name, {})
    monkeypatch.setattr("cokernel.compiler.ops.load_family", load)
    assert registry.find_rule(primitive) is found


def test_what_has_no_rule_has_none():
    assert registry.find_rule(jax.extend.core.Primitive("mine")) is None
    with pytest.raises(KeyError):
        registry.element_rule(lax.dot_general_p)
