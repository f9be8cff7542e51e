#!/usr/bin/env python3
"""Regenerate the protobuf code that is kept in the tree.

The generated files are committed, so that neither users nor builds need a protobuf compiler. The
gate runs this with `--check`, which fails if the committed files are not byte for byte what the
pinned generator makes of the schema.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# The folder is named relative to the include path proto/, which makes the generated module
# `kvpool.proto.wire_pb2`.
SCHEMA = "kvpool/proto/wire.proto"
OUTPUTS = ("kvpool/proto/wire_pb2.py", "kvpool/proto/wire_pb2.pyi")


def generate(include: Path, target: Path) -> None:
    """Compile `include`/SCHEMA into `target`/OUTPUTS; exits with protoc's own words on an error."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{include}"]
    command += [f"--python_out={target}", f"--pyi_out={target}", SCHEMA]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"generate: {SCHEMA} does not compile")


def stale_outputs(include: Path) -> list[str]:
    """The OUTPUTS below `include` that are missing or differ from what the schema gives now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(include, Path(folder))
        return [
            output
            for output in OUTPUTS
            if not (include / output).is_file()
            or (include / output).read_bytes() != (Path(folder) / output).read_bytes()
        ]


def main() -> None:
    """Write the generated files, or with `--check` only say whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--include", type=Path, default=REPOSITORY / "proto")
    options = parser.parse_args()
    if not options.check:
        generate(options.include, options.include)
    elif stale := stale_outputs(options.include):
        sys.exit(f"generate: not up to date, run .ci/generate.py: {', '.join(stale)}")


if __name__ == "__main__":
    main()
