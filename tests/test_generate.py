"""The generator writes the protobuf code, and its check tells stale code from current code."""

import subprocess
import sys
from pathlib import Path

import generate
import pytest

SCHEMA = 'syntax = "proto3";\npackage kvpool.trial;\nmessage Trial { uint32 number = 1; }\n'


@pytest.fixture
def include(tmp_path: Path) -> Path:
    """An include path with a small schema in it."""
    schema = tmp_path / generate.SCHEMA
    schema.parent.mkdir(parents=True)
    schema.write_text(SCHEMA)
    return tmp_path


def test_generated_code_is_up_to_date_until_the_schema_changes(include: Path) -> None:
    assert generate.stale_outputs(include) == list(generate.OUTPUTS)
    generate.generate(include, include)
    assert generate.stale_outputs(include) == []
    (include / generate.SCHEMA).write_text(SCHEMA.replace("number", "figure"))
    assert generate.stale_outputs(include) == list(generate.OUTPUTS)


def test_a_schema_that_does_not_compile_is_an_error(include: Path) -> None:
    (include / generate.SCHEMA).write_text("message {")
    with pytest.raises(SystemExit, match="does not compile"):
        generate.generate(include, include)


def test_the_check_fails_with_the_command_that_helps(include: Path) -> None:
    command = [sys.executable, generate.__file__, "--check", "--include", str(include)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "run .ci/generate.py" in result.stderr
