//! Keeps pages beyond their unmapping: a pipe holds the pages themselves, not copies.
//!
//! A pipe holds at most 256 pages, or what the system allows: 16, and 2 for a user whose pipes
//! exceed `fs.pipe-user-pages-soft` together. As many pipes as needed are created if they are
//! large, and otherwise at most eight more: then the capacity is lower than requested. A forked
//! child must not use its parent's pipes.
//!
//! # Safety
//! Lends pages of the caller to a pipe, and writes what it took to an address of the caller.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, fcntl_getpipe_size, fcntl_setpipe_size};

use super::pages::PageRange;
use crate::sys::answer_of;
use crate::sys::file::pipe;
use crate::sys::memory::PAGE_BYTES;

/// Capacity of a pipe, in pages, that any user may request.
const PIPE_PAGES_MAX: usize = 256;
const SMALL_PIPES_MAX: usize = 8;
/// Ranges per call; the kernel accepts at most 1024.
const RANGES_MAX: usize = 1024;
const DISCARD_BYTES: usize = 4 * PAGE_BYTES;

#[derive(Debug)]
struct Pipe {
    reader: OwnedFd,
    writer: OwnedFd,
    pages_max: usize,
    kept_bytes: usize,
}

impl Pipe {
    /// Creates a pipe for `pages_max` pages, or for as many as the system allows.
    fn new(pages_max: usize, may_be_large: bool) -> io::Result<Self> {
        let (reader, writer) = pipe(PipeFlags::NONBLOCK)?;
        let wished_pages = if may_be_large { pages_max.min(PIPE_PAGES_MAX) } else { 1 };
        let wished_bytes = wished_pages.next_power_of_two() * PAGE_BYTES;
        let size_bytes =
            fcntl_setpipe_size(&writer, wished_bytes).or_else(|_| fcntl_getpipe_size(&writer))?;
        let pages_max = size_bytes / PAGE_BYTES;
        if pages_max == 0 {
            return Err(io::Error::other(format!("a pipe of {size_bytes} bytes")));
        }
        Ok(Self { reader, writer, pages_max, kept_bytes: 0 })
    }

