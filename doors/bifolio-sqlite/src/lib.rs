//! A loadable extension of SQLite that registers the VFS `bifolio`: main databases are read and
//! written through a Bifolio cache; all other files use the system's VFS.
//!
//! ```text
//!  SQLite
//!    |  xRead, xWrite, xSync, xLock ...
//!  connection --- what SQLite has open as one file                       connection
//!    |            (or the reason why it was not opened: refused)
//!  shared ------- the database file, one in the process: locks among     shared
//!    |            connections (locks), the index of the log; its pages are
//!    |            in the cache of the process, or in one of its own
//!    |            (process_cache, settings)
//!  descriptors -- those of the system's file (system) and of the        descriptors
//!                 cache's (storage), which has the lock toward the
//!                 outside (file_lock)
//!
//!  vfs ---------- xOpen, entry points; temporary files of statements      vfs
//!                 are in the cache of the process (temporary), all other
//!                 files go on unchanged
//! ```
//!
//! Two kinds of connections serve these calls (`methods`). Those of `share` let other processes
//! in, and mean by each call what the system's VFS means. The picture, and what follows, is of
//! databases that are this process's alone (`bifolio_exclusive=1`).
//!
//! # What SQLite takes an Ok to mean, and what this VFS means by it
//!
//! Read in `wal.c`, `pager.c`, `backup.c` and `os_unix.c` of SQLite 3.40. What is in the kernel
//! survives the process; what is durable survives the machine, too. A result marked with `-` is
//! dropped by SQLite.
//!
//! ```text
//!  call                SQLite takes an Ok to mean         this VFS means
//!  xOpen               the file exists, with these        the same; a wrong parameter, or a log
//!                      rights                             that cannot be protected, ends the open
//!                                                         with a text that clients show
//!  xRead               the bytes last written by any      the same, through the cache
//!                      connection; SHORT_READ: then
//!                      zeros
//!  xWrite              in the kernel, with room           in the cache, seen by all connections;
//!                                                         no promise of SQLite rests on it, see
//!                                                         below
//!  xTruncate           the length; after a checkpoint     the length, and what was written before
//!                      with synchronous=OFF also: the     is in the kernel; FULL. No flush: a
//!                      log may be overwritten             rollback begins with it
//!  xSync               durable                            durable; FULL
//!  FCNTL_SYNC          precedes xSync in commit and       in the kernel; FULL. Waits for the
//!                      rollback, comes alone with         device unless it comes alone
//!                      synchronous=OFF; then the journal
//!                      goes
//!  CKPT_START,DONE -   a checkpoint begins, ends          not handled
//!  COMMIT_PHASETWO     the commit has happened            not handled
//!  SIZE_HINT -         room is reserved, in chunks        the same
//!  PERSIST_WAL, PSOW,  a setting of the connection        the same
//!  CHUNK_SIZE
//!  HAS_MOVED,          an answer about the connection     the same
//!  LAST_ERRNO,
//!  LOCKSTATE
//!  MMAP_SIZE           the limit of mapped bytes, set     0, whatever is set: no page is mapped
//!                      if not negative
//!  EXTERNAL_READER     another process has a              0: no process can, while the lock is
//!                      transaction on a log               held that a log needs
//!  others              NOTFOUND: not handled, which       the same
//!                      SQLite takes from any VFS
//!  xClose -            nothing of value is only here      dirty pages are made durable; those
//!                                                         that cannot be are discarded, since
//!                                                         others may write the file then: a
//!                                                         journal or the log has them
//!  xLock, xUnlock      five states among all processes    among the connections of the process;
//!                                                         toward others, exclusive while one may
//!                                                         write or has a log, otherwise shared
//!                                                         while one has a lock
//!  xCheckReservedLock  a connection is about to write     the same; asks the kernel unless the
//!                                                         lock is exclusive
//!  xShm*               memory and locks of all            memory and locks of the connections of
//!                      processes, recovered after a       this process; the first that maps them
//!                      crash                              recovers them from the log
//! ```
//!
//! # Why nothing acknowledged is only in the cache
//! A commit counts once the journal is gone, or once its frames are in the log.
//!
//! - *Journal modes, with `memory` and `off`*: before SQLite lets go of the journal, it calls
//!   `FCNTL_SYNC` and uses its result, in a commit, in a rollback and at the end of VACUUM and
//!   backup. Until then the journal, which the system's VFS has written, restores the database.
//! - *Log*: frames go through the system's VFS, so the kernel has them. The log is overwritten or
//!   deleted only after a checkpoint that reached its end, which calls `xTruncate`, and `xSync`
//!   unless `synchronous=OFF`; it uses both results. A partial checkpoint relies on neither, and
//!   recovery starts from the first frame.
//! - A failed write-back keeps its pages dirty, and the next one fails until they are on the
//!   storage. So no later success hides an error. After a flush that failed, all calls of `xSync`
//!   fail until the last connection is closed; the next open rolls back, or recovers from the log.
//!   Pages still go to the kernel meanwhile: a journal in memory restores the database with them.
//!
//! # Tests
//!
//! ```text
//!  of                  in tests/databases
//!  xOpen               journals::a_wrong_parameter_is_refused_with_its_name,
//!                      storage::a_log_of_an_exclusive_database_needs_a_file_..
//!  xRead, xWrite       journals::every_journal_mode_keeps_its_rows,
//!                      storage::a_file_that_another_process_cuts_is_an_error
//!  xTruncate           storage::a_full_disk_loses_no_commit_of_a_log_without_syncs,
//!                      faults::faults_lose_no_more_than_elsewhere_with_journals_in_memory
//!  xSync, FCNTL_SYNC,  faults::*: journal modes x synchronous x device full, failing writes and
//!  xClose              syncs x kill and close; kills::*;
//!                      process_cache::what_a_close_cannot_write_is_not_written_later
//!  xLock, xUnlock      connections::*, histories::*, locks::*, copies::*
//!  xCheckReservedLock  locks::other_processes_are_locked_out_until_the_last_close
//!  xShm*               connections::readers_and_a_writer_of_one_process_share_a_database, kills::*
//!  file controls       methods::*
//! ```
//!
//! # Safety
//! The tables of functions that this crate gives to SQLite are called with the pointers that SQLite
//! documents. A file is used by one thread at a time, which SQLite ensures.

mod access;
mod connection;
mod descriptors;
mod file_lock;
mod fork;
mod index;
mod left;
mod locks;
mod methods;
mod name;
mod pragmas;
mod process_cache;
mod refused;
mod runs;
mod settings;
mod share;
mod shared;
mod sqlite;
mod storage;
mod system;
mod temporary;
mod vfs;

pub use vfs::{sqlite3_bifoliodefault_init, sqlite3_bifoliosqlite_init, sqlite3_extension_init};
