//! Tests of `transfer.rs` over a backing in memory that follows a script.

use std::collections::VecDeque;
use std::io;
use std::sync::Mutex;

use crate::error::Error;
use crate::io::request::POSITION_BYTES_MAX;
use crate::io::transfer::{REFUSALS_MAX, STALLS_MAX, read_full, write_full};
use crate::io::*;
use crate::sys::INTERRUPTIONS_MAX;

/// Scripted step instead of a whole transfer.
#[derive(Clone, Copy, Debug)]
enum Answer {
    /// Transfer at most this many bytes.
    Short(usize),
    Errno(i32),
    /// Claim to have transferred this many bytes.
    Claim(usize),
    /// Truncate the bytes to this length, then transfer.
    Cut(usize),
}

use Answer::{Claim, Cut, Errno, Short};

#[derive(Debug)]
struct Scripted {
    bytes: Mutex<Vec<u8>>,
    script: Mutex<VecDeque<Answer>>,
    /// Position and length of every attempt.
    attempts: Mutex<Vec<(u64, usize)>>,
    alignment: Alignment,
}

impl Scripted {
    fn new(bytes: &[u8], script: &[Answer]) -> Self {
        Self {
            bytes: Mutex::new(bytes.to_vec()),
            script: Mutex::new(script.iter().copied().collect()),
            attempts: Mutex::new(Vec::new()),
            alignment: Alignment::NONE,
        }
    }

    fn aligned(mut self, memory_bytes: u64, offset_bytes: u64) -> Self {
        self.alignment = Alignment { memory_bytes, offset_bytes };
        self
    }

    fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    fn attempts(&self) -> Vec<(u64, usize)> {
        self.attempts.lock().unwrap().clone()
    }

    /// Returns how many bytes to transfer now, or the result to return.
    fn attempt(&self, position_bytes: u64, length: usize) -> Result<usize, io::Result<usize>> {
        self.attempts.lock().unwrap().push((position_bytes, length));
        match self.script.lock().unwrap().pop_front() {
            None => Ok(length),
            Some(Short(count)) => Ok(count.min(length)),
            Some(Errno(errno)) => Err(Err(io::Error::from_raw_os_error(errno))),
            Some(Claim(count)) => Err(Ok(count)),
            Some(Cut(count)) => {
                self.bytes.lock().unwrap().truncate(count);
                Ok(length)
            }
        }
    }
}

impl Backing for Scripted {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        let count = match self.attempt(position_bytes, target.len()) {
            Ok(count) => count,
            Err(answer) => return answer,
        };
        let bytes = self.bytes.lock().unwrap();
        let from = bytes.len().min(position_bytes as usize);
        let count = count.min(bytes.len() - from);
        target.copy_from_slice(0, &bytes[from..from + count]);
        Ok(count)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        let count = match self.attempt(position_bytes, source.len()) {
            Ok(count) => count,
            Err(answer) => return answer,
        };
        let mut bytes = self.bytes.lock().unwrap();
        let end = position_bytes as usize + count;
        if end > bytes.len() {
            bytes.resize(end, 0);
        }
        source.prefix(count).copy_to_slice(0, &mut bytes[position_bytes as usize..end]);
        Ok(count)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.attempt(0, 0).map(drop).or_else(|answer| answer.map(drop))
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.sync_data().map(|()| self.bytes().len() as u64)
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.sync_data()?;
        self.bytes.lock().unwrap().resize(length_bytes as usize, 0);
        Ok(())
    }

    fn describe(&self) -> String {
        "scripted".to_owned()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Scripted {
    fn alignment(&self) -> Alignment {
        self.alignment
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 7 + i / 256 + 1) as u8).collect()
}

fn read(backing: &Scripted, length: usize, position_bytes: u64) -> Result<Vec<u8>, Error> {
    let mut buffer = IoBuffer::new(length);
    let count = read_full(backing, &mut [buffer.target()], position_bytes, None)?;
    Ok(buffer.as_bytes()[..count].to_vec())
}

fn write(backing: &Scripted, bytes: &[u8], position_bytes: u64) -> Result<(), Error> {
    write_full(backing, &[IoBuffer::from_bytes(bytes).source()], position_bytes, None).map(drop)
}

