#!/bin/sh
# build.sh DIRECTORY SOURCE: builds SQLite's program for its tests, DIRECTORY/testfixture, from the
# unpacked source package. It runs with the VFS of BIFOLIO_EXTENSION as the default if that is set.
set -eu
tests=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$2" && pwd)
cd "$1"
# edit FILE SCRIPT: edits a file of the sources, unless that was done.
edit() {
  [ -e "$source/$1.orig" ] || cp "$source/$1" "$source/$1.orig"
  sed "$2" "$source/$1.orig" >"$source/$1"
  ! cmp -s "$source/$1" "$source/$1.orig"
}
[ ! testfixture -nt "$tests/build.sh" ] || [ ! testfixture -nt "$tests/default_vfs.c" ] || exit 0
# The parts with several processes, each of which is run with several connections too, cannot pass
# with a VFS that locks other processes out: skipped, as SQLite does for its own such VFS.
edit test/lock_common.tcl 's/ && \[permutation\]=="unix-excl"} continue/\
     \&\& ([permutation]=="unix-excl" || [info exists ::env(BIFOLIO_EXTENSION)])} continue/'
# The processes that crash have the database for themselves: the connection of the test is closed
# before, and opened again afterwards.
edit test/tester.tcl 's/^  set r \[catch {$/\
  set reopen [expr {[info exists ::env(BIFOLIO_EXTENSION)] \&\& [info commands db] ne ""}]\
  if {$reopen} {\
    set files {}\
    catch {set files [db eval {SELECT name, file FROM pragma_database_list WHERE seq>1}]}\
    db close\
  }\
&/
  s/^  lappend r \$msg$/\
  if {[info exists reopen] \&\& $reopen} {\
    sqlite3 db test.db\
    foreach {name path} $files {catch {db eval {ATTACH $path AS $name}}}\
  }\
&/'
# The VFS "crash" ends the process after it wrote what a crash of the machine may leave. It never
# calls xSync of the VFS below, so that what it wrote would be lost with the cache.
edit src/test6.c 's/rc = sqlite3OsWrite(p->pRealFile, .*/&\
    if( rc==SQLITE_OK ) rc = sqlite3OsSync(p->pRealFile, SQLITE_SYNC_NORMAL);/
  s/rc = sqlite3OsTruncate(pRealFile, .*/&\
          if( rc==SQLITE_OK ) rc = sqlite3OsSync(pRealFile, SQLITE_SYNC_NORMAL);/'

[ -e Makefile ] || "$source/configure" CFLAGS=-O1 >configure.out
rm -f sqlite3.c
make sqlite3.c >make.out
cat "$tests/default_vfs.c" >>sqlite3.c
make OPTS=-DSQLITE_EXTRA_INIT=bifolio_suite_init testfixture >>make.out
