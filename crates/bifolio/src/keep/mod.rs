//! Closed files whose pages stay in memory: found again at the next open, if the file is the same.
//!
//! Called by `file/open/closing.rs` at the first open of a file and at its last close. A kept file
//! has no handle and no descriptor: its table, its pages, and a watch. The pages are listed and
//! evicted like those of open files. Off unless `CacheBuilder::kept_files` says how many, because
//! an open costs some system calls more, of which one holds a lease.
//!
//! # Why no page is older than the file
//! Let t0 be the first open of a file by this cache, before a page is read, and t1 a later open at
//! which its pages would be used. All that the pages contain was read in between, so they are what
//! the file has at t1 if nothing has changed it from t0 to t1. Changes by this process count as
//! those of others: a file that was written is not found again.
//!
//! - KEEP-1: at t0, and at t1, a read lease was granted ([`watch::has_no_writer`]). So at neither
//!   moment was there an open file description that could write: no descriptor, not in a process
//!   either that inherited it; no shared map that can be stored to, since it keeps the description;
//!   no `write(2)`, `truncate(2)`, asynchronous or io_uring write in progress. A change between t0
//!   and t1 was made through a description that was opened after t0 and ended before t1, or by a
//!   call on a path that began and ended in between.
//! - KEEP-2: a watch was placed before t0. Such a description leaves an event when it ends
//!   (`IN_CLOSE_WRITE`), before the lease at t1 is granted, since the kernel counts it as a writer
//!   until then. So the events read after the lease at t1 contain it. A truncation leaves
//!   `IN_MODIFY`. An overflow, or an event that the kernel had no memory for, counts as a change of
//!   every file.
//! - KEEP-3: a program that opens the file for writing and changes nothing should not cost the
//!   pages: SQLite opens each database so. If the file was last changed in an earlier tick of the
//!   kernel's clock than t0 ([`Stamp::is_past`]), ends of descriptions are not watched. Then the
//!   stamp tells: each write, and the first store through a map that was made after t0, sets
//!   `ctime` to the time it begins, which is later than what the stamp has, and which no call can
//!   set back (`utimensat` sets it to now). Only a change of the clock can repeat it, to the
//!   nanosecond; and writes are still events (`IN_MODIFY`), as are changed times (`IN_ATTRIB`).
//! - KEEP-4: an inode number that is used again belongs to another file only after the watched one
//!   was deleted, which is an event, as are a rename and the unmounting of the file system.
//! - KEEP-5: only on file systems of which KEEP-1 to KEEP-3 are known ([`file::foreign_type`]).
//!
//! Between t1 and the return of the open another program may change the file, as it may at any time
//! while the file is open: the open has happened at t1.
//!
//! Not seen, as by the kernel's own page cache: writes to the block device below a mounted file
//! system. Nor are changes that the kernel makes for another file system on top (an overlay's upper
//! directory, read by another path) in the tick of t0, which leave no event; nor an asynchronous
//! transfer into a shared map that its program has unmapped and closed meanwhile, across t0.
//!
//! # Limits
//! At most `files_max` files are kept; the one that was closed first goes. Each has 2 KiB outside
//! the bound, as an open file has, and a watch, of which there are `fs.inotify.max_user_watches`
//! for all processes of a user; open files have one, too. Tables and pages are within the bound.
//! The address space of the tables is limited to a quarter of that of the process.

use crate::file::Keeper;
use crate::inode::Inode;
use crate::io::FileIdentity;
use crate::reclaim::Reclaim;
use crate::sync::Mutex;
use crate::sys::file::{self, Stamp};
use crate::sys::memory;
use crate::sys::probe::{Feature, Features};
use crate::sys::watch::{self, Event, Watches};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::mem;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Part of the address space of the process that tables of kept files may have.
const ADDRESS_SPACE_DIVISOR: u64 = 4;
/// Address space of a process, bytes, where no limit is set.
const ADDRESS_SPACE_BYTES: u64 = 1 << 47;

