//! Reads that are special: the buffer of a failed read, seeks, reads with a page locked, reads at
//! the end of file.
//!
//! The history of a word does not include the length of the file: a word past the end reads as
//! zeros. So scenes with memory files have one more file, the log: one thread extends it, each page
//! first by some zeros and then by words. Where words are appended, a read must never return zeros.

use crate::history::{Violation, WORD_BYTES};
use crate::scene::{CLASSES, Target};
use crate::work::{Outcome, Worker};
use bifolio::File;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The bytes of buffers before a read.
const UNTOUCHED: [u8; 8] = [0xAA; 8];
/// Zeros.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Length at which the log is restarted.
const LOG_BYTES: u64 = 32 << 10;
/// Zeros at the start of each page of the log.
const LOG_ZEROS: u64 = 64;

impl Worker<'_> {
    /// Extends the log, or reads its last page.
    fn log(&mut self) -> Outcome {
        let Some(log) = self.scene.log.lock().expect("no panic").clone() else { return Ok(()) };
        self.scene.clock.begin_call(self.number);
        if self.number == 0 { self.grow_log(&log) } else { self.read_log(&log) }
    }

    /// Extends the log; called by one thread only.
    fn grow_log(&mut self, log: &File) -> Outcome {
        let (len, epoch) = (log.len(), &self.scene.log_epoch);
        let grown = if len >= LOG_BYTES {
            epoch.fetch_add(1, Ordering::AcqRel);
            let cut = log.set_len(0);
            epoch.fetch_add(1, Ordering::AcqRel);
            cut
        } else if len.is_multiple_of(4096) {
            log.set_len(len + LOG_ZEROS)
        } else {
            let words = self.random.u64(1..=(4096 - len % 4096) / WORD_BYTES);
            let bytes = vec![1; (words * WORD_BYTES) as usize];
            log.write_at(&bytes, len).map(drop)
        };
        grown.map_err(|error| Violation(format!("the log does not grow: {error} ({error:?})")))
    }

    fn read_log(&self, log: &File) -> Outcome {
        let epoch = &self.scene.log_epoch;
        let before = epoch.load(Ordering::Acquire);
        let page = log.len() / 4096 * 4096;
        let mut buffer = [0xAA; 4096];
        let read = log.read_at(&mut buffer, page);
        let read = read.map_err(|error| Violation(format!("the log cannot be read: {error}")))?;
        // Unspecified if the file was truncated meanwhile. AcqRel: the read is not reordered with
        // this.
        if !before.is_multiple_of(2) || epoch.fetch_add(0, Ordering::AcqRel) != before {
            return Ok(());
        }
        let words = buffer.get(LOG_ZEROS as usize..read).unwrap_or_default();
        match words.iter().position(|byte| *byte != 1) {
            None => Ok(()),
            Some(at) => {
                let found = words[at];
                let at = page + LOG_ZEROS + at as u64;
                let told = format!("the log has {found:#x} at {at}, of {read} bytes from {page}");
                Err(Violation(told))
            }
        }
    }

    /// Checks the buffer of a read past the `read` bytes that it returned: old bytes, zeros, or
    /// bytes of the file are allowed, bytes of another position or file are not.
    pub fn check_unread(
        &self,
        target: &Target,
        buffer: &[u8],
        position: u64,
        read: usize,
        begun: u64,
    ) -> Outcome {
        let first = read.next_multiple_of(WORD_BYTES as usize).min(buffer.len());
        for (word, at) in buffer[first..].chunks_exact(8).zip((first..).step_by(8)) {
            if word != UNTOUCHED && word != [0; 8] {
                let what = "read_at, behind what it answered,";
                target.history.check(what, word, position + at as u64, begun)?;
            }
        }
        Ok(())
    }

    /// Seeks; where a memory file has a hole, it must read as zeros.
    pub fn seek(&mut self, target: &Target, file: &File) -> Outcome {
        if !file.is_memory_file() {
            return Ok(());
        }
        if self.random.bool() {
            return self.log();
        }
        let position = self.range(target, WORD_BYTES).start;
        let begun = self.scene.clock.begin_call(self.number);
        let (hole, what) = if self.random.bool() {
            // The end of the file is one, too.
            let found = file.seek_hole(position).ok().flatten();
            let page = found.filter(|at| at % 4096 == 0 && at + 4096 <= file.len());
            (page.map(|at| at..at + 4096), "seek_hole")
        } else {
            let found = file.seek_data(position).ok().flatten();
            (found.map(|at| position..at.min(position + ZEROS.len() as u64)), "seek_data")
        };
        let Some(hole) = hole else { return Ok(()) };
        let length = (hole.end - hole.start) / WORD_BYTES * WORD_BYTES;
        target.history.check(what, &ZEROS[..length as usize], hole.start, begun)
    }

    /// Reads other pages while a `PageRefMut` is held: pages after it, or pages before it if no
    /// other thread of the scene reads with a `PageRefMut` held, because two such threads might
    /// wait for each other.
    pub fn look_beside(&mut self, target: &Target, file: &File, pinned: Range<u64>) -> Outcome {
        let looks_back = (self.scene.seed / CLASSES.len() as u64).is_multiple_of(2);
        let behind = pinned.end.next_multiple_of(file.folio_bytes());
        let before = pinned.start / file.folio_bytes() * file.folio_bytes();
        let cannot = if looks_back {
            self.number > 0 || before == 0
        } else {
            behind + 4096 > target.len_bytes_max
        };
        // One that alone looks back does so each time.
        if cannot || !looks_back && self.random.u32(0..4) > 0 {
            return Ok(());
        }
        let start = if looks_back {
            before - self.random.u64(1..=(before / 4096).min(8)) * 4096
        } else {
            behind + self.random.u64(0..4) * 4096
        };
        let mut buffer = vec![0xAA; 512];
        let begun = self.scene.clock.tick();
        match file.read_at(&mut buffer, start) {
            Ok(read) => {
                let whole = read as u64 / WORD_BYTES * WORD_BYTES;
                target.history.check("read_at", &buffer[..whole as usize], start, begun)
            }
            Err(error) => self.refused("read_at", target, &error),
        }
    }
}
