//! The storage of a shared database: a file of the kernel, of which the cache only reads.
//!
//! Without SHARED, another process may change the file, and take the change back, without a trace
//! (R2 of `share`). The process may have no lock while the cache reads ahead. So reads are noted
//! with what they met, and [`Noted::lock`] returns those that are not to be trusted. They are not
//! remembered after the last close: such a change is an event for the cache, which keeps no page of
//! the file then.

use crate::descriptors::Key;
use crate::fork::Mutex;
use bifolio::backing::{
    Alignment, Backing, DirectBacking, DirectStatus, DiskFile, FallocateMode, FileIdentity, IoBuf,
    IoBufMut, IoRequest, Operation, Submission,
};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A database file that is read, with the notes of its reads.
#[derive(Debug)]
pub(crate) struct Reads {
    disk: DiskFile,
    /// `None` if the kernel does not tell.
    key: Option<Key>,
    noted: Arc<Noted>,
}

/// Notes of the reads of a file, and of the lock that they met.
#[derive(Debug, Default)]
pub(super) struct Noted(Mutex<Notes>);

#[derive(Debug, Default)]
struct Notes {
    /// Set while this process has SHARED.
    is_locked: bool,
    /// Number of times that it was taken.
    locks: u64,
    in_flight: Vec<Begun>,
    /// Complete, and begun or ended without the lock.
    untrusted: Vec<Range<u64>>,
    /// Written by this process, in a transaction whose journal may still be there.
    written: Vec<Range<u64>>,
}

#[derive(Debug, PartialEq, Eq)]
struct Begun {
    bytes: Range<u64>,
    /// That of the lock under which it began; 0 without.
    lock: u64,
    maker: Maker,
}

/// Maker of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    /// A call of this backing.
    Call,
    /// The cache itself, through a ring; or a call after all, which takes the note over.
    Ring,
}

/// Ranges of a list that are kept one by one; with more, it has all bytes.
const RANGES_MAX: usize = 256;

fn range(position: u64, length: usize) -> Range<u64> {
    position..position.saturating_add(length as u64)
}

fn add(ranges: &mut Vec<Range<u64>>, bytes: Range<u64>) {
    let count = ranges.len();
    match ranges.last_mut() {
        Some(last) if last.end == bytes.start => last.end = bytes.end,
        _ if count < RANGES_MAX => ranges.push(bytes),
        _ => ranges[0] = 0..u64::MAX >> 1,
    }
}

impl Reads {
    pub(crate) fn new(disk: DiskFile) -> Self {
        let key = Key::of_file(disk.as_fd()).ok();
        Self { disk, key, noted: Arc::default() }
    }

    pub(super) fn key(&self) -> Option<Key> {
        self.key
    }

    pub(super) fn noted(&self) -> &Arc<Noted> {
        &self.noted
    }
}

impl Noted {
    /// Notes that SHARED was taken, and returns the bytes that may have been read without it,
    /// complete or not.
    pub(crate) fn lock(&self) -> Vec<Range<u64>> {
        let mut noted = self.0.lock();
        noted.is_locked = true;
        noted.locks += 1;
        let mut untrusted = std::mem::take(&mut noted.untrusted);
        untrusted.extend(noted.in_flight.iter().map(|begun| begun.bytes.clone()));
        untrusted
    }

    /// Notes that SHARED is about to be released.
    pub(crate) fn unlock(&self) {
        self.0.lock().is_locked = false;
    }

    /// Calls `read`, which reads these bytes.
    fn noting<T>(&self, bytes: Range<u64>, read: impl FnOnce() -> T) -> T {
        self.begin(bytes.clone(), Maker::Call);
        let answer = read();
        self.end(bytes, Maker::Call);
        answer
    }

    fn begin(&self, bytes: Range<u64>, maker: Maker) {
        let mut noted = self.0.lock();
        // There are never two reads of the same bytes.
        let is_submitted = |begun: &&mut Begun| begun.bytes == bytes && begun.maker == Maker::Ring;
        if let Some(submitted) = noted.in_flight.iter_mut().find(is_submitted) {
            submitted.maker = maker;
            return;
        }
        let lock = if noted.is_locked { noted.locks } else { 0 };
        noted.in_flight.push(Begun { bytes, lock, maker });
    }

    fn end(&self, bytes: Range<u64>, maker: Maker) {
        let mut noted = self.0.lock();
        let is_it = |begun: &Begun| begun.bytes == bytes && begun.maker == maker;
        let found = noted.in_flight.iter().position(is_it);
        let begun = found.map(|at| noted.in_flight.swap_remove(at));
        let is_trusted = |begun: Begun| noted.is_locked && begun.lock == noted.locks;
        if !begun.is_some_and(is_trusted) {
            add(&mut noted.untrusted, bytes);
        }
    }

    /// Notes bytes that this process has written under its exclusive lock.
    pub(super) fn note_write(&self, bytes: Range<u64>) {
        add(&mut self.0.lock().written, bytes);
    }

