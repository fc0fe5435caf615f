#!/bin/sh
# check.sh: installs the package in a new virtual environment, by the two lines of README, and runs
# its tests there. Called by `cargo x check-doors python`. With `--whole`, also those with torch, which
# takes 5 GB of disk. Further arguments go to pytest.
set -eu
packages=
if [ "${1-}" = --whole ]; then
  packages=torch
  shift
fi
door=$(cd "$(dirname "$0")/.." && pwd)
"$door/tests/install.sh"
environment=${CARGO_TARGET_DIR:-$door/../target}/python-environment
rm -rf "$environment"
python3 -m venv "$environment"
"$environment/bin/pip" install --quiet "$door"
"$environment/bin/pip" install --quiet --requirement "$door/tests/requirements.txt" $packages
# Elsewhere, so that the installed package is imported, not its sources.
cd "$door/tests"
"$environment/bin/python" -m mypy --strict --config-file "$door/pyproject.toml" \
  "$door/python/bifolio" "$door/examples"
exec "$environment/bin/python" -m pytest --quiet --config-file "$door/pyproject.toml" "$@" "$door/tests"
