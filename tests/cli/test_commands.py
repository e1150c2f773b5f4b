"""The table of commands: what `ampkit` prints alone, when a command's module is imported, and the examples in the help."""

import importlib
import shlex

import pytest
from helpers import python

from ampkit.__main__ import COMMANDS, main


def test_alone_it_prints_help(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ampkit")
    assert all(name in printed and brief in printed for name, (brief, _) in COMMANDS.items())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_runs(command, capsys):
    with pytest.raises(SystemExit) as exited:
        main([command, "--help"])
    assert exited.value.code == 0
    example = importlib.import_module(COMMANDS[command][1]).EXAMPLE
    assert f"  {example}\n" in capsys.readouterr().out and example.startswith(f"ampkit {command}")
    done = python("-m", *shlex.split(example))
    assert done.returncode == 0 and done.stdout, done.stdout + done.stderr