#[derive(Debug)]
pub(crate) struct KeptFiles {
    reclaim: Arc<Reclaim>,
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug)]
struct Limits {
    files: usize,
    space_bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    /// Opened by the first file.
    watches: Option<Watches>,
    /// Files that are watched, open or kept.
    files: HashMap<FileIdentity, Watched>,
    /// Files of the watches that had no event.
    identities: HashMap<i32, FileIdentity>,
    /// Kept files in the order of their closes.
    order: BTreeMap<u64, FileIdentity>,
    next_number: u64,
    /// Address space of the tables of kept files.
    space_bytes: u64,
    /// The last reason of each kind.
    refusals: [Option<String>; Refusal::COUNT],
}

/// A file that was as its stamp says when the watch was placed.
#[derive(Debug)]
struct Watched {
    watch: i32,
    stamp: Stamp,
    /// Set by an event: the file may have changed.
    is_changed: bool,
    kept: Option<Kept>,
}

#[derive(Debug)]
struct Kept {
    /// Key in [`State::order`].
    number: u64,
    inode: Arc<Inode>,
}

/// Kinds of reasons why a file is not kept.
#[derive(Clone, Copy, Debug)]
enum Refusal {
    Watch,
    Lease,
    FileSystem,
}

impl Refusal {
    const COUNT: usize = 3;
}

/// Inodes to be freed without the lock.
type Unwanted = Vec<Arc<Inode>>;

fn space_of(inode: &Inode) -> u64 {
    inode.mapping.table().pages() * size_of::<u64>() as u64
}

impl State {
    /// Reads the events. Files that were kept and have changed are forgotten.
    fn read_events(&mut self, unwanted: &mut Unwanted) {
        let Some(watches) = &self.watches else { return };
        let (mut changed, mut all) = (Vec::new(), false);
        let read = watches.read(|event| match event {
            Event::Of(watch) => changed.extend(self.identities.remove(&watch)),
            Event::Lost => all = true,
        });
        if all || read.is_err() {
            changed.extend(mem::take(&mut self.identities).into_values());
        }
        for identity in changed {
            let Some(file) = self.files.get_mut(&identity) else { continue };
            file.is_changed = true;
            if file.kept.is_some() {
                self.forget(identity, unwanted);
            }
        }
    }

    fn forget(&mut self, identity: FileIdentity, unwanted: &mut Unwanted) {
        let Some(mut file) = self.files.remove(&identity) else { return };
        self.identities.remove(&file.watch);
        if let Some(watches) = &self.watches {
            watches.remove(file.watch);
        }
        unwanted.extend(self.take_kept(&mut file));
    }

    fn take_kept(&mut self, file: &mut Watched) -> Option<Arc<Inode>> {
        let Kept { number, inode } = file.kept.take()?;
        self.order.remove(&number);
        self.space_bytes -= space_of(&inode);
        Some(inode)
    }

    /// Forgets the file that was closed first. Returns `false` if none is kept.
    fn forget_oldest(&mut self, unwanted: &mut Unwanted) -> bool {
        let Some(identity) = self.order.values().next().copied() else { return false };
        self.forget(identity, unwanted);
        true
    }

    /// Returns the kept inode of a file if nothing has changed it (t1). It stays watched.
    fn reopen(
        &mut self,
        identity: FileIdentity,
        file: BorrowedFd<'_>,
        fits: &dyn Fn(&Inode) -> bool,
        unwanted: &mut Unwanted,
    ) -> Option<Arc<Inode>> {
        self.files.get(&identity)?.kept.as_ref()?;
        // KEEP-1, KEEP-2: the lease before the events.
        let has_no_writer = watch::has_no_writer(file);
        let stamp = file::stamp(file);
        self.read_events(unwanted);
        let mut found = self.files.remove(&identity)?;
        let is_same = stamp.is_ok_and(|stamp| {
            let kept = found.kept.as_ref();
            let has_length = |kept: &Kept| kept.inode.mapping.len_bytes() == stamp.length_bytes;
            stamp == found.stamp && kept.is_some_and(has_length)
        });
        let is_found = is_same
            && !found.is_changed
            && has_no_writer.is_ok_and(|it| it)
            && found.kept.as_ref().is_some_and(|kept| fits(&kept.inode));
        let inode = if is_found { self.take_kept(&mut found) } else { None };
        self.files.insert(identity, found);
        if inode.is_none() {
            self.forget(identity, unwanted);
        }
        inode
    }

