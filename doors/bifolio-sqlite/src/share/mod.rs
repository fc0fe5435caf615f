//! A database that other processes may use at the same time: any, unless `bifolio_exclusive=1`.
//!
//! Locks and the index of the log are those of SQLite's own VFS, and mean what they mean to SQLite
//! everywhere; writes, sizes and syncs go to a file of that VFS. Only reads are served by the
//! cache, and only where this module knows that a page is what the file has.
//!
//! ```text
//!  connection   SQLite's file: locks, index, writes; its handle of the cache   connection
//!      |
//!  database     one for each file in the process: what the cache has seen      database
//!      |        of it, and which pages must go
//!      |------- log: what the index says, and frames of a restarted log        log
//!      |------- index: the log's index, mapped, and the locks of its slots     index
//!      |
//!  descriptors  the system's file, the one with the locks, that of the cache   descriptors
//!      |
//!  reads        the storage under the cache: notes reads without a lock        reads
//! ```
//!
//! PROTOCOL SHARE, in two columns. Pages go (`File::invalidate`) with fills that are in flight.
//!
//! ```text
//!  THIS PROCESS                                 OTHERS
//!  without a log:
//!  R1 take SHARED; the first of this process:   change the file with EXCLUSIVE only, which
//!     if the header (24 bytes from byte 16) or    excludes SHARED; a commit changes the header
//!     the size is not as last seen, all pages
//!     go (K1); else those read without a lock
//!  R2 read through the cache                    a rollback leaves the header as it was; what
//!                                                 was read meanwhile was read without a lock
//!  R3 write: the system's file, then the pages  -
//!     of the range have the bytes, or go
//!  R4 before the lock is lowered: note header
//!     and size, which are this process's own;    a transaction that failed is rolled back, and
//!     pages written since the last commit go       the header is as it was
//!     at the next R1
//!
//!  with a log (W1 comes before any page is read, since `wal.c` calls xShmBarrier after it has
//!  loaded nBackfill, and before it trusts what it has):
//!  W1 xShmBarrier: look at salts and nBackfill  checkpoint: write pages, then raise nBackfill;
//!     of the index. nBackfill has grown: the      only frames that no reader needs from the log
//!     pages of the frames in between go         restart, with all frames in the file: salts,
//!  W2 other salts: the log was restarted;         then nBackfill = 0, then overwrite frames
//!     pages of the frames not seen go, if the   recovery, alone: nBackfill = 0
//!     log's file still tells them; else all
//!     (K1)
//!  W3 look again: if it was restarted           -
//!     meanwhile, all pages go
//!  W4 own checkpoint (slot CKPT): W1, and at    no other checkpoint
//!     its end nBackfill is seen: its writes
//!     were R3
//!  W5 own restart (slots of all readers but     no other restart, no reader of frames
//!     the first): W1, and at its end the new
//!     salts are seen, if all frames were
//! ```
//!
//! - W1 is enough: a reader takes a page from the file only if it has no frame from
//!   `minFrame = nBackfill + 1` on, as loaded before the barrier. A page of an older frame was
//!   dropped by W1 or read since. A page that is read while another process writes it in a
//!   checkpoint, torn, has a frame beyond nBackfill: readers take that, until nBackfill passes it
//!   and W1 drops the page; also if that process dies.
//! - W1 takes the lock of the database only if the index differs from what the connection found at
//!   its last W1, or the version of what the process has seen does (`Database::is_checked`). While
//!   a connection has SHARED, no page becomes older than its last W1. What begins anew (the first
//!   SHARED of the process, EXCLUSIVE) excludes that, and changes the version before its next R1.
//! - `wal.c` also calls xShmBarrier between the two copies of the header that it writes. A look of
//!   the writer is not whole then, and means nothing.
//! - Without the index (`locking_mode=EXCLUSIVE`, or an index that cannot be written) there is no
//!   barrier. Reads go past the cache then, unless the connection has EXCLUSIVE: all pages go when
//!   it is taken, and the file is this process's alone.
//! - When the first lock of the process is taken on a database with a log, all pages go (K1): its
//!   log may have been checkpointed and deleted meanwhile without a trace in the header.
//! - K1, where nothing is known of the pages: they stay if the cache has seen no change of the file
//!   since before the first of them was read (`File::is_unchanged`), which also covers those that
//!   it has kept since the database was closed (`CacheBuilder::kept_files`). Only a write that is
//!   still in progress may be missed. Without a log, and with EXCLUSIVE, the lock excludes that.
//!   With a log, the question comes after the look of W1: what was written before nBackfill rose
//!   to what was seen has ended, and a page that is being written has a frame beyond it. Before
//!   the index, SQLite reads the header without a lock, and page 1 with SHARED, to learn that there
//!   is a log; it reads both again.
//! - A handle's length is stale until a read past it (`Database::refresh`).
//! - If a page cannot be made to go, or a barrier fails, the cache is not used any more.
//!
//! # Tests
//! `shares::*` in tests/databases: two and three processes with and without the VFS, all journal
//! modes, checkpoints, kills. `kept::*`: pages of closed databases. `forks::*` and `copies::*`: the
//! locks of the index in a child, and beside another copy of SQLite.

mod connection;
mod database;
mod descriptors;
mod index;
mod log;
mod reads;

pub(crate) use connection::Connection;
pub(crate) use database::is_open;

use crate::fork::{Mutex, PerProcess};

/// Held while a connection to a main database is opened or closed.
static OPENING: PerProcess<Mutex<()>> = PerProcess::new();

/// Returns the lock of opens and closes.
pub(crate) fn opening() -> &'static Mutex<()> {
    OPENING.get()
}
