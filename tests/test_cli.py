"""The command line: what the doctor prints, what it returns, and where the demo goes."""

import importlib
import types

import pytest

from cokernel import cli


def _fail() -> str:
    raise RuntimeError("the widget is not installed")


def test_doctor_succeeds_when_every_check_does(capsys):
    assert cli.doctor([cli.Check("Widget", lambda: "version 7")]) == 0
    assert "version 7" in capsys.readouterr().out


def test_doctor_fails_with_the_reason_and_still_runs_the_other_checks(capsys):
    checks = [cli.Check("Widget", _fail), cli.Check("Gadget", lambda: "version 8")]
    assert cli.doctor(checks) == 1
    out = capsys.readouterr().out
    assert "the widget is not installed" in out
    assert "version 8" in out
    assert "until this is put right: Widget." in out


def test_doctor_finds_this_installation_complete(capsys):
    assert cli.main(["doctor"]) == 0, capsys.readouterr().out


def test_a_jax_of_another_series_is_reported(monkeypatch):
    monkeypatch.setattr(cli, "_version", lambda distribution: "0.13.0")
    (finding,) = cli.examine([cli.Check("JAX", cli._jax)])
    assert not finding.good
    assert "0.13.0" in finding.text


def test_demo_hands_its_arguments_to_the_example(monkeypatch):
    received = []
    example = types.SimpleNamespace(main=lambda arguments: received.append(arguments) or 3)
    monkeypatch.setattr(importlib, "import_module", {cli.DEMO_MODULE: example}.__getitem__)
    assert cli.main(["demo", "--limit", "5"]) == 3
    assert received == [["--limit", "5"]]


def test_unknown_arguments_of_the_doctor_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--cure"])
    assert stopped.value.code == 2
    assert "--cure" in capsys.readouterr().err
