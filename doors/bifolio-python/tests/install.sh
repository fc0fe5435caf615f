#!/bin/sh
# install.sh: installs what the tests use and this machine lacks: Python 3.11 or later with `venv`.
# Needs apt-get and root only if something is missing.
set -eu
if python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  exit 0
fi
echo "missing: Python 3.11 or later with venv; trying: apt-get install python3 python3-venv" >&2
command -v apt-get >/dev/null || {
  echo "there is no apt-get: install Python 3.11 or later with venv by hand" >&2
  exit 1
}
{
  apt-get -q update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qy -o DPkg::Lock::Timeout=120 install \
      python3 python3-venv
} >&2
python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' || {
  echo "the Python of this system is older than 3.11: install a later one by hand" >&2
  exit 1
}
