//! Free space: a write for which there is no room is refused at once, as on a file system of the
//! kernel, and not when its pages are written out.
//!
//! ```text
//!             left for it: counts its bytes
//!   plenty ------------------------------------> plenty
//!    |  ^
//!    |  '--- twice the margin is free beyond what is dirty -----------------------.
//!    |  less is left than a write needs                                           |
//!    '-----> draining: the writes counted so far end, all pages are written --> short:
//!                                                                      each write allocates
//! ```
//!
//! While there is plenty of room, what is dirty and what writes are about to make dirty is less
//! than what is free, by a margin for the blocks that the file system itself needs. Nothing is
//! allocated then, and free space is looked at only every [`LOOK_AFTER`], or when as much was
//! written as was left. Once there is less, nothing is dirty that has no blocks, and each write
//! allocates its own, with the rights of the program that writes: the blocks that the file system
//! reserves for root, and quotas, count as if that program wrote itself. Where a file system cannot
//! allocate (`fallocate`), or may refuse bytes for which it has allocated blocks, the write is
//! written out before it returns. Where quotas are enforced (`quota.rs`), space is always short.
//!
//! ROOM-1: of a thread that holds a [`Room`], the bytes are counted in `writing` until the pages
//! are dirty. So at any time each promised byte is in `writing`, dirty, or has its blocks. A look
//! reads these three in this order, while bytes only move on: none is missed.
//!
//! Other programs may use up the space beside the mount. Then write-out fails, which is logged, and
//! told by the next close or sync.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bifolio::Cache;
use bifolio::backing::{DirectBacking, FallocateMode};
use nix::unistd::{Uid, setfsuid};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::fs::fstatfs;
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::data::{Files, Opened};
use crate::error::Result;
use crate::inode::Inode;
use crate::quota::{Limits, limits_of};

/// Time after which free space is looked at again: other programs change it, too.
const LOOK_AFTER: Duration = Duration::from_millis(100);
/// Free space that is left to the file system itself, beside a part of the cache's memory.
const MARGIN_BYTES: u64 = 8 << 20;
/// Part of the cache's memory that is added: an extent tree of a file that was written at random
/// takes up to one block for 340.
const MARGIN_PART: u64 = 32;
/// Room where free space is unknown or has no bound.
const UNLIMITED: u64 = u64::MAX >> 1;
const PAGE_BYTES: u64 = 4096;

/// Free space of the file system of some files.
#[derive(Default)]
pub struct Space {
    state: Mutex<State>,
    /// Signalled when a look or the draining ends, and when a counted write ends meanwhile.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    mode: Mode,
    /// Bytes that may still become dirty before the next look.
    left: u64,
    /// Bytes of counted writes in progress.
    writing: u64,
    /// Bytes that writes have taken since the current look began.
    taken: u64,
    looked: Option<Instant>,
    is_looking: bool,
    /// `None` before the first look.
    limits: Option<Limits>,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Mode {
    #[default]
    Plenty,
    Draining,
    Short,
}

/// Room for the first `length` bytes of a write. The write ends before this is dropped.
#[must_use]
pub struct Room {
    space: Arc<Space>,
    counted: u64,
    pub length: u64,
    /// The write must be written out before it is answered: blocks cannot be allocated.
    pub must_sync: bool,
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.counted > 0 {
            let mut state = self.space.state.lock();
            state.writing -= self.counted;
            if state.mode == Mode::Draining && state.writing == 0 {
                self.space.changed.notify_all();
            }
        }
    }
}

impl Space {
    /// Returns `true` if a write may fail when it is written out.
    pub fn is_short(&self) -> bool {
        self.state.lock().mode != Mode::Plenty
    }

    /// Returns `true` if a write into blocks that were allocated for it finds room.
    fn keeps_allocated(&self) -> bool {
        self.state.lock().limits.is_some_and(|limits| limits.keeps_allocated)
    }
}

impl State {
    /// Ends a look that found `spare` bytes, without the margin, beyond what was dirty.
    fn end_look(&mut self, spare: u64, margin: u64) {
        self.is_looking = false;
        self.looked = Some(Instant::now());
        if self.mode == Mode::Short && spare >= margin {
            self.mode = Mode::Plenty;
        }
        self.left = spare.saturating_sub(self.taken);
    }
}

impl Files {
    /// Returns room for a write of `bytes`, or for its first part.
    ///
    /// # Errors
    /// No space, or a quota, as the storage says.
    pub fn make_room(
        &self,
        inode: &Inode,
        opened: &Opened,
        bytes: Range<u64>,
        user: u32,
    ) -> Result<Room> {
        match self.count_room(inode, opened, &bytes) {
            Some(room) => Ok(room),
            None => self.allocate(opened, bytes, user, inode.key.0),
        }
    }

    /// Allocates blocks for a write, or for its first part. Waits for removed files if there are
    /// too few.
    fn allocate(&self, opened: &Opened, bytes: Range<u64>, user: u32, device: u64) -> Result<Room> {
        let mut length = bytes.end - bytes.start;
        loop {
            let must_sync = match allocate_as(user, opened, &(bytes.start..bytes.start + length)) {
                Err(error) if error.is_out_of_space() && self.removed.wait(device) => continue,
                Err(error) if error.is_out_of_space() && length > PAGE_BYTES => {
                    length /= 2;
                    continue;
                }
                allocated => !allocated?,
            };
            let space = Arc::clone(&opened.space);
            let must_sync = must_sync || !space.keeps_allocated();
            return Ok(Room { space, counted: 0, length, must_sync });
        }
    }