    /// Watches a file that is opened (t0), if it can be told whether it changes.
    fn begin(&mut self, file: BorrowedFd<'_>, identity: FileIdentity, unwanted: &mut Unwanted) {
        let begun = self.try_to_begin(file, identity, unwanted);
        match begun {
            Ok(()) => {}
            Err((refusal, error)) => self.refusals[refusal as usize] = Some(error.to_string()),
        }
    }

    fn try_to_begin(
        &mut self,
        file: BorrowedFd<'_>,
        identity: FileIdentity,
        unwanted: &mut Unwanted,
    ) -> Result<(), (Refusal, io::Error)> {
        let of_file_system = |error| (Refusal::FileSystem, error);
        if let Some(number) = file::foreign_type(file).map_err(of_file_system)? {
            let text = format!("on a file system of type {number:#x}");
            return Err(of_file_system(io::Error::other(text)));
        }
        // KEEP-3: if this stamp is that of t0, all later changes have later times.
        let before = file::stamp(file).map_err(of_file_system)?;
        if FileIdentity::of_numbers(before.device, before.inode) != identity {
            // A backing with an identity of its own.
            return Ok(());
        }
        let is_past = before.is_past();
        let watch = self.watch(file, !is_past, unwanted)?;
        self.identities.insert(watch, identity);
        // KEEP-2: the watch before the lease.
        let has_no_writer = watch::has_no_writer(file);
        let stamp = file::stamp(file);
        let watched = Watched { watch, stamp: before, is_changed: false, kept: None };
        self.files.insert(identity, watched);
        let is_same = stamp.is_ok_and(|stamp| stamp == before);
        if !is_same || !matches!(has_no_writer, Ok(true)) {
            self.forget(identity, unwanted);
        }
        has_no_writer.map(drop).map_err(|error| {
            let text = format!(
                "no lease: {error}; it needs the owner of the file or CAP_LEASE, and \
                 fs.leases-enable"
            );
            (Refusal::Lease, io::Error::other(text))
        })
    }

    /// Places a watch. If there are no more, the file that was closed first gives its own.
    fn watch(
        &mut self,
        file: BorrowedFd<'_>,
        closes: bool,
        unwanted: &mut Unwanted,
    ) -> Result<i32, (Refusal, io::Error)> {
        let refused = |call: &str, setting: &str, error: &io::Error| {
            (Refusal::Watch, io::Error::other(format!("{call}: {error} ({setting})")))
        };
        if self.watches.is_none() {
            let opened = Watches::open().map_err(|error| {
                refused("inotify_init1", "fs.inotify.max_user_instances", &error)
            })?;
            self.watches = Some(opened);
        }
        loop {
            let Some(watches) = &self.watches else { unreachable!("just opened") };
            match watches.add(file, closes) {
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                    if !self.forget_oldest(unwanted) {
                        let setting = "fs.inotify.max_user_watches";
                        return Err(refused("inotify_add_watch", setting, &error));
                    }
                }
                added => {
                    return added.map_err(|error| refused("inotify_add_watch", "/proc", &error));
                }
            }
        }
    }
}

