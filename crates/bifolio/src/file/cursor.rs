//! `std::io` over a file: a cursor that reads, writes and seeks, vectored calls, and the calls of
//! `std::os::unix::fs::FileExt`.
//!
//! Nothing here caches or orders anything by itself: each call is one or several calls of
//! [`File::read_at`] or [`File::write_at`], with their errors as `std::io::Error`.

use super::File;
use crate::error::Result;
use std::io::{self, BufRead, IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

/// Bytes that [`FileCursor::fill_buf`] reads at once.
const BUFFER_BYTES: usize = 64 << 10;

/// A position in a [`File`], for code that wants [`Read`], [`Write`], [`Seek`] or [`BufRead`].
///
/// Each cursor has a position of its own; any number may be in use, also in several threads.
/// `read` and `write` go straight to the cache. Only `fill_buf` (and what is built on it, such as
/// `lines`) keeps bytes: up to 64 KiB, as they were when they were read. A write through another
/// cursor or handle is not seen in those. `flush` does nothing: [`File::sync_data`] makes bytes
/// durable.
///
/// Errors are [`std::io::Error`] with the [`Error`](crate::Error) inside.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::io::{BufRead, Seek, SeekFrom, Write};
///
/// let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
/// let file = cache.memory_file("lines")?;
/// let mut cursor = file.cursor(0);
/// write!(cursor, "one\ntwo\n")?;
/// cursor.seek(SeekFrom::Start(0))?;
/// let lines = cursor.lines().collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(lines, ["one", "two"]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FileCursor {
    file: File,
    position: u64,
    /// Bytes of the file from `buffer_position` on, as `fill_buf` read them.
    buffer: Vec<u8>,
    buffer_position: u64,
}

impl FileCursor {
    /// The position of the next byte that is read or written.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The file that the cursor reads and writes.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The part of the buffer that is at and after the position.
    fn buffered(&self) -> &[u8] {
        let skipped = self.position.checked_sub(self.buffer_position);
        let skipped = skipped.and_then(|skipped| usize::try_from(skipped).ok());
        skipped.and_then(|skipped| self.buffer.get(skipped..)).unwrap_or(&[])
    }
}

impl Read for FileCursor {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(buffer, self.position)?;
        self.position += count as u64;
        Ok(count)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let count = self.file.read_vectored_at(buffers, self.position)?;
        self.position += count as u64;
        Ok(count)
    }
}

impl Write for FileCursor {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.buffer.clear();
        let count = self.file.write_at(buffer, self.position)?;
        self.position += count as u64;
        Ok(count)
    }

    fn write_vectored(&mut self, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        self.buffer.clear();
        let count = self.file.write_vectored_at(buffers, self.position)?;
        self.position += count as u64;
        Ok(count)
    }

    /// Does nothing: written bytes are in the cache.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for FileCursor {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(offset) => self.file.len().checked_add_signed(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        self.position = position.ok_or_else(|| {
            let problem = format!("cannot seek by {to:?}: the position is out of range");
            io::Error::new(io::ErrorKind::InvalidInput, problem)
        })?;
        Ok(self.position)
    }
}

impl BufRead for FileCursor {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.buffered().is_empty() {
            self.buffer.resize(BUFFER_BYTES, 0);
            self.buffer_position = self.position;
            let read = self.file.read_at(&mut self.buffer, self.position);
            self.buffer.truncate(*read.as_ref().unwrap_or(&0));
            read?;
        }
        Ok(self.buffered())
    }

    fn consume(&mut self, count: usize) {
        self.position += count.min(self.buffered().len()) as u64;
    }
}

impl File {
    /// Returns a cursor at `position`. It keeps the file open, like a clone of this handle.
    pub fn cursor(&self, position: u64) -> FileCursor {
        let (buffer, buffer_position) = (Vec::new(), position);
        FileCursor { file: self.clone(), position, buffer, buffer_position }
    }

