#!/bin/sh
# check.sh: installs the package in a new virtual environment, by the two lines of README, and runs
# its tests there; then in two more environments, with the oldest Python and numpy that the package
# declares and with the newest ones. Called by `cargo x check-doors python`. With `--whole`, also
# those with torch, which takes 5 GB of disk. Further arguments go to pytest.
# BIFOLIO_MODEL_SECONDS is how long the model of a writer runs in the first environment.
set -eu
packages=
if [ "${1-}" = --whole ]; then
  packages=torch
  shift
fi
door=$(cd "$(dirname "$0")/.." && pwd)
"$door/tests/install.sh"
target=${CARGO_TARGET_DIR:-$door/../target}

# Prints a Python of version $1 that works: of the path, of pyenv, or of uv.
find_python() {
  for python in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python \
    "$(uv python find "$1" 2>/dev/null || true)"; do
    if "$python" -c "import sys, ensurepip; assert '%d.%d' % sys.version_info[:2] == '$1'" \
      2>/dev/null; then
      echo "$python"
      return
    fi
  done
}

# Runs the tests in the environment $1 for $2 seconds of the model; further arguments go to pytest.
run_tests() {
  environment=$1 seconds=$2
  shift 2
  "$environment/bin/python" -c "import sys, numpy
print('Python', sys.version.split()[0], 'numpy', numpy.__version__)"
  # Elsewhere, so that the installed package is imported, not its sources.
  (cd "$door/tests" && BIFOLIO_MODEL_SECONDS=$seconds "$environment/bin/python" -m pytest --quiet \
    --config-file "$door/pyproject.toml" "$@" "$door/tests")
}

environment=$target/python-environment
rm -rf "$environment"
python3 -m venv "$environment"
"$environment/bin/pip" install --quiet "$door"
"$environment/bin/pip" install --quiet --requirement "$door/tests/requirements.txt" $packages
(cd "$door/tests" && "$environment/bin/python" -m mypy --strict --config-file \
  "$door/pyproject.toml" "$door/python/bifolio" "$door/examples")
# Programs of users, by the types that the package installs. The checker itself is a package of npm,
# which its wrapper fetches once.
"$environment/bin/pip" install --quiet 'pyright[nodejs]'
"$environment/bin/pyright" --pythonpath "$environment/bin/python" --project "$door/pyproject.toml"
run_tests "$environment" "${BIFOLIO_MODEL_SECONDS:-60}" "$@"

# The wheel is one for all versions of Python.
wheels=$target/python-wheels
rm -rf "$wheels"
"$environment/bin/pip" wheel --quiet --no-deps --wheel-dir "$wheels" "$door"
# Later versions of pyarrow need numpy 2, and do not say so.
for versions in "3.11 numpy==1.26.* pyarrow<19" "3.13 numpy"; do
  python=$(find_python "${versions%% *}")
  if [ -z "$python" ]; then
    echo "skipped: the tests with Python ${versions%% *}, which is not installed here" \
      "(pyenv install ${versions%% *}, or uv python install ${versions%% *})" >&2
    continue
  fi
  environment=$target/python-environment-${versions%% *}
  rm -rf "$environment"
  "$python" -m venv "$environment"
  # shellcheck disable=SC2086 # several packages
  "$environment/bin/pip" install --quiet ${versions#* } "$wheels"/bifolio-*.whl \
    --requirement "$door/tests/requirements.txt"
  run_tests "$environment" 10 "$@"
done