impl KeptFiles {
    /// Returns what keeps up to `files_max` files, unless that is 0 or the kernel lacks a part.
    pub(crate) fn keeping(
        files_max: usize,
        reclaim: &Arc<Reclaim>,
        features: &Features,
    ) -> Option<Arc<dyn Keeper>> {
        if files_max == 0 || !features.has(Feature::FileWatches) {
            return None;
        }
        let space_bytes = memory::address_space_bytes_max().min(ADDRESS_SPACE_BYTES);
        let limits = Limits { files: files_max, space_bytes: space_bytes / ADDRESS_SPACE_DIVISOR };
        let reclaim = Arc::clone(reclaim);
        Some(Arc::new(Self { reclaim, limits, state: Mutex::default() }))
    }

    /// Calls `change` with the lock, and frees without it what is unwanted then.
    fn change<R>(&self, change: impl FnOnce(&mut State, &mut Unwanted) -> R) -> R {
        let mut unwanted = Unwanted::new();
        let result = change(&mut self.state.lock(), &mut unwanted);
        unwanted.into_iter().for_each(|inode| self.reclaim.free_closed(inode));
        result
    }
}

impl Keeper for KeptFiles {
    fn open(
        &self,
        identity: FileIdentity,
        file: BorrowedFd<'_>,
        fits: &dyn Fn(&Inode) -> bool,
    ) -> Option<Arc<Inode>> {
        self.change(|state, unwanted| {
            let found = state.reopen(identity, file, fits, unwanted);
            if found.is_none() {
                state.forget(identity, unwanted);
                state.begin(file, identity, unwanted);
            }
            found
        })
    }

    fn is_watched(&self, identity: FileIdentity) -> bool {
        let state = self.state.lock();
        state.files.get(&identity).is_some_and(|file| !file.is_changed)
    }

    fn is_unchanged(&self, identity: FileIdentity, file: BorrowedFd<'_>) -> bool {
        self.change(|state, unwanted| {
            let stamp = file::stamp(file);
            state.read_events(unwanted);
            let is_same =
                |file: &Watched| !file.is_changed && stamp.is_ok_and(|it| it == file.stamp);
            state.files.get(&identity).is_some_and(is_same)
        })
    }

    fn close(&self, identity: FileIdentity, inode: Arc<Inode>) -> Result<(), Arc<Inode>> {
        let limits = self.limits;
        self.change(|state, unwanted| {
            state.read_events(unwanted);
            let is_kept = |file: &Watched| !file.is_changed && file.kept.is_none();
            let space_bytes = space_of(&inode);
            if !state.files.get(&identity).is_some_and(is_kept) || space_bytes > limits.space_bytes
            {
                state.forget(identity, unwanted);
                return Err(inode);
            }
            while state.order.len() >= limits.files
                || state.space_bytes + space_bytes > limits.space_bytes
            {
                if !state.forget_oldest(unwanted) {
                    break;
                }
            }
            let number = state.next_number;
            state.next_number += 1;
            state.space_bytes += space_bytes;
            state.order.insert(number, identity);
            if let Some(file) = state.files.get_mut(&identity) {
                file.kept = Some(Kept { number, inode });
            }
            Ok(())
        })
    }

    fn forget(&self, identity: FileIdentity) {
        self.change(|state, unwanted| state.forget(identity, unwanted));
    }

    fn kept(&self) -> Vec<(FileIdentity, Arc<Inode>)> {
        let state = self.state.lock();
        let kept = |identity: &FileIdentity| {
            let kept = state.files.get(identity)?.kept.as_ref()?;
            Some((*identity, Arc::clone(&kept.inode)))
        };
        state.order.values().filter_map(kept).collect()
    }

    fn free_all(&self) {
        self.change(|state, unwanted| while state.forget_oldest(unwanted) {});
    }

    fn fallbacks(&self) -> Vec<String> {
        let state = self.state.lock();
        let reasons = state.refusals.iter().flatten();
        reasons.map(|reason| format!("kept files: some are not kept: {reason}")).collect()
    }
}
