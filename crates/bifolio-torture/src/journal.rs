//! A journal that a child process writes and its parent reads after killing the child.
//!
//! It is memory of a file that both have mapped, so everything that the child had stored remains: a
//! kill reverts no store. A record is valid once it has a begin, and its change begins only after
//! that; so no change of a file lacks a record, and a record without an end may have taken effect
//! or not.
//!
//! # Safety
//! The mapping is as long as the header and all records, lives as long as the [`Journal`], and
//! both processes use it only by atomic operations; zeros are valid records.
#![allow(unsafe_code)]

use anyhow::{Context as _, ensure};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of records; a child that needs more ends its session.
const RECORDS_MAX: usize = 1 << 14;
const BYTES: usize = size_of::<Header>() + RECORDS_MAX * size_of::<Record>();

#[derive(Debug)]
#[repr(C)]
struct Header {
    /// Logical time; it continues from child to child.
    clock: AtomicU64,
    /// Number of records begun.
    count: AtomicU64,
}

#[derive(Debug, Default)]
#[repr(C)]
struct Record {
    /// [`What`], the call, the file, the thread: one byte each.
    about: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
    /// 0 in a record that is not valid.
    begun: AtomicU64,
    /// 0 while it is in progress, or after it failed.
    ended: AtomicU64,
    /// End of the bytes that were certainly changed.
    certain_end: AtomicU64,
}

/// The subject of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Words that encode the record's begin.
    Write,
    /// Zeros.
    Zero,
    /// A sync; with an end, it was acknowledged.
    Sync,
}

/// A record, as it was read.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub what: What,
    pub call: &'static str,
    pub file: usize,
    pub thread: usize,
    pub start: u64,
    pub end: u64,
    pub begun: u64,
    pub ended: u64,
    pub certain_end: u64,
}

/// Calls that the journal distinguishes.
pub const CALLS: [&str; 9] = [
    "write_at",
    "pin_mut",
    "map store",
    "set_len",
    "sync_data",
    "sync_all",
    "sync_range",
    "map sync",
    "close",
];

/// A begun record.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    number: usize,
    /// Number of the change.
    pub id: u64,
}

/// Record of calls in shared memory, which survives a killed child.
#[derive(Debug)]
pub struct Journal {
    memory: *mut libc::c_void,
}

// SAFETY: the memory is used by atomic operations only.
unsafe impl Send for Journal {}
// SAFETY: as above.
unsafe impl Sync for Journal {}

impl Journal {
    /// Opens the journal in the file `path`, and creates it if necessary.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let options = File::options().read(true).write(true).create(true).truncate(false).clone();
        let file = options.open(path).with_context(|| format!("{}", path.display()))?;
        file.set_len(BYTES as u64)?;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let descriptor = file.as_raw_fd();
        // SAFETY: a new mapping, at an address that the kernel chooses, of a file that is as long.
        let memory =
            unsafe { libc::mmap(ptr::null_mut(), BYTES, rights, libc::MAP_SHARED, descriptor, 0) };
        ensure!(memory != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        Ok(Self { memory })
    }

    fn header(&self) -> &Header {
        // SAFETY: at the start of a mapping, which is aligned to a page; see the head of the file.
        unsafe { &*self.memory.cast::<Header>() }
    }

    fn record(&self, number: usize) -> &Record {
        assert!(number < RECORDS_MAX);
        let records = self.memory.wrapping_byte_add(size_of::<Header>()).cast::<Record>();
        // SAFETY: inside the mapping, as was just asserted; aligned, for the header is 16 bytes.
        unsafe { &*records.wrapping_add(number) }
    }

    /// Returns the next moment.
    fn tick(&self) -> u64 {
        self.header().clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the number of records begun since the journal was emptied.
    pub fn count(&self) -> usize {
        self.header().count.load(Ordering::Relaxed) as usize
    }

    /// Begins a record; `None` if the journal is full.
    pub fn begin(
        &self,
        what: What,
        call: usize,
        file: usize,
        thread: usize,
        range: std::ops::Range<u64>,
    ) -> Option<Begun> {
        let number = self.header().count.fetch_add(1, Ordering::Relaxed) as usize;
        if number >= RECORDS_MAX {
            return None;
        }
        let record = self.record(number);
        let about = [what as u8, call as u8, file as u8, thread as u8, 0, 0, 0, 0];
        record.about.store(u64::from_le_bytes(about), Ordering::Relaxed);
        record.start.store(range.start, Ordering::Relaxed);
        record.end.store(range.end, Ordering::Relaxed);
        let id = self.tick();
        // Release: the record is whole before it is valid; the parent reads it after our death.
        record.begun.store(id, Ordering::Release);
        Some(Begun { number, id })
    }

    /// Ends a record, which certainly took effect up to `certain_end`.
    pub fn end(&self, begun: Begun, certain_end: u64) {
        let record = self.record(begun.number);
        record.certain_end.store(certain_end, Ordering::Relaxed);
        // Release: as in `begin`.
        record.ended.store(self.tick(), Ordering::Release);
    }

    /// Returns all valid records and empties the journal. The child must be dead.
    pub fn take(&self) -> Vec<Entry> {
        let count = self.count().min(RECORDS_MAX);
        let entries = (0..count).filter_map(|number| take(self.record(number))).collect();
        self.header().count.store(0, Ordering::Relaxed);
        entries
    }
}

/// Returns the content of a valid record, and invalidates it.
fn take(record: &Record) -> Option<Entry> {
    let begun = record.begun.swap(0, Ordering::Relaxed);
    let ended = record.ended.swap(0, Ordering::Relaxed);
    let about = record.about.load(Ordering::Relaxed).to_le_bytes();
    let what = [What::Write, What::Zero, What::Sync][usize::from(about[0])];
    (begun > 0).then(|| Entry {
        what,
        call: CALLS[usize::from(about[1])],
        file: usize::from(about[2]),
        thread: usize::from(about[3]),
        start: record.start.load(Ordering::Relaxed),
        end: record.end.load(Ordering::Relaxed),
        begun,
        ended,
        certain_end: record.certain_end.load(Ordering::Relaxed),
    })
}

impl Drop for Journal {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and no reference into it exists any more.
        unsafe { libc::munmap(self.memory, BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_of_one_mapping_are_read_by_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let (child, parent) = (Journal::open(&path).unwrap(), Journal::open(&path).unwrap());
        let write = child.begin(What::Write, 0, 1, 2, 8..16).unwrap();
        child.begin(What::Sync, 4, 1, 2, 0..64).unwrap();
        child.end(write, 16);
        let entries = parent.take();
        assert_eq!(entries.len(), 2);
        assert_eq!(
            (entries[0].what, entries[0].call, entries[0].file),
            (What::Write, "write_at", 1)
        );
        assert_eq!((entries[0].begun, entries[0].ended, entries[0].certain_end), (write.id, 3, 16));
        assert_eq!((entries[1].what, entries[1].ended), (What::Sync, 0));
        assert!(parent.take().is_empty());
        assert_eq!(child.begin(What::Zero, 3, 0, 0, 0..8).unwrap().id, 4, "time goes on");
    }

    #[test]
    fn a_full_journal_refuses_and_forgets_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::open(&directory.path().join("journal")).unwrap();
        for _ in 0..RECORDS_MAX {
            assert!(journal.begin(What::Write, 0, 0, 0, 0..8).is_some());
        }
        assert!(journal.begin(What::Write, 0, 0, 0, 0..8).is_none());
        assert_eq!(journal.take().len(), RECORDS_MAX);
    }
}