#[test]
fn a_whole_transfer_takes_one_attempt() {
    let backing = Scripted::new(&pattern(8192), &[]);
    assert_eq!(read(&backing, 4096, 4096).unwrap(), pattern(8192)[4096..]);
    assert_eq!(backing.attempts(), [(4096, 4096)]);
    write(&backing, &[9; 4096], 4096).unwrap();
    assert_eq!(backing.attempts().len(), 2);
    assert_eq!(backing.bytes(), [&pattern(4096)[..], &[9; 4096]].concat());
}

#[test]
fn short_reads_are_continued_up_to_the_end_of_the_file() {
    let backing = Scripted::new(&pattern(5000), &[Short(1), Short(1000), Short(3998)]);
    assert_eq!(read(&backing, 8192, 0).unwrap(), pattern(5000));
    assert_eq!(
        backing.attempts(),
        [(0, 8192), (1, 8191), (1001, 7191), (4999, 3193), (5000, 3192)]
    );
}

#[test]
fn a_continued_transfer_starts_at_an_aligned_position() {
    let backing = Scripted::new(&pattern(5000), &[Short(700), Short(900)]).aligned(4, 512);
    assert_eq!(read(&backing, 8192, 0).unwrap(), pattern(5000));
    assert_eq!(backing.attempts(), [(0, 8192), (512, 7680), (1024, 7168), (4608, 3584), (0, 0)]);

    let backing = Scripted::new(&[], &[Short(1500), Short(600)]).aligned(1024, 512);
    write(&backing, &pattern(4000), 4096).unwrap();
    assert_eq!(backing.attempts(), [(4096, 4000), (5120, 2976), (5120, 2976)]);
    assert_eq!(backing.bytes()[4096..], pattern(4000));
    assert_eq!(backing.bytes().len(), 8096, "a continued write must not pass its end");
}

