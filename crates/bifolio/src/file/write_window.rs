//! The window of a stream of writes with [`WriteHint::Once`]: its pages are advised away, and the
//! writer waits for the oldest. The head of `write_hint.rs` says why.

use super::advice::evict;
use super::{File, WriteHint};
use crate::fill::own_pins;
use crate::page::pages_of;
use crate::sync::Ordering;
use crate::writeback::Writeback;
use std::ops::Range;

/// Part of the bound that is the window of a stream, and its limits, bytes.
const WINDOW_DIVISOR: u64 = 32;
const WINDOW_BYTES_MIN: u64 = 128 << 10;
const WINDOW_BYTES_MAX: u64 = 8 << 20;
/// Runs of a window: the device works on some while the writer waits for the oldest.
const WINDOW_RUNS: u64 = 4;

impl File {
    /// Says what will be done with the bytes that are written through this handle and its clones.
    /// Affects later writes only; does not wait.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// use bifolio::{OpenOptions, WriteHint};
    /// let options = OpenOptions::new().write(true).create(true);
    /// let compacted = cache.open(directory.path().join("000002.sst"), &options)?;
    /// compacted.set_write_hint(WriteHint::Once);
    /// compacted.append(&[7; 100_000])?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_write_hint(&self, hint: WriteHint) {
        // Relaxed: a hint.
        self.handle.write_hints.is_once.store(u8::from(hint == WriteHint::Once), Ordering::Relaxed);
    }

    /// Notes that bytes were written through a handle with this hint. May wait for older ones.
    #[inline]
    pub(super) fn note_written(&self, bytes: Range<u64>) {
        if self.handle.write_hints.is_once() {
            self.advise_written(bytes, true);
        }
    }

    /// Lets the pages of a write with [`WriteHint::Once`] go.
    #[cold]
    pub(super) fn advise_written(&self, bytes: Range<u64>, may_wait: bool) {
        if bytes.is_empty() {
            return;
        }
        let (handle, hints) = (&self.handle, &self.handle.write_hints);
        let window_bytes = self.window_bytes();
        let run_bytes = window_bytes / WINDOW_RUNS;
        let runs = hints.stream.lock().add(&bytes, self.folio_bytes(), run_bytes);
        for run in runs.into_iter().filter(|run| !run.is_empty()) {
            evict(&handle.reclaim, &handle.inode, run);
        }
        let has_gate = handle.inode.has_gate();
        while (may_wait || has_gate)
            && let Some(oldest) = { hints.stream.lock().take_excess(window_bytes) }
        {
            // A write gate may hold them back for long.
            if !has_gate {
                self.wait_until_written(&oldest);
            }
            evict(&handle.reclaim, &handle.inode, oldest);
        }
    }

    /// Returns `true` if a write with [`WriteHint::Once`] would wait for older ones.
    pub(super) fn has_full_window(&self) -> bool {
        let sent_bytes = self.handle.write_hints.stream.lock().sent_bytes;
        sent_bytes > self.window_bytes() && !self.handle.inode.has_gate()
    }

    fn window_bytes(&self) -> u64 {
        let bound_bytes = self.handle.reclaim.memory.arena.bound_bytes();
        (bound_bytes / WINDOW_DIVISOR).clamp(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX)
    }

    /// Waits until a range is written back. An error is reported by the next sync of each handle.
    fn wait_until_written(&self, range: &Range<u64>) {
        let inode = &self.handle.inode;
        if own_pins::check(inode, &pages_of(range)).is_ok() {
            let _reported_by_syncs =
                Writeback::of(inode).write_back(&inode.errors.sample(), range.clone());
        }
    }
}