    /// Returns room for a change of `bytes` that takes blocks; `None` if it must take them now.
    /// Waits while another thread drains the device, or drains it: writes what is dirty on it.
    pub fn count_room(&self, inode: &Inode, opened: &Opened, bytes: &Range<u64>) -> Option<Room> {
        let space = &opened.space;
        let wanted = pages(bytes).end - pages(bytes).start;
        let length = bytes.end - bytes.start;
        let mut has_looked = false;
        let mut state = space.state.lock();
        loop {
            let is_stale = state.looked.is_none_or(|looked| looked.elapsed() > LOOK_AFTER);
            let is_too_little = state.mode == Mode::Plenty && state.left < wanted && !has_looked;
            if (is_stale || is_too_little) && !state.is_looking && state.mode != Mode::Draining {
                self.look(inode, space, &mut state);
                has_looked = true;
            }
            match state.mode {
                Mode::Plenty if state.left >= wanted => {
                    state.left -= wanted;
                    state.taken += wanted;
                    state.writing += wanted;
                    let space = Arc::clone(space);
                    return Some(Room { space, counted: wanted, length, must_sync: false });
                }
                Mode::Plenty if has_looked && !state.is_looking => {
                    self.drain(inode, space, &mut state);
                }
                Mode::Short => return None,
                Mode::Plenty | Mode::Draining => space.changed.wait(&mut state),
            }
        }
    }

    /// Looks at the free space and what is dirty.
    fn look(&self, inode: &Inode, space: &Space, state: &mut MutexGuard<'_, State>) {
        (state.is_looking, state.taken) = (true, 0);
        let writing = state.writing;
        // Without the lock: the device may hang.
        let (free, margin, limits) =
            MutexGuard::unlocked(state, || free_beyond_dirty(&self.cache, inode));
        let spare = free.map_or(UNLIMITED, |free| free.saturating_sub(writing + margin));
        state.limits = limits.or(state.limits);
        let is_enforced = state.limits.is_some_and(|limits| limits.has_quotas);
        state.end_look(if is_enforced { 0 } else { spare }, margin);
        space.changed.notify_all();
    }

    /// Gives blocks to everything that was promised some.
    fn drain(&self, inode: &Inode, space: &Space, state: &mut MutexGuard<'_, State>) {
        state.mode = Mode::Draining;
        while state.writing > 0 {
            space.changed.wait(state);
        }
        MutexGuard::unlocked(state, || self.write_device(inode.key.0));
        (state.mode, state.looked) = (Mode::Short, Some(Instant::now()));
        space.changed.notify_all();
    }
}

/// Returns the free space of an inode's file system beyond all that is dirty, `None` if it is
/// unknown or has no bound, the margin, and what else bounds writes.
fn free_beyond_dirty(cache: &Cache, inode: &Inode) -> (Option<u64>, u64, Option<Limits>) {
    // Before the free space: see ROOM-1.
    let stats = cache.stats();
    let dirty: u64 = stats.devices.iter().map(|device| device.dirty_bytes).sum();
    let looked = inode.handle().ok().and_then(|handle| {
        let space = fstatfs(&handle).ok()?;
        Some((space, limits_of(&handle, space.f_type as u64)))
    });
    let space = looked.map(|(space, _)| space).filter(|space| space.f_blocks > 0);
    let free = space.map(|space| (space.f_bavail * space.f_frsize as u64).saturating_sub(dirty));
    let limits = looked.map(|(_, limits)| limits);
    (free, MARGIN_BYTES + stats.memory.bound_bytes / MARGIN_PART, limits)
}

/// Returns the range of the pages with these bytes.
fn pages(bytes: &Range<u64>) -> Range<u64> {
    let end = bytes.end.min(i64::MAX as u64 - PAGE_BYTES).next_multiple_of(PAGE_BYTES);
    bytes.start / PAGE_BYTES * PAGE_BYTES..end
}

/// Allocates blocks for the pages of some bytes, with no more right to them than `user` has. The
/// length of the file stays. Returns `false` if the file system, or a sandbox, has no such call.
pub fn allocate_as(user: u32, opened: &Opened, bytes: &Range<u64>) -> Result<bool> {
    // The rights of this thread only, which starts no other meanwhile.
    with_rights_of(user, || {
        loop {
            let allocated =
                opened.disk.file().fallocate(FallocateMode::AllocateKeepLen, pages(bytes));
            return match allocated.map_err(|error| error.raw_os_error()) {
                Ok(()) => Ok(true),
                Err(Some(libc::EINTR)) => continue,
                Err(Some(number @ (libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EIO))) => {
                    Err(Errno::from_raw_os_error(number).into())
                }
                Err(_) => Ok(false),
            };
        }
    })
}

fn with_rights_of<T>(user: u32, call: impl FnOnce() -> T) -> T {
    let sets = capabilities(None).ok().filter(|_| user != 0 && Uid::effective().is_root());
    let Some(sets) = sets else { return call() };
    let mut fewer = sets;
    fewer.effective.remove(CapabilitySet::SYS_RESOURCE);
    if set_capabilities(None, fewer).is_err() {
        return call();
    }
    let before = setfsuid(Uid::from_raw(user));
    scopeguard::defer! {
        setfsuid(before);
        let _ = set_capabilities(None, sets);
    }
    call()
}