#[test]
fn a_read_that_stalls_in_the_middle_is_not_taken_for_the_end() {
    let script = [Short(700), Short(100), Short(188)];
    let backing = Scripted::new(&pattern(5000), &script).aligned(4, 512);
    assert_eq!(read(&backing, 8192, 0).unwrap(), pattern(5000));
    let mut script = vec![Short(700)];
    script.extend(vec![Short(188); STALLS_MAX as usize + 1]);
    // The length is queried in between, which takes a step of the script, too.
    let script: Vec<_> = script.into_iter().flat_map(|answer| [answer, Short(188)]).collect();
    let backing = Scripted::new(&pattern(5000), &script).aligned(4, 512);
    let error = read(&backing, 8192, 0).unwrap_err();
    assert_eq!(error.range(), Some(700..8192));
    assert_eq!(io::Error::from(error).kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_read_at_or_beyond_the_end_returns_nothing() {
    let backing = Scripted::new(&pattern(4096), &[]);
    assert_eq!(read(&backing, 4096, 4096).unwrap(), []);
    assert_eq!(read(&backing, 4096, 1 << 40).unwrap(), []);
    assert_eq!(read(&backing, 0, 0).unwrap(), []);
}

#[test]
fn a_file_truncated_during_a_read_ends_there() {
    let backing = Scripted::new(&pattern(5000), &[Short(5000), Cut(4700)]).aligned(512, 512);
    assert_eq!(read(&backing, 8192, 0).unwrap(), pattern(4700));
}

#[test]
fn interruptions_are_retried_at_once_refusals_after_a_while() {
    let script = [Errno(libc::EINTR), Short(10), Errno(libc::EAGAIN), Errno(libc::EINTR)];
    let backing = Scripted::new(&pattern(100), &script);
    assert_eq!(read(&backing, 100, 0).unwrap(), pattern(100));
    let backing = Scripted::new(&[], &script);
    write(&backing, &pattern(100), 0).unwrap();
    assert_eq!(backing.bytes(), pattern(100));
    let backing = Scripted::new(&pattern(9), &script[2..]);
    sync_data(&backing).unwrap();
    let backing = Scripted::new(&pattern(9), &script[2..]);
    set_len(&backing, 5).unwrap();
    assert_eq!(backing.bytes(), pattern(5));
}

#[test]
fn retries_are_bounded_and_start_over_after_progress() {
    let refusals = REFUSALS_MAX as usize;
    let backing = Scripted::new(&pattern(100), &vec![Errno(libc::EAGAIN); refusals + 1]);
    let error = read(&backing, 100, 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
    assert_eq!(backing.attempts().len(), refusals + 1);

    let mut script = vec![Errno(libc::EAGAIN); refusals];
    script.push(Short(50));
    script.extend(vec![Errno(libc::EAGAIN); refusals]);
    assert_eq!(read(&Scripted::new(&pattern(100), &script), 100, 0).unwrap(), pattern(100));

    let interruptions = INTERRUPTIONS_MAX as usize;
    let backing = Scripted::new(&[], &vec![Errno(libc::EINTR); interruptions + 1]);
    let error = write(&backing, &[1], 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINTR));
}

#[test]
fn an_error_reports_the_missing_bytes_and_ends_the_transfer() {
    let backing = Scripted::new(&pattern(8192), &[Short(1000), Errno(libc::EIO)]);
    let error = read(&backing, 4096, 4096).unwrap_err();
    assert_eq!((error.file(), error.range()), (Some("scripted"), Some(5096..8192)));
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert_eq!(
        error.to_string(),
        "scripted: read of 3096 bytes at position 5096 failed: Input/output error (os error 5)"
    );
    assert_eq!(backing.attempts().len(), 2);

    let backing = Scripted::new(&[], &[Short(700), Errno(libc::ENOSPC)]).aligned(512, 512);
    let error = write(&backing, &pattern(4096), 0).unwrap_err();
    assert!(error.to_string().contains("write of 3396 bytes at position 700 "), "{error}");
    assert_eq!(error.range(), Some(700..4096));
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
}

#[test]
fn a_write_without_progress_is_an_error() {
    let backing = Scripted::new(&[], &[Short(10), Short(0)]);
    let error = write(&backing, &pattern(100), 0).unwrap_err();
    assert_eq!(error.range(), Some(10..100));
    assert_eq!(io::Error::from(error).kind(), io::ErrorKind::WriteZero);
}

#[test]
fn a_backing_that_claims_too_much_is_an_error() {
    let backing = Scripted::new(&pattern(100), &[Claim(101)]);
    let error = io::Error::from(read(&backing, 100, 0).unwrap_err());
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    let backing = Scripted::new(&[], &[Short(60), Claim(41)]);
    let error = write(&backing, &pattern(100), 0).unwrap_err();
    assert_eq!(io::Error::from(error).kind(), io::ErrorKind::InvalidData);
}

#[test]
fn ranges_past_two_to_the_63_never_reach_the_backing() {
    let backing = Scripted::new(&[], &[]);
    let errors = [
        read(&backing, 4096, POSITION_BYTES_MAX - 4095).unwrap_err(),
        read(&backing, 1, u64::MAX).unwrap_err(),
        write(&backing, &[1], POSITION_BYTES_MAX).unwrap_err(),
        set_len(&backing, 1 << 63).unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().ends_with("do not end below 2^63"), "{error}");
    }
    assert_eq!(backing.attempts(), []);
    assert_eq!(read(&backing, 4095, POSITION_BYTES_MAX - 4095).unwrap(), []);
}

#[test]
fn operations_without_bytes_fail_with_their_own_names() {
    let fails = || Scripted::new(&pattern(9), &[Errno(libc::EIO)]);
    let errors = [
        sync_data(&fails()).unwrap_err(),
        sync_all(&fails()).unwrap_err(),
        set_len(&fails(), 5).unwrap_err(),
        len_bytes(&fails()).unwrap_err(),
    ];
    let names = ["sync of data", "sync", "change of length to 5 bytes", "query of the length"];
    for (error, name) in errors.iter().zip(names) {
        let text = format!("scripted: {name} failed: Input/output error (os error 5)");
        assert_eq!(error.to_string(), text);
    }
    assert!(errors.iter().all(|error| error.raw_os_error() == Some(libc::EIO)));
    assert_eq!(len_bytes(&Scripted::new(&pattern(9), &[])).unwrap(), 9);
}
