#!/bin/sh
# build.sh DIRECTORY SOURCE: builds SQLite's program for its tests, DIRECTORY/testfixture, from the
# unpacked source package. It runs with the VFS of BIFOLIO_EXTENSION as the default if that is set.
set -eu
tests=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$2" && pwd)
cd "$1"
[ ! testfixture -nt "$tests/build.sh" ] || [ ! testfixture -nt "$tests/default_vfs.c" ] || exit 0

[ -e Makefile ] || "$source/configure" CFLAGS=-O1 >configure.out
rm -f sqlite3.c
make sqlite3.c >make.out
cat "$tests/default_vfs.c" >>sqlite3.c
make OPTS=-DSQLITE_EXTRA_INIT=bifolio_suite_init testfixture >>make.out