    /// Notes that no other process can take back what was written.
    pub(super) fn keep_writes(&self) {
        self.0.lock().written.clear();
    }

    /// Has the next [`Self::lock`] return what was written and is not kept.
    pub(super) fn end_writes(&self) {
        let noted = &mut *self.0.lock();
        noted.written.drain(..).for_each(|bytes| add(&mut noted.untrusted, bytes));
    }
}

impl AsFd for Reads {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.disk.as_fd()
    }
}

impl Backing for Reads {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        let bytes = range(position_bytes, target.len());
        self.noted.noting(bytes, || self.disk.read_at(target, position_bytes))
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.disk.write_at(source, position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.disk.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.disk.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.disk.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        self.disk.describe()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Reads {
    fn alignment(&self) -> Alignment {
        self.disk.alignment()
    }

    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        let bytes = range(position_bytes, targets.iter().map(|target| target.len()).sum());
        self.noted.noting(bytes, || self.disk.read_vectored_at(targets, position_bytes))
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        self.disk.write_vectored_at(sources, position_bytes)
    }

    /// Notes a read that the cache is about to make. If it then makes a call instead, the call
    /// takes the note over.
    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        let submission = self.disk.submission(request)?;
        if request.operation == Operation::Read {
            self.noted.begin(range(request.position_bytes, request.length_bytes), Maker::Ring);
        }
        Some(submission)
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        if request.operation == Operation::Read {
            self.noted.end(range(request.position_bytes, request.length_bytes), Maker::Ring);
        }
        self.disk.completed(request, answer)
    }

    fn sync_all(&self) -> io::Result<()> {
        self.disk.sync_all()
    }

    fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> io::Result<()> {
        self.disk.fallocate(mode, bytes)
    }

    fn seek_data(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        self.disk.seek_data(position_bytes)
    }

    fn seek_hole(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        self.disk.seek_hole(position_bytes)
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.disk.identity()
    }

    fn direct(&self) -> DirectStatus {
        self.disk.direct()
    }

    fn watchable(&self) -> Option<BorrowedFd<'_>> {
        self.disk.watchable()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_without_the_lock_or_across_its_end_are_not_trusted() {
        let reads = Noted::default();
        let read = |position| reads.noting(position..position + 10, || ());
        let only = |position| Vec::from_iter(std::iter::once(position..position + 10));
        assert_eq!(reads.lock(), []);
        read(0);
        reads.unlock();
        assert_eq!(reads.lock(), [], "under the lock");
        reads.unlock();
        read(100);
        assert_eq!(reads.lock(), only(100), "without");
        reads.noting(200..210, || reads.unlock());
        assert_eq!(reads.lock(), only(200), "it ended first");
        reads.noting(300..310, || {
            reads.unlock();
            assert_eq!(reads.lock(), only(300), "in flight");
        });
        reads.unlock();
        assert_eq!(reads.lock(), only(300), "once more: it began under another lock");
        reads.unlock();
        (0..1000).for_each(|number| read(number * 100));
        assert_eq!(reads.lock()[0], 0..u64::MAX >> 1);
    }

    #[test]
    fn reads_of_a_ring_are_noted_from_their_submission_to_their_completion() {
        let noted = Noted::default();
        let submit = |position| noted.begin(position..position + 10, Maker::Ring);
        let only = |position| Vec::from_iter(std::iter::once(position..position + 10));
        let complete = |position| noted.end(position..position + 10, Maker::Ring);
        noted.lock();
        submit(0);
        complete(0);
        submit(100);
        noted.unlock();
        assert_eq!(noted.lock(), only(100), "in flight");
        complete(100);
        noted.unlock();
        assert_eq!(noted.lock(), only(100), "it began under another lock");
        // No ring is to be had: the cache calls.
        submit(200);
        noted.unlock();
        noted.lock();
        noted.noting(200..210, || ());
        noted.unlock();
        assert_eq!(noted.lock(), only(200), "it began when it was submitted");
        submit(300);
        noted.noting(300..310, || ());
        noted.unlock();
        assert_eq!(noted.lock(), [], "no note is left");
        complete(400);
        assert_eq!(noted.lock(), only(400), "of nothing known");
    }

    /// Another process rolls back a transaction that failed.
    #[test]
    fn writes_are_trusted_once_they_are_committed() {
        let noted = Noted::default();
        let write = |position: u64| noted.note_write(position..position + 10);
        write(0);
        write(10);
        noted.keep_writes();
        noted.end_writes();
        assert_eq!(noted.lock(), []);
        write(20);
        noted.keep_writes();
        write(30);
        write(50);
        noted.end_writes();
        assert_eq!(noted.lock(), [30..40, 50..60], "after the commit");
        (0..1000).for_each(|number| write(number * 100));
        noted.end_writes();
        assert_eq!(noted.lock()[0], 0..u64::MAX >> 1);
        assert_eq!(noted.lock(), []);
    }
}
