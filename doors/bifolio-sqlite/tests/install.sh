#!/bin/sh
# install.sh: installs what `cargo x check-doors sqlite --whole` uses and this machine lacks. Needs
# apt-get and root only if something is missing.
set -eu
missing=
for package in gcc g++ make tcl-dev dpkg-dev libsqlite3-dev sqlite3 python3-venv nodejs npm libnode-dev \
  golang-go default-jdk-headless maven xfsprogs ruby puma ruby-activerecord ruby-sqlite3; do
  case $package in
    tcl-dev) [ -e /usr/include/tcl/tcl.h ] || [ -e /usr/include/tcl.h ] ;;
    dpkg-dev) command -v dpkg-source ;;
    libsqlite3-dev) [ -e /usr/include/sqlite3.h ] ;;
    nodejs) command -v node ;;
    libnode-dev) [ -e /usr/include/node/node.h ] ;;
    golang-go) command -v go ;;
    default-jdk-headless) command -v javac ;;
    maven) command -v mvn ;;
    xfsprogs) command -v mkfs.xfs ;;
    ruby-activerecord) ruby -e 'require "active_record"' ;;
    ruby-sqlite3) ruby -e 'require "sqlite3"' ;;
    python3-venv) python3 -c 'import ensurepip' ;;
    *) command -v "$package" ;;
  esac >/dev/null 2>&1 || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
echo "missing:$missing; trying: apt-get install$missing" >&2
command -v apt-get >/dev/null || {
  echo "there is no apt-get: install by hand what corresponds to$missing" >&2
  exit 1
}
# shellcheck disable=SC2086 # a list of words
{
  apt-get -q update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qy -o DPkg::Lock::Timeout=120 install $missing
} >&2 || {
  echo "apt-get could not install$missing: install it by hand, then repeat" >&2
  exit 1
}
