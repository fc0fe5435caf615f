//! One database per file in a process: the set of files that a database has locked.
//!
//! Called by `backend.rs`. Other processes, and other caches, are excluded by
//! [`OpenOptions::exclusive`](bifolio::OpenOptions::exclusive); handles of one cache share that
//! lock, so two databases of one process would not exclude each other without this set.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use bifolio::backing::FileIdentity;

static LOCKED: Mutex<Option<HashSet<FileIdentity>>> = Mutex::new(None);

/// The lock of one database on its file. Dropping it unlocks.
#[derive(Debug)]
pub(crate) struct DatabaseLock(FileIdentity);

impl DatabaseLock {
    /// Locks the file, or returns `None` if a database of this process has it locked.
    pub(crate) fn try_new(identity: FileIdentity) -> Option<Self> {
        let mut locked = LOCKED.lock().unwrap_or_else(PoisonError::into_inner);
        // Made only if it is a lock: its drop unlocks.
        locked.get_or_insert_default().insert(identity).then(|| Self(identity))
    }
}

impl Drop for DatabaseLock {
    fn drop(&mut self) {
        let mut locked = LOCKED.lock().unwrap_or_else(PoisonError::into_inner);
        locked.get_or_insert_default().remove(&self.0);
    }
}
