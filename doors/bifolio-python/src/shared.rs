//! State that a cache shares with its files: the inodes that are open, the end of the cache, and
//! the files that a forked child must not read.
//!
//! Every loop over files here treats each file by itself: a failure is noted with the file, and the
//! loop goes on.
//!
//! Locks, for a child that is forked while another thread holds one: `LIVE` and `refused` are taken
//! only with the GIL held and never while it is released, so no other thread has them in a fork. A
//! child never takes the locks of its parent's inodes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bifolio::File;
use bifolio::backing::FileIdentity;
use pyo3::prelude::*;

use crate::error::{Failure, Result};
use crate::inode::{Frozen, Inode};

/// Files that a child must not read, with the errors of the attempts to pass them on.
type Refused = HashMap<FileIdentity, i32>;

/// All caches that this process and its ancestors have built and not dropped.
static LIVE: Mutex<Vec<(u32, Weak<Shared>)>> = Mutex::new(Vec::new());

/// An open inode.
#[derive(Debug)]
struct Slot {
    inode: Arc<Inode>,
    handles: usize,
}

impl Slot {
    fn may_write(&self) -> bool {
        self.inode.writer().is_some()
    }
}

/// State of a cache that its files share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The process that built the cache.
    process: u32,
    is_closed: AtomicBool,
    slots: Mutex<HashMap<FileIdentity, Slot>>,
    /// Files that the parent could not pass on when it forked this process.
    inherited: Refused,
    /// Those that this process could not pass on in its last fork.
    refused: Mutex<Refused>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn live() -> Vec<Arc<Shared>> {
    let process = std::process::id();
    let mut live = lock(&LIVE);
    // Only own ones are upgraded: the last reference to one of the parent must not be dropped here.
    live.retain(|(of, shared)| *of != process || shared.strong_count() > 0);
    let own = live.iter().filter(|(of, _)| *of == process);
    own.filter_map(|(_, shared)| shared.upgrade()).collect()
}

/// Passes the writes of all caches to the kernel, and notes for the child what cannot be passed on.
///
/// One compiled call: an interrupt cannot end it half way.
#[pyfunction]
pub(crate) fn before_fork(py: Python<'_>) {
    let live = live();
    let refused: Vec<Refused> = py.detach(|| live.iter().map(|shared| shared.pass_on()).collect());
    for (shared, refused) in live.iter().zip(refused) {
        *lock(&shared.refused) = refused;
    }
}

impl Shared {
    /// Creates the state of a new cache. `parent` is that of the same cache in the parent process.
    pub(crate) fn new(_: Python<'_>, parent: Option<&Self>) -> Arc<Self> {
        let process = std::process::id();
        let mut inherited = Refused::new();
        if let Some(parent) = parent.filter(|parent| parent.process != process) {
            inherited.extend(&parent.inherited);
            inherited.extend(lock(&parent.refused).iter());
        }
        let (slots, refused) = (Mutex::default(), Mutex::default());
        let is_closed = AtomicBool::new(false);
        let shared = Arc::new(Self { process, is_closed, slots, inherited, refused });
        lock(&LIVE).push((process, Arc::downgrade(&shared)));
        shared
    }

    /// Returns `true` in the process that built the cache.
    pub(crate) fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    pub(crate) fn is_closed(&self) -> bool {
        // Acquire: pairs with the Release in `close`; only the value counts.
        self.is_closed.load(Ordering::Acquire)
    }

