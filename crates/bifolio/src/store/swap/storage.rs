//! The temporary file of a swap, and the storage that is allocated for it ahead of writes.
//!
//! The file has no name and is deleted with its last descriptor. Only the owner can read it,
//! because it contains memory of the process. A child made by `fork` shares the descriptors, so the
//! bytes last until the child, too, has exited or executed another program.
//!
//! A write past the end of a file, or into a hole, makes the file system allocate blocks. On ext4
//! such a write holds the inode's lock exclusively, so no thread can read the file meanwhile. So
//! storage is allocated for 64 MiB at a time, at the beginning of a reclaim round, when the swapper
//! has no transfer in flight: the file system waits until all transfers of the file have ended, and
//! on some kernels (6.6 and later) one ends only when its thread enters the kernel.
use super::slots::position_bytes;
use crate::error::{Error, ErrorKind, Result};
use crate::io::{
    self, DirectBacking, DirectIo, DirectStatus, DiskFile, DiskOptions, FallocateMode,
    FileIdentity, replaced,
};
use crate::sync::{AtomicU32, Ordering};
use crate::sys::file;
use crate::sys::probe::Features;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

/// Slots whose storage is allocated together: 64 MiB.
const STEP_SLOTS: u32 = 16_384;
/// Slots after the next one to be allocated that must have storage: as many as one round evicts at
/// most.
const AHEAD_SLOTS: u32 = 8192;

#[derive(Debug, Default)]
pub(super) struct Preallocation {
    /// Slots below this one have storage, or its allocation was refused.
    end: AtomicU32,
}

impl Preallocation {
    /// Allocates storage for the slots from `next()` on, up to `limit`. `next` is called only if
    /// slots without storage remain. One caller at a time. A refusal is only logged: a later write
    /// to these slots returns the error.
    pub(super) fn reach(
        &self,
        backing: &dyn DirectBacking,
        next: impl FnOnce() -> u32,
        limit: u32,
    ) {
        // Relaxed: callers serialize; without allocated storage a write is only slower.
        let end = self.end.load(Ordering::Relaxed);
        if limit <= end {
            return;
        }
        let next = next();
        if next.saturating_add(AHEAD_SLOTS) <= end {
            return;
        }
        let new_end = next.max(end).saturating_add(STEP_SLOTS).min(limit);
        let bytes = position_bytes(end)..position_bytes(new_end);
        // The page cache allocates when it writes out; a tmpfs would use the memory now.
        let is_buffered = matches!(backing.direct(), DirectStatus::Buffered { .. });
        if !is_buffered && let Err(error) = io::fallocate(backing, FallocateMode::Allocate, bytes) {
            log::info!("{error}; the swap is written without it");
        }
        self.end.store(new_end, Ordering::Relaxed);
    }

    /// Forgets all storage: the file was truncated to length 0.
    pub(super) fn forget(&self) {
        self.end.store(0, Ordering::Relaxed);
    }
}

const OPTIONS: DiskOptions = DiskOptions {
    read: true,
    write: true,
    create: false,
    create_new: false,
    mode: None,
    truncate: false,
    direct: DirectIo::Auto,
};

pub(super) fn open(directory: &Path, features: &Features) -> Result<DiskFile> {
    // The fallback is for file systems without unnamed files and for systems without /proc.
    let file = match open_unnamed(directory, features) {
        Some(file) => file,
        None => open_unlinked(directory, features)?,
    };
    Ok(file.called(directory.join("(temporary swap file)")))
}

/// Opens a file that never has a name, by its path in /proc, which gives it the flags of a disk
/// file. `None` if the file system has no unnamed files, or there is no /proc.
pub(super) fn open_unnamed(directory: &Path, features: &Features) -> Option<DiskFile> {
    let made = file::create_unnamed(directory).ok()?;
    DiskFile::open_with(file::path_of(made.as_fd()), &OPTIONS, features).ok()
}

/// Creates a named file, opens it, and removes its name.
pub(super) fn open_unlinked(directory: &Path, features: &Features) -> Result<DiskFile> {
    let fail = |source| {
        let directory = directory.display();
        let text = format!("cannot make a temporary swap file in {directory}: {source}");
        Error::new(ErrorKind::SwapFile, text).because(Arc::new(source))
    };
    // The standard library seeds its hash tables with random numbers from the system.
    let random = RandomState::new().build_hasher().finish();
    let path = directory.join(format!(".bifolio-swap-{random:016x}"));
    let made = file::create_private(&path).map_err(fail)?;
    let opened = DiskFile::open_with(&path, &OPTIONS, features);
    let status = file::status(made.as_fd()).map_err(fail)?;
    let is_same = |file: &DiskFile| file.identity() == Some(FileIdentity::of(status));
    if opened.as_ref().is_ok_and(|file| !is_same(file)) {
        // Another process has replaced the file: the one at `path` must not be deleted.
        return Err(replaced(&path));
    }
    std::fs::remove_file(&path).map_err(fail)?;
    opened
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Backing;
    use crate::io::{IoBuf, IoBufMut};
    use std::io::{Error, ErrorKind, Result};
    use std::ops::Range;

    /// A backing that records each allocation and refuses it.
    #[derive(Debug, Default)]
    struct Refusing(std::sync::Mutex<Vec<Range<u64>>>);

    impl Backing for Refusing {
        fn read_at(&self, _: &mut IoBufMut<'_>, _: u64) -> Result<usize> {
            unreachable!()
        }

        fn write_at(&self, _: &IoBuf<'_>, _: u64) -> Result<usize> {
            unreachable!()
        }

        fn sync_data(&self) -> Result<()> {
            unreachable!()
        }

        fn len_bytes(&self) -> Result<u64> {
            unreachable!()
        }

        fn set_len(&self, _: u64) -> Result<()> {
            unreachable!()
        }

        fn describe(&self) -> String {
            "refusing".into()
        }

        fn as_direct(&self) -> Option<&dyn DirectBacking> {
            Some(self)
        }
    }

    impl DirectBacking for Refusing {
        fn fallocate(&self, _: FallocateMode, bytes: Range<u64>) -> Result<()> {
            self.0.lock().unwrap().push(bytes);
            Err(Error::from(ErrorKind::StorageFull))
        }
    }

    #[test]
    fn storage_is_allocated_once_and_within_the_capacity() {
        let (backing, preallocation) = (Refusing::default(), Preallocation::default());
        let (few, all) = (600, 3 * STEP_SLOTS - 5);
        let still_ahead = few + STEP_SLOTS - AHEAD_SLOTS;
        preallocation.reach(&backing, || 1, few);
        for next in [1, 9, still_ahead, still_ahead + 1, 2 * STEP_SLOTS, all, 1] {
            preallocation.reach(&backing, || next, all);
        }
        preallocation.reach(&backing, || unreachable!("all slots have storage"), all);
        preallocation.forget();
        preallocation.reach(&backing, || 3, few);
        let (one, two) = (few + STEP_SLOTS, few + 2 * STEP_SLOTS);
        let slots = [0..few, few..one, one..two, two..all, 0..few];
        let bytes = |slots: Range<u32>| position_bytes(slots.start)..position_bytes(slots.end);
        assert_eq!(*backing.0.lock().unwrap(), slots.map(bytes));
    }
}
