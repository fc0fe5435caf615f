//! The index of a write-ahead log, as `wal.c` lays it out in shared memory, and the frames of its
//! file. Layout: "WAL-Mode File Format" of SQLite's documentation, and the head of `wal.c`.
//!
//! # Safety
//! The regions are memory that all processes with the database map and change: it is only loaded,
//! as atomics, and lives until the connection unmaps it.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bytes of a region.
pub(super) const REGION_BYTES: i32 = 32 << 10;
/// Frames of a region.
const FRAMES: u32 = 4096;
/// Words before the frames of the first region.
const HEADER_WORDS: u32 = 34;
const FRAMES_OF_FIRST: u32 = FRAMES - HEADER_WORDS;

/// Words of the header, of which a second copy follows.
const COPY_WORDS: usize = 12;
const PAGE_BYTES: usize = 3;
const LAST_FRAME: usize = 4;
const SALTS: usize = 8;
/// Word of nBackfill.
const BACKFILL: usize = 24;

/// Bytes of the log's file before its frames, and of the head of a frame.
const FILE_HEADER_BYTES: u64 = 32;
const FRAME_HEADER_BYTES: u64 = 24;

/// State of the log, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    /// Salts, as in memory: the first one is a number in big-endian order.
    pub(super) salts: [u32; 2],
    /// Frames that are in the file.
    pub(super) backfill: u32,
    /// The last frame of the last commit.
    pub(super) last: u32,
    /// Bytes of a page of the database; 0 of a log without a frame.
    pub(super) page_bytes: u64,
}

impl Look {
    /// Returns `true` if the file has the same frames of the same log as at another look.
    pub(super) fn has_same_file(&self, other: &Self) -> bool {
        let file = |look: &Self| (look.salts, look.backfill, look.page_bytes);
        file(self) == file(other)
    }

    /// Returns `true` if the log has had no frame since its index was made: its salts, which tell
    /// one log from another, are zero.
    pub(super) fn is_nameless(&self) -> bool {
        self.salts == [0; 2]
    }

    /// Returns `true` if the log of `before` was restarted once since.
    pub(super) fn restarts(&self, before: &Self) -> bool {
        before.salts[0] != 0
            && u32::from_be(self.salts[0]) == u32::from_be(before.salts[0]).wrapping_add(1)
    }
}

/// Regions of the index that a connection has mapped.
#[derive(Debug, Default)]
pub(super) struct Regions(Vec<NonNull<AtomicU32>>);

// SAFETY: shared memory, of which any thread may load words.
unsafe impl Send for Regions {}

impl Regions {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> u32 {
        self.0.len() as u32
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Notes a region, unless it is known.
    ///
    /// # Safety
    /// Mapped until [`Self::clear`], with [`REGION_BYTES`] bytes.
    pub(super) unsafe fn note(&mut self, number: usize, region: NonNull<AtomicU32>) {
        if number == self.0.len() {
            self.0.push(region);
        }
    }

    fn load(&self, region: usize, word: usize) -> u32 {
        // SAFETY: inside the region, by the callers' arithmetic.
        let address = unsafe { self.0[region].add(word) };
        // SAFETY: mapped, and changed as atomics or under locks by all processes.
        // Acquire: pairs with the barriers and stores of `wal.c` in other processes.
        unsafe { address.as_ref() }.load(Ordering::Acquire)
    }

    /// Returns what the index says, or `None` while another process changes its header.
    pub(super) fn look(&self) -> Option<Look> {
        let word = |at| self.load(0, at);
        // A restart stores the salts first and nBackfill last: in between, the last frame is 0.
        let before = word(BACKFILL);
        let copy = |at| {
            [word(at + PAGE_BYTES), word(at + LAST_FRAME), word(at + SALTS), word(at + SALTS + 1)]
        };
        // Loaded in this order, as `load` acquires, opposite to that of their stores.
        let first = copy(0);
        let second = copy(COPY_WORDS);
        let backfill = word(BACKFILL);
        let [size, last, ..] = first;
        if first != second || before != backfill || backfill > last {
            return None;
        }
        // A number of 16 bits in the order of the machine: 1 stands for 65,536.
        let [_, _, low, high] = size.to_ne_bytes();
        let page_bytes = match u16::from_ne_bytes([low, high]) {
            1 => 65536,
            bytes => u64::from(bytes),
        };
        Some(Look { salts: [first[2], first[3]], backfill, last, page_bytes })
    }

    /// Returns `true` if the file has no frame that it did not have at `seen`, and the log was not
    /// restarted: also while a commit changes the header, which leaves both as they are.
    pub(super) fn is_backfilled_as(&self, seen: &Look) -> bool {
        let word = |at| self.load(0, at);
        let salts = |copy| [word(copy + SALTS), word(copy + SALTS + 1)];
        // A restart stores the salts first, of both copies, and nBackfill last.
        let before = word(BACKFILL);
        let is_same = salts(0) == seen.salts && salts(COPY_WORDS) == seen.salts;
        is_same && before == seen.backfill && word(BACKFILL) == before
    }

    /// Returns the region that names the page of a frame, counted from 1.
    pub(super) fn region_of(frame: u32) -> u32 {
        (frame + FRAMES - FRAMES_OF_FIRST - 1) / FRAMES
    }

