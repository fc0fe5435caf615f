# select.tcl SOURCE: prints the test files that are run, one a line, as PERMUTATION/FILE: those of
# SQLite's permutation "full", and those that change the journal or the locks.
set argv0 [file join [lindex $argv 0] test select.tcl]
set argv {}
source [file join [file dirname $argv0] permutations.test]
# "veryquick" runs a file with fewer repetitions.
foreach {name files} {
  veryquick full
  exclusive exclusive
  exclusive-truncate exclusive-truncate
  persistent_journal persistent_journal
  truncate_journal truncate_journal
  wal wal
} {
  array set suite $testspec($files)
  foreach file [lsort $suite(-files)] {puts "file: $name/[file tail $file]"}
}
exit