    /// Reads into `buffers` one after the other, from `position` on, and returns the number of
    /// bytes read. It is less than the buffers hold if the file ends before, or if a read after the
    /// first fails: the next call at that place returns the error.
    ///
    /// Each buffer is read like one [`File::read_at`], with its guarantees and blocking.
    ///
    /// # Errors
    /// As [`File::read_at`].
    pub fn read_vectored_at(&self, buffers: &mut [IoSliceMut<'_>], position: u64) -> Result<usize> {
        one_by_one(buffers, |buffer, done| {
            let count = self.read_at(buffer, position + done)?;
            Ok((count, count < buffer.len()))
        })
    }

    /// Writes `buffers` one after the other, from `position` on, and returns the number of bytes
    /// written. It is less than the buffers hold if a write after the first fails: the next call at
    /// that place returns the error.
    ///
    /// Each buffer is written like one [`File::write_at`], with its guarantees and blocking.
    ///
    /// # Errors
    /// As [`File::write_at`].
    pub fn write_vectored_at(&self, buffers: &[IoSlice<'_>], position: u64) -> Result<usize> {
        one_by_one(buffers, |buffer, done| {
            let count = self.write_at(buffer, position + done)?;
            Ok((count, count < buffer.len()))
        })
    }
}

/// Transfers one buffer after the other until one is short or fails. `transfer` gets the number of
/// bytes before its buffer, and returns how many it moved and whether these are too few.
///
/// # Errors
/// The error of the first buffer that moves anything.
fn one_by_one<B>(
    buffers: impl IntoIterator<Item = B>,
    mut transfer: impl FnMut(B, u64) -> Result<(usize, bool)>,
) -> Result<usize> {
    let mut done = 0;
    for buffer in buffers {
        match transfer(buffer, done as u64) {
            Ok((count, is_short)) => {
                done += count;
                if is_short {
                    break;
                }
            }
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// The calls of a `std::fs::File`, for code that is generic over them. Where the type is known, the
/// methods of [`File`] itself are called, which return [`Error`](crate::Error).
impl FileExt for File {
    fn read_at(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        Ok(Self::read_at(self, buffer, position)?)
    }

    fn write_at(&self, buffer: &[u8], position: u64) -> io::Result<usize> {
        Ok(Self::write_at(self, buffer, position)?)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Cache, OpenOptions};
    use std::sync::atomic::{AtomicBool, Ordering};

    fn memory_file(bytes: &[u8]) -> File {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.memory_file("cursor").unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    #[test]
    fn seeks_count_from_the_start_the_end_and_the_position() {
        let mut cursor = memory_file(b"0123456789").cursor(2);
        let mut byte = [0];
        cursor.read_exact(&mut byte).unwrap();
        assert_eq!((byte[0], cursor.position()), (b'2', 3));
        assert_eq!(cursor.seek(SeekFrom::Current(-1)).unwrap(), 2);
        assert_eq!(cursor.seek(SeekFrom::End(-1)).unwrap(), 9);
        let mut rest = Vec::new();
        cursor.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"9");
        assert_eq!(cursor.seek(SeekFrom::End(5)).unwrap(), 15);
        assert_eq!(cursor.read(&mut byte).unwrap(), 0, "past the end");
        let error = cursor.seek(SeekFrom::Current(-16)).unwrap_err();
        assert_eq!((error.kind(), cursor.position()), (io::ErrorKind::InvalidInput, 15));
    }

    #[test]
    fn a_buffered_read_sees_what_its_cursor_wrote() {
        let mut cursor = memory_file(b"one\ntwo\n").cursor(0);
        let mut line = String::new();
        cursor.read_line(&mut line).unwrap();
        assert_eq!((line.as_str(), cursor.position()), ("one\n", 4));
        cursor.write_all(b"TWO").unwrap();
        cursor.seek(SeekFrom::Start(4)).unwrap();
        line.clear();
        cursor.read_line(&mut line).unwrap();
        assert_eq!(line, "TWO\n");
        assert!(cursor.fill_buf().unwrap().is_empty(), "at the end");
        cursor.file().append(b"three\n").unwrap();
        line.clear();
        cursor.read_line(&mut line).unwrap();
        assert_eq!(line, "three\n");
        // Back into what is buffered, forth beyond it, and before it.
        for position in [8, 13, 0] {
            cursor.seek(SeekFrom::Start(position)).unwrap();
            let expected = b"one\nTWO\nthree\n"[position as usize];
            assert_eq!(cursor.fill_buf().unwrap()[0], expected, "{position}");
        }
    }

    #[test]
    fn vectored_calls_go_on_from_buffer_to_buffer() {
        let file = memory_file(b"");
        let parts = [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cde")];
        assert_eq!(file.write_vectored_at(&parts, 4094).unwrap(), 5);
        let (mut first, mut second) = ([0; 3], [0; 9]);
        let mut buffers = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
        assert_eq!(file.read_vectored_at(&mut buffers, 4094).unwrap(), 5);
        assert_eq!((&first, &second[..2]), (b"abc", &b"de"[..]));
    }

    #[test]
    fn generic_code_reads_and_writes_through_file_ext() {
        fn copy(file: &impl FileExt) -> io::Result<()> {
            let mut bytes = [0; 4];
            file.read_exact_at(&mut bytes, 0)?;
            file.write_all_at(&bytes, 4)
        }
        let file = memory_file(b"abcd");
        copy(&file).unwrap();
        assert_eq!(file.len(), 8);
        let empty = memory_file(b"");
        let error = copy(&empty).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn concurrent_appends_get_ranges_of_their_own() {
        const THREADS: u8 = 4;
        const RECORDS: usize = 200;
        let file = memory_file(b"");
        let record = |thread: u8| vec![thread; 700 + usize::from(thread)];
        std::thread::scope(|scope| {
            for thread in 1..=THREADS {
                let file = &file;
                scope.spawn(move || {
                    for _ in 0..RECORDS {
                        let at = file.append(&record(thread)).unwrap();
                        let mut back = record(0);
                        back.resize(record(thread).len(), 0);
                        file.read_exact_at(&mut back, at).unwrap();
                        assert_eq!(back, record(thread));
                    }
                });
            }
        });
        let total: usize = (1..=THREADS).map(|thread| record(thread).len() * RECORDS).sum();
        assert_eq!(file.len(), total as u64, "no gap and no overlap");
    }

    #[test]
    fn an_append_that_fails_leaves_the_length() {
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).len_max(8 << 20);
        let file = cache.memory_file_with("too long", &options).unwrap();
        file.append(b"kept").unwrap();
        // More than the bound, and there is no swap.
        let error = file.append(&vec![1; 4 << 20]).unwrap_err();
        assert_eq!(file.len(), 4, "{error}");
        let error = file.append(&vec![1; 9 << 20]).unwrap_err();
        assert_eq!(error.errno(), libc::EFBIG);
        assert_eq!(file.append(b"next").unwrap(), 4);
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"keptnext");
    }

    #[test]
    fn readers_meet_no_gap_while_a_thread_appends() {
        let file = memory_file(b"");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..100 {
                    file.append(&[7; 5000]).unwrap();
                }
                is_over.store(true, Ordering::Release);
            });
            while !is_over.load(Ordering::Acquire) {
                let len_bytes = file.len();
                let start = len_bytes.saturating_sub(5000);
                let mut tail = vec![0; (len_bytes - start) as usize];
                file.read_exact_at(&mut tail, start).unwrap();
                assert!(tail.iter().all(|byte| *byte == 7), "zeros before {len_bytes}");
            }
        });
    }
}
