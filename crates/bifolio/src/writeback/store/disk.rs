//! The store of a file that has a backing: who reads, who writes, and how long it is there.

use crate::io::{self, Backing, IoError};
use crate::sync::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct DiskStore {
    /// The same, as the engine knows it.
    reader: Arc<dyn Backing>,
    /// Set by the first handle that may write.
    writer: OnceLock<Arc<dyn Backing>>,
    /// Length of the backing as we made or found it: behind it there is nothing to read. Who
    /// changes it, and with which lock: `resizing.rs`.
    len_bytes: AtomicU64,
    /// How often the backing was changed, and how often when the last good flush began.
    changes: AtomicU64,
    flushed_changes: AtomicU64,
    /// The same of the last flush that failed.
    failed_changes: AtomicU64,
}

impl DiskStore {
    /// A store over `backing`, which has `len_bytes` bytes now.
    pub(in crate::writeback) fn new(backing: &Arc<dyn Backing>, len_bytes: u64) -> Self {
        Self {
            reader: Arc::clone(backing),
            writer: OnceLock::new(),
            len_bytes: AtomicU64::new(len_bytes),
            changes: AtomicU64::new(0),
            flushed_changes: AtomicU64::new(0),
            failed_changes: AtomicU64::new(0),
        }
    }

    /// The backing that reads go to.
    pub(in crate::writeback) fn reader(&self) -> &Arc<dyn Backing> {
        &self.reader
    }

    /// The backing that writes go to; none if nobody may write.
    pub(in crate::writeback) fn writer(&self) -> Option<&Arc<dyn Backing>> {
        self.writer.get()
    }

    /// Lets writes go to `backing` from now on, unless they go somewhere already.
    pub(in crate::writeback) fn allow_writes(&self, backing: &Arc<dyn Backing>) {
        self.writer.get_or_init(|| Arc::clone(backing));
    }

    /// Bytes there are from `position_bytes` on, at most `length_bytes`.
    pub(in crate::writeback) fn bytes_from(&self, position_bytes: u64, length_bytes: u64) -> u64 {
        let len = self.len_bytes.load(Ordering::Relaxed);
        len.saturating_sub(position_bytes).min(length_bytes)
    }

    /// So many bytes have been written: the backing is as long at least. To write none makes it no
    /// longer: of a folio behind the end of the file, whose removal is under way, nothing is
    /// written. `cutting` is shared, so no change of the length is under way.
    pub(in crate::writeback) fn note_written(&self, position_bytes: u64, length_bytes: u64) {
        if length_bytes > 0 {
            self.len_bytes.fetch_max(position_bytes + length_bytes, Ordering::Relaxed);
        }
        self.note_change();
    }

    /// The backing has been changed: it is durable after the next flush that begins now or later.
    fn note_change(&self) {
        // Release: pairs with the Acquire in `flush` and `is_flushed`.
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Makes what has been written durable.
    pub(in crate::writeback) fn flush(&self, metadata: bool) -> Result<(), IoError> {
        let Some(writer) = self.writer.get() else { return Ok(()) };
        // Acquire: pairs with the Release in `note_change`: the device has what is counted.
        let changes = self.changes.load(Ordering::Acquire);
        let flushed = if metadata { io::sync_all(&**writer) } else { io::sync_data(&**writer) };
        match flushed {
            // Release: pairs with the Acquire in `is_flushed`.
            Ok(()) => self.flushed_changes.fetch_max(changes, Ordering::Release),
            // Relaxed: only the value counts.
            Err(_) => self.failed_changes.fetch_max(changes, Ordering::Relaxed),
        };
        flushed
    }

    /// Whether the backing was flushed since it was last changed.
    pub(in crate::writeback) fn is_flushed(&self) -> bool {
        // Acquire: pairs with the Release in `flush` and `note_change`.
        let flushed_changes = self.flushed_changes.load(Ordering::Acquire);
        // Acquire: as above.
        self.changes.load(Ordering::Acquire) <= flushed_changes
    }

    /// Gives up what a flush that failed was to make durable, and no change that came later.
    pub(in crate::writeback) fn forget_failed_flush(&self) {
        // Relaxed: only the value counts.
        let failed_changes = self.failed_changes.load(Ordering::Relaxed);
        // Release: pairs with the Acquire in `is_flushed`.
        self.flushed_changes.fetch_max(failed_changes, Ordering::Release);
    }

    /// Asks the backing how long it is. The caller has `cutting` alone.
    pub(in crate::writeback) fn take_len(&self) -> Result<u64, IoError> {
        let len_bytes = io::len_bytes(&**self.writer.get().unwrap_or(&self.reader))?;
        self.len_bytes.store(len_bytes, Ordering::Relaxed);
        Ok(len_bytes)
    }

    /// Cuts the backing, or lets it grow by zeros. The caller has `cutting` alone.
    pub(in crate::writeback) fn set_len(&self, len_bytes: u64) -> Result<(), IoError> {
        let writer = self.writer.get().unwrap_or(&self.reader);
        let resized = io::set_len(&**writer, len_bytes);
        // One that failed may have done a part of it.
        self.note_change();
        resized?;
        self.len_bytes.store(len_bytes, Ordering::Relaxed);
        Ok(())
    }
}