    /// Returns the page of a frame, counted from 1 as the frame; `None` if its region is not mapped
    /// or it has none.
    pub(super) fn page(&self, frame: u32) -> Option<u32> {
        let region = Self::region_of(frame);
        if region >= self.len() {
            return None;
        }
        let place = match region {
            0 => HEADER_WORDS + frame - 1,
            _ => frame - 1 - FRAMES_OF_FIRST - (region - 1) * FRAMES,
        };
        Some(self.load(region as usize, place as usize)).filter(|page| *page > 0)
    }
}

/// Returns the pages of the frames after `seen.backfill` of a log that was restarted once: they
/// stay in its file until they are overwritten. `None` if it does not tell them all.
pub(super) fn pages_of_rest(path: &Path, seen: &Look, now: &Look) -> Option<Vec<u32>> {
    // Frames not seen were overwritten.
    if now.last > seen.backfill || seen.page_bytes == 0 || now.page_bytes != seen.page_bytes {
        return None;
    }
    // The close of this descriptor drops no lock: nothing locks the log's file.
    let log = File::open(path).ok()?;
    let mut pages = Vec::new();
    for frame in u64::from(seen.backfill) + 1.. {
        let mut head = [0; 16];
        let position = FILE_HEADER_BYTES + (frame - 1) * (FRAME_HEADER_BYTES + seen.page_bytes);
        // At the end of the file it may have been cut.
        log.read_exact_at(&mut head, position).ok()?;
        let word =
            |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let salts = [word(8), word(12)];
        if salts == now.salts {
            // Overwritten, perhaps by a transaction that is not committed yet.
            return None;
        }
        if salts != seen.salts {
            // Of a log before that one.
            return Some(pages);
        }
        pages.push(u32::from_be(word(0)));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory of an index with `regions` regions.
    fn index(regions: usize) -> (Vec<u32>, Regions) {
        let mut memory = vec![0u32; regions * REGION_BYTES as usize / 4];
        let mut found = Regions::default();
        for (number, region) in memory.chunks_mut(REGION_BYTES as usize / 4).enumerate() {
            // SAFETY: lives as long as the test, and has that many bytes.
            unsafe { found.note(number, NonNull::from(&mut region[0]).cast()) };
        }
        (memory, found)
    }

    fn set(memory: &mut [u32], last: u32, salts: [u32; 2], backfill: u32) {
        for at in [0, COPY_WORDS] {
            let size = [0, 0, 4096u16.to_ne_bytes()[0], 4096u16.to_ne_bytes()[1]];
            memory[at + PAGE_BYTES] = u32::from_ne_bytes(size);
            memory[at + LAST_FRAME] = last;
            memory[at + SALTS..at + SALTS + 2].copy_from_slice(&salts);
        }
        memory[BACKFILL] = backfill;
    }

    #[test]
    fn a_look_is_complete_or_none() {
        let (mut memory, regions) = index(1);
        set(&mut memory, 7, [1, 2], 5);
        let look = Look { salts: [1, 2], backfill: 5, last: 7, page_bytes: 4096 };
        assert_eq!(regions.look(), Some(look));
        memory[SALTS] = 3;
        assert_eq!(regions.look(), None, "the copies differ");
        set(&mut memory, 0, [2, 9], 5);
        assert_eq!(regions.look(), None, "restarted, and nBackfill not set yet");
    }

    #[test]
    fn a_commit_that_is_being_written_leaves_what_is_in_the_file() {
        let (mut memory, regions) = index(1);
        set(&mut memory, 7, [1, 2], 5);
        let seen = regions.look().unwrap();
        memory[COPY_WORDS + LAST_FRAME] = 9;
        assert_eq!((regions.look(), regions.is_backfilled_as(&seen)), (None, true));
        memory[BACKFILL] = 6;
        assert!(!regions.is_backfilled_as(&seen), "a checkpoint");
        memory[BACKFILL] = 5;
        memory[COPY_WORDS + SALTS] = 3;
        assert!(!regions.is_backfilled_as(&seen), "a restart");
    }

    #[test]
    fn pages_of_frames_are_found_in_all_regions() {
        let (mut memory, regions) = index(2);
        memory[HEADER_WORDS as usize] = 11;
        memory[FRAMES as usize - 1] = 12;
        // The second half of a region is its hash table.
        let second = REGION_BYTES as usize / 4;
        memory[second] = 13;
        memory[second + 4095] = 14;
        let pages = [1, FRAMES_OF_FIRST, FRAMES_OF_FIRST + 1, FRAMES_OF_FIRST + FRAMES];
        assert_eq!(pages.map(|frame| regions.page(frame)), [11, 12, 13, 14].map(Some));
        assert_eq!((regions.page(2), regions.page(FRAMES_OF_FIRST + FRAMES + 1)), (None, None));
    }

    #[test]
    fn frames_of_a_restarted_log_name_their_pages_until_they_are_overwritten() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let seen = Look { salts: [5u32.to_be(), 1], backfill: 1, last: 4, page_bytes: 512 };
        let now = Look { salts: [6u32.to_be(), 2], backfill: 0, last: 1, page_bytes: 512 };
        assert!(now.restarts(&seen) && !seen.restarts(&now));
        let write = |frame: u64, page: u32, salts: [u32; 2]| {
            let mut head = [0; 536];
            head[..4].copy_from_slice(&page.to_be_bytes());
            head[8..12].copy_from_slice(&salts[0].to_ne_bytes());
            head[12..16].copy_from_slice(&salts[1].to_ne_bytes());
            file.as_file().write_all_at(&head, 32 + (frame - 1) * 536).unwrap();
        };
        write(1, 9, now.salts);
        (2..=4).for_each(|frame| write(frame, frame as u32 * 10, seen.salts));
        let found = |now: &Look| pages_of_rest(file.path(), &seen, now);
        assert_eq!(found(&now), None, "the file ends with the log");
        write(5, 50, [4u32.to_be(), 0]);
        assert_eq!(found(&now), Some(vec![20, 30, 40]));
        assert_eq!(found(&Look { last: 2, ..now }), None, "a frame was overwritten");
        write(3, 7, now.salts);
        assert_eq!(found(&now), None, "by a transaction that is not committed");
    }
}