    /// Adds a handle of a file. The GIL keeps two caches from opening one file at the same time.
    ///
    /// # Errors
    /// Another cache of this process may write the file, and so may the handle; the file has
    /// changes of the parent process that this process cannot see.
    pub(crate) fn add(
        &self,
        _: Python<'_>,
        file: &File,
        may_write: bool,
        is_replaced: bool,
        name: &str,
    ) -> Result<Arc<Inode>> {
        let Some(identity) = file.identity() else { return Ok(Arc::default()) };
        if let Some(&errno) = self.inherited.get(&identity)
            && !is_replaced
        {
            let text = "changes in the parent process could not be passed on before the fork";
            let cause = std::io::Error::from_raw_os_error(errno);
            return Err(Failure::System(errno, format!("{text}: {cause}"), name.to_owned()));
        }
        let is_written = |other: &Arc<Self>| {
            !std::ptr::eq(Arc::as_ptr(other), self)
                && !other.is_closed()
                && lock(&other.slots).get(&identity).is_some_and(Slot::may_write)
        };
        if may_write && live().iter().any(is_written) {
            let text = "another cache of this process has the file open for writing";
            return Err(Failure::System(libc::EBUSY, text.to_owned(), name.to_owned()));
        }
        let mut slots = lock(&self.slots);
        let slot =
            slots.entry(identity).or_insert_with(|| Slot { inode: Arc::default(), handles: 0 });
        slot.handles += 1;
        if may_write {
            slot.inode.note_writer(file);
        }
        Ok(Arc::clone(&slot.inode))
    }

    /// Removes a handle. The inode goes with the last one, unless it is kept.
    pub(crate) fn remove(&self, identity: Option<FileIdentity>) {
        let Some(identity) = identity else { return };
        let mut slots = lock(&self.slots);
        let Some(slot) = slots.get_mut(&identity) else { return };
        slot.handles = slot.handles.saturating_sub(1);
        let removed =
            if slot.handles == 0 && !slot.inode.is_kept() { slots.remove(&identity) } else { None };
        drop(slots);
        // Closes the file, without the lock.
        drop(removed);
    }

    fn inodes(&self) -> Vec<(FileIdentity, Arc<Inode>)> {
        let slots = lock(&self.slots);
        slots.iter().map(|(identity, slot)| (*identity, Arc::clone(&slot.inode))).collect()
    }

    /// Passes the writes of all files to the kernel. Returns those where this failed.
    fn pass_on(&self) -> Refused {
        if self.is_closed() {
            return Refused::new();
        }
        let inodes = self.inodes();
        let failures = inodes.iter().filter_map(|(identity, inode)| {
            let failure = inode.pass_on().err().filter(|failure| !failure.is_closed())?;
            Some((*identity, failure.errno()))
        });
        failures.collect()
    }

    /// Makes all writes of all files durable, with the headers.
    pub(crate) fn sync(&self) -> Vec<Failure> {
        let inodes = self.inodes();
        let sync = |inode: &Inode| inode.writer().map_or(Ok(()), |file| inode.sync(file));
        inodes.iter().filter_map(|(_, inode)| sync(inode).err()).collect()
    }

    /// Makes all writes durable, and closes the cache with all files, if that succeeds.
    pub(crate) fn close(&self, cache: &bifolio::Cache) -> Vec<Failure> {
        if self.is_closed() {
            return Vec::new();
        }
        let inodes = self.inodes();
        let mut ordered: Vec<&Inode> = inodes.iter().map(|(_, inode)| &**inode).collect();
        ordered.sort_by_key(|inode| std::ptr::from_ref::<Inode>(inode));
        // No append comes between the last header and the end of the cache.
        let mut frozen: Vec<Frozen<'_>> = ordered.into_iter().map(Inode::freeze).collect();
        let has_due = frozen.iter().any(Frozen::has_due_header);
        let mut failures: Vec<Failure> = Vec::new();
        if has_due {
            failures.extend(frozen.iter_mut().filter_map(|each| each.sync().err()));
        }
        if failures.is_empty() {
            match cache.close() {
                Ok(()) => {
                    // Release: pairs with the Acquire in `is_closed`.
                    self.is_closed.store(true, Ordering::Release);
                    drop(frozen);
                    let slots = std::mem::take(&mut *lock(&self.slots));
                    drop(slots);
                }
                Err(error) => failures.push(error.into()),
            }
        }
        failures
    }
}