    /// Keeps the pages of `ranges`, from the first one on, until the pipe is full. Removes them
    /// from the front and returns how many ranges were kept in full.
    ///
    /// # Safety
    /// As for [`PagePipe::keep`].
    unsafe fn keep(&mut self, ranges: &mut [PageRange]) -> io::Result<usize> {
        let mut done = 0;
        while done < ranges.len() {
            let part = &mut ranges[done..];
            let part_ranges = part.len().min(RANGES_MAX);
            // SAFETY: a `PageRange` is laid out as an `iovec`; the caller guarantees the pages.
            // Without the gift flag they stay the caller's.
            let answer = unsafe {
                libc::vmsplice(
                    self.writer.as_raw_fd(),
                    part.as_ptr().cast(),
                    part_ranges,
                    libc::SPLICE_F_NONBLOCK,
                )
            };
            match answer_of(answer) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(kept_bytes) => {
                    self.kept_bytes += kept_bytes;
                    done += advance(part, kept_bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Moves the next `length_bytes`, which the pipe must hold, to `target`.
    ///
    /// # Safety
    /// As for [`PagePipe::take`].
    unsafe fn take(&mut self, target: *mut u8, length_bytes: usize) -> io::Result<()> {
        let mut done_bytes = 0;
        while done_bytes < length_bytes {
            let place = target.wrapping_add(done_bytes).cast();
            // SAFETY: the rest of the caller's memory.
            let answer =
                unsafe { libc::read(self.reader.as_raw_fd(), place, length_bytes - done_bytes) };
            match answer_of(answer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(taken_bytes) => {
                    self.kept_bytes -= taken_bytes;
                    done_bytes += taken_bytes;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn discard(&mut self) {
        let mut scratch = [0; DISCARD_BYTES];
        while self.kept_bytes > 0 {
            match rustix::io::read(&self.reader, &mut scratch) {
                Err(Errno::INTR) => {}
                Ok(discarded_bytes @ 1..) => {
                    self.kept_bytes = self.kept_bytes.saturating_sub(discarded_bytes);
                }
                // The pipe was read from or closed elsewhere: nothing is left.
                _ => self.kept_bytes = 0,
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct PagePipe {
    pipes: Vec<Pipe>,
    /// Ranges still to be kept during a call; stays allocated.
    rest: Vec<PageRange>,
}

impl PagePipe {
    /// Creates pipes for `pages_max` pages together, or for fewer, at least one. Only small ones
    /// unless `may_be_large`.
    pub(crate) fn new(pages_max: usize, may_be_large: bool) -> io::Result<Self> {
        let pipes_max = pages_max.div_ceil(PIPE_PAGES_MAX) + SMALL_PIPES_MAX;
        let mut made = Self { pipes: vec![Pipe::new(pages_max, may_be_large)?], rest: Vec::new() };
        while made.places() < pages_max && made.pipes.len() < pipes_max {
            // Out of descriptors: use the pipes made so far.
            let Ok(pipe) = Pipe::new(pages_max - made.places(), may_be_large) else { break };
            made.pipes.push(pipe);
        }
        Ok(made)
    }

    pub(crate) fn places(&self) -> usize {
        self.pipes.iter().map(|pipe| pipe.pages_max).sum()
    }

    /// Keeps the pages of `ranges`, in order; all of them or, with an error, none. Previously kept
    /// pages must have been taken or discarded. Never waits for room in a pipe.
    ///
    /// # Safety
    /// The ranges must be whole pages of private memory of this crate, and all of them present: a
    /// missing one would be faulted in, or waited for.
    pub(crate) unsafe fn keep(&mut self, ranges: &[PageRange]) -> io::Result<()> {
        assert!(self.pipes.iter().all(|pipe| pipe.kept_bytes == 0), "pages are already kept");
        self.rest.clear();
        self.rest.extend_from_slice(ranges);
        let mut rest = &mut self.rest[..];
        for pipe in &mut self.pipes {
            // SAFETY: parts of the caller's ranges.
            match unsafe { pipe.keep(rest) } {
                Ok(ranges_done) => rest = &mut rest[ranges_done..],
                Err(error) => {
                    self.discard();
                    return Err(error);
                }
            }
        }
        if rest.is_empty() {
            return Ok(());
        }
        self.discard();
        Err(io::Error::new(io::ErrorKind::StorageFull, "more pages than the pipes can hold"))
    }

    /// Moves the next `length_bytes` of the kept pages to `target`, in the order in which they were
    /// kept, continuing from the last call. Fails with UnexpectedEof if fewer are kept.
    ///
    /// # Safety
    /// `target` must be writable for `length_bytes` by the kernel.
    pub(crate) unsafe fn take(&mut self, target: *mut u8, length_bytes: usize) -> io::Result<()> {
        let mut done_bytes = 0;
        for pipe in self.pipes.iter_mut().filter(|pipe| pipe.kept_bytes > 0) {
            let part_bytes = pipe.kept_bytes.min(length_bytes - done_bytes);
            // SAFETY: the next part of the caller's memory.
            unsafe { pipe.take(target.wrapping_add(done_bytes), part_bytes) }?;
            done_bytes += part_bytes;
        }
        if done_bytes == length_bytes { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    pub(crate) fn discard(&mut self) {
        for pipe in &mut self.pipes {
            pipe.discard();
        }
    }
}

/// Removes `done_bytes` from the front of `ranges`. Returns how many ranges were removed in full.
fn advance(ranges: &mut [PageRange], mut done_bytes: usize) -> usize {
    for (i, range) in ranges.iter_mut().enumerate() {
        if done_bytes < range.length_bytes {
            range.start = range.start.wrapping_add(done_bytes);
            range.length_bytes -= done_bytes;
            return i;
        }
        done_bytes -= range.length_bytes;
    }
    ranges.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::maps::kernel::pages::Unmapper;
    use crate::maps::kernel::userfault::tests::Scratch;
    use crate::sys::memory::Reservation;
    use crate::sys::probe::{Feature, Features};

    /// Returns memory whose pages begin with their index plus `first`.
    fn numbered(pages: usize, first: u32) -> Reservation {
        let memory = Reservation::new(pages * PAGE_BYTES, PAGE_BYTES).unwrap();
        memory.refuse_huge_pages();
        for page in 0..pages {
            let place = memory.base.wrapping_add(page * PAGE_BYTES).cast::<u32>();
            // SAFETY: aligned, and inside the memory.
            unsafe { place.write(first + page as u32) };
        }
        memory
    }

    fn range(memory: &Reservation, page: usize, pages: usize) -> PageRange {
        let start = memory.base.wrapping_add(page * PAGE_BYTES);
        PageRange { start, length_bytes: pages * PAGE_BYTES }
    }

    fn keep(page_pipe: &mut PagePipe, ranges: &[PageRange]) -> io::Result<()> {
        // SAFETY: all tests keep memory of their own.
        unsafe { page_pipe.keep(ranges) }
    }

    /// Takes `pages` pages. Returns the numbers they begin with.
    fn take(page_pipe: &mut PagePipe, pages: usize) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0_u8; pages * PAGE_BYTES];
        // SAFETY: the vector's own bytes.
        unsafe { page_pipe.take(bytes.as_mut_ptr(), bytes.len()) }?;
        let number = |page: &[u8]| u32::from_ne_bytes(page[..4].try_into().unwrap());
        Ok(bytes.chunks_exact(PAGE_BYTES).map(number).collect())
    }

    fn error_of<T: std::fmt::Debug>(answer: io::Result<T>) -> io::ErrorKind {
        answer.unwrap_err().kind()
    }

    #[test]
    fn pages_are_taken_in_order_after_they_were_unmapped() {
        let memory = numbered(600, 0);
        let mut page_pipe = PagePipe::new(600, true).unwrap();
        // Ranges that begin and end inside one pipe, and that cross pipes.
        let ranges = [
            range(&memory, 500, 100),
            range(&memory, 0, 1),
            range(&memory, 2, 300),
            range(&memory, 400, 1),
        ];
        for _ in 0..3 {
            keep(&mut page_pipe, &ranges).unwrap();
            // A store to a kept page is seen.
            // SAFETY: inside the memory, aligned.
            unsafe { memory.base.cast::<u32>().write_volatile(7777) };
            let unmapper = Unmapper::new(&Features::probe(&[]));
            // SAFETY: memory of the test's own.
            let unmapped = unsafe { unmapper.unmap(&ranges) };
            assert_eq!(unmapped.ranges_done, 4);
            let mut expected: Vec<u32> = (500..600).collect();
            expected.push(7777);
            expected.extend(2..302);
            expected.push(400);
            let mut taken = take(&mut page_pipe, 1).unwrap();
            taken.extend(take(&mut page_pipe, 301).unwrap());
            taken.extend(take(&mut page_pipe, 100).unwrap());
            assert_eq!(taken, expected);
            assert_eq!(error_of(take(&mut page_pipe, 1)), io::ErrorKind::UnexpectedEof);
            for page in (500..600).chain(0..1).chain(2..302).chain(400..401) {
                let place = memory.base.wrapping_add(page * PAGE_BYTES).cast::<u32>();
                // SAFETY: inside the memory, aligned.
                unsafe { place.write(page as u32) };
            }
        }
    }

    #[test]
    fn more_pages_than_fit_are_refused_as_a_whole() {
        let memory = numbered(300, 0);
        let mut page_pipe = PagePipe::new(260, true).unwrap();
        let places = page_pipe.places();
        assert!((260..300).contains(&places), "{places}");
        assert_eq!(
            error_of(keep(&mut page_pipe, &[range(&memory, 0, 300)])),
            io::ErrorKind::StorageFull
        );
        assert_eq!(error_of(take(&mut page_pipe, 1)), io::ErrorKind::UnexpectedEof);
        keep(&mut page_pipe, &[range(&memory, 0, places)]).unwrap();
        assert_eq!(take(&mut page_pipe, places).unwrap(), (0..places as u32).collect::<Vec<_>>());
    }

    #[test]
    fn a_page_that_cannot_be_kept_fails_the_whole_call() {
        let memory = numbered(4, 0);
        let mut page_pipe = PagePipe::new(4, true).unwrap();
        let hole = range(&memory, 2, 1);
        // SAFETY: makes a page of this test inaccessible; it is not accessed any more.
        let answer = unsafe { libc::mprotect(hole.start.cast(), PAGE_BYTES, libc::PROT_NONE) };
        assert_eq!(answer, 0);
        let ranges = [range(&memory, 0, 1), hole, range(&memory, 3, 1)];
        let error = keep(&mut page_pipe, &ranges).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        keep(&mut page_pipe, &[range(&memory, 3, 1), range(&memory, 0, 2)]).unwrap();
        assert_eq!(take(&mut page_pipe, 2).unwrap(), [3, 0]);
        page_pipe.discard();
        assert_eq!(error_of(take(&mut page_pipe, 1)), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    #[should_panic(expected = "already kept")]
    fn keeping_twice_without_taking_panics() {
        let memory = numbered(2, 0);
        let mut page_pipe = PagePipe::new(2, true).unwrap();
        keep(&mut page_pipe, &[range(&memory, 0, 1)]).unwrap();
        let _ = keep(&mut page_pipe, &[range(&memory, 1, 1)]);
    }

    #[test]
    fn a_store_to_a_kept_page_that_was_protected_is_taken() {
        let Some(scratch) = Scratch::new(1, &[Feature::WriteProtectAsync]) else { return };
        let mut page_pipe = PagePipe::new(1, true).unwrap();
        scratch.install(0, &[5], true).1.unwrap();
        keep(&mut page_pipe, &[scratch.range(0, 1)]).unwrap();
        scratch.store(0, 6);
        scratch.memory.release(0, PAGE_BYTES).unwrap();
        let mut taken = [0_u8; PAGE_BYTES];
        // SAFETY: an array of a page.
        unsafe { page_pipe.take(taken.as_mut_ptr(), PAGE_BYTES) }.unwrap();
        assert_eq!(taken[0], 6);
        assert_eq!(taken[1..], [5; PAGE_BYTES - 1]);
    }
}
