//! Scenes of real files that are closed and opened again in a cache that keeps the pages of closed
//! files (`closed_bytes_max`), and that are changed from outside while closed. Each file is
//! compared with a vector.
//!
//! Threads share the cache, its memory and its list of closed files. Each file belongs to one
//! thread at a time, for a session: it is opened if it has no handle, used, and perhaps closed. Its
//! maximum length is low, and raised when it is reached.

use crate::history::Violation;
use bifolio::{Advice, Cache, ErrorKind, File, OpenOptions};
use fastrand::Rng;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Number of sessions, for the detection of hangs.
pub static PROGRESS: AtomicU64 = AtomicU64::new(0);

const THREADS: u64 = 4;
/// Maximum length of a file: most of the smallest cache.
const LEN_BYTES_MAX: u64 = 400_000;
/// Time after which a change has another time than the next one, so that a file is kept.
const TICK: Duration = Duration::from_millis(15);

/// The work of scenes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub sessions: u64,
    /// Opens that found pages of a closed file.
    pub found: u64,
    /// Changes from outside.
    pub changes: u64,
    /// Raised maximum lengths.
    pub raises: u64,
}

impl Tally {
    /// Adds the work of another scene or thread.
    pub fn add(&mut self, other: Self) {
        self.sessions += other.sessions;
        self.found += other.found;
        self.changes += other.changes;
        self.raises += other.raises;
    }
}

/// A file, its bytes as they should be, and its handle.
#[derive(Debug)]
struct Kept {
    path: PathBuf,
    bytes: Vec<u8>,
    file: Option<File>,
}

/// Runs threads on a few files until the time is over.
pub fn play(seed: u64, duration: Duration) -> Result<Tally, Violation> {
    let mut random = Rng::with_seed(seed);
    let failed = |error: &dyn std::fmt::Display| Violation(format!("setup failed: {error}"));
    // On the disk where temporary files are: a file system without direct I/O is another case.
    let directory = tempfile::tempdir().map_err(|error| failed(&error))?;
    let memory_bytes = (512 << 10) << random.u32(0..3);
    let closed_bytes_max = random.choice([30 << 10, 300 << 10, 4 << 20]).unwrap_or(300 << 10);
    let builder = Cache::builder().memory(memory_bytes).memory_max(2 * memory_bytes);
    let builder = builder.closed_bytes_max(closed_bytes_max).reclaim_wait_ms_max(60_000);
    let builder = builder.dirty_age_ms_max(random.choice([5, 200, 30_000]).unwrap_or(200));
    let cache = builder.build().map_err(|error| failed(&error))?;
    let mut files = Vec::new();
    for number in 0..random.usize(2..6) {
        let path = directory.path().join(format!("file {number}"));
        fs::write(&path, b"first").map_err(|error| failed(&error))?;
        files.push(Mutex::new(Kept { path, bytes: b"first".to_vec(), file: None }));
    }
    let (begun, ends) = (Instant::now(), AtomicBool::new(false));
    let work = |number: u64| {
        let mut random = Rng::with_seed(seed.wrapping_mul(31) + number);
        let mut tally = Tally::default();
        while begun.elapsed() < duration && !ends.load(Ordering::Relaxed) {
            let Ok(mut kept) = files[random.usize(..files.len())].try_lock() else {
                let bytes = memory_bytes * random.u64(4..=8) / 4;
                let _ = cache.set_memory(bytes);
                continue;
            };
            let session = Session { cache: &cache, random: &mut random, tally: &mut tally };
            if let Err(problem) = kept.play(session) {
                ends.store(true, Ordering::Relaxed);
                return Err(Violation(format!("{}: {problem}", kept.path.display())));
            }
            tally.sessions += 1;
            PROGRESS.fetch_add(1, Ordering::Relaxed);
        }
        Ok(tally)
    };
    let mut tally = Tally::default();
    thread::scope(|scope| {
        let threads: Vec<_> =
            (0..THREADS).map(|number| scope.spawn(move || work(number))).collect();
        for thread in threads {
            let outcome = thread.join();
            tally.add(outcome.unwrap_or_else(|_| Err(Violation("a thread panicked".into())))?);
        }
        Ok::<_, Violation>(())
    })?;
    cache.close().map_err(|error| Violation(format!("close failed: {error}")))?;
    for kept in files {
        let Ok(kept) = kept.into_inner() else { continue };
        kept.check_storage().map_err(|problem| Violation(format!("at the end: {problem}")))?;
    }
    Ok(tally)
}

/// Everything that a session uses besides its file.
#[derive(Debug)]
struct Session<'s> {
    cache: &'s Cache,
    random: &'s mut Rng,
    tally: &'s mut Tally,
}

type Outcome = Result<(), String>;

fn told(what: &str) -> impl Fn(bifolio::Error) -> String {
    move |error| format!("{what} failed: {error} ({error:?})")
}

impl Kept {
    fn play(&mut self, mut session: Session<'_>) -> Outcome {
        let file = match self.file.take() {
            Some(file) => file,
            None => self.open(&mut session)?,
        };
        // A file that was not changed a moment ago is kept when it is closed.
        let may_change = session.random.bool();
        for _ in 0..session.random.u32(1..12) {
            self.operate(&file, may_change, &mut session)?;
        }
        match session.random.u32(0..4) {
            0 => self.file = Some(file),
            1 => drop(file),
            _ => {
                if may_change && session.random.bool() {
                    file.sync_data().map_err(told("sync_data"))?;
                    thread::sleep(TICK);
                }
                file.close().map_err(told("close"))?;
                self.check_storage()?;
            }
        }
        if self.file.is_none() && session.random.u32(0..3) == 0 {
            session.tally.changes += 1;
            self.change_outside(session.random).map_err(|error| format!("a change: {error}"))?;
        }
        Ok(())
    }

    fn open(&self, session: &mut Session<'_>) -> Result<File, String> {
        let before = session.cache.stats();
        let length = self.bytes.len() as u64;
        let len_max_bytes = length + session.random.u64(0..100_000);
        let options = OpenOptions::new().write(true).len_max(len_max_bytes.max(4096));
        let file = session.cache.open(&self.path, &options).map_err(told("open"))?;
        if session.cache.stats().closed_bytes < before.closed_bytes {
            session.tally.found += 1;
        }
        self.check(&file, 0..length)?;
        Ok(file)
    }

    /// Compares a range, at most to the end of the file.
    fn check(&self, file: &File, range: std::ops::Range<u64>) -> Outcome {
        if file.len() != self.bytes.len() as u64 {
            return Err(format!("{} bytes, expected {}", file.len(), self.bytes.len()));
        }
        let expected = &self.bytes[range.start as usize..range.end as usize];
        let mut found = vec![0xAA; expected.len()];
        file.read_exact_at(&mut found, range.start).map_err(told("read_exact_at"))?;
        let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
        differs.map_or(Ok(()), |at| {
            let (found, expected) = (found[at], expected[at]);
            let at = range.start + at as u64;
            Err(format!("byte {at} is {found}, expected {expected}"))
        })
    }

    fn check_storage(&self) -> Outcome {
        let stored = fs::read(&self.path).map_err(|error| error.to_string())?;
        if stored == self.bytes {
            return Ok(());
        }
        let differs = stored.iter().zip(&self.bytes).position(|(found, wanted)| found != wanted);
        let lengths = (stored.len(), self.bytes.len());
        Err(format!("the storage differs after a close: lengths {lengths:?}, first at {differs:?}"))
    }

    fn operate(&mut self, file: &File, may_change: bool, session: &mut Session<'_>) -> Outcome {
        let random = &mut *session.random;
        let length = self.bytes.len() as u64;
        let start = random.u64(0..=length);
        let end = start + random.u64(0..100_000);
        let end = random.u64(start..=end.min(length));
        // The end of the file is special, and rarely met otherwise.
        let end = if random.u32(0..4) == 0 { length } else { end };
        match random.u32(0..if may_change { 10 } else { 3 }) {
            0 | 1 => self.check(file, start..end),
            2 => {
                let advice = random.choice([Advice::DontNeed, Advice::Cold, Advice::WillNeed]);
                let advised = file.advise(start..end, advice.unwrap_or(Advice::Cold));
                advised.map(drop).map_err(told("advise"))
            }
            3 | 4 => {
                let bytes = vec![random.u8(..); random.usize(1..60_000)];
                let end = start as usize + bytes.len();
                self.grow(file, end as u64, session, |file| file.write_all_at(&bytes, start))?;
                self.bytes.resize(self.bytes.len().max(end), 0);
                self.bytes[start as usize..end].copy_from_slice(&bytes);
                Ok(())
            }
            5 if length < LEN_BYTES_MAX => {
                let bytes = vec![random.u8(..); random.usize(1..60_000)];
                let end = length + bytes.len() as u64;
                self.grow(file, end, session, |file| file.append(&bytes).map(drop))?;
                self.bytes.extend(bytes);
                Ok(())
            }
            6 => {
                let length = random.u64(0..=LEN_BYTES_MAX);
                self.grow(file, length, session, |file| file.set_len(length))?;
                self.bytes.resize(length as usize, 0);
                Ok(())
            }
            7 if start < end => {
                let punched = match random.bool() {
                    true => file.punch_hole(start..end),
                    false => file.zero_range(start..end),
                };
                punched.map_err(told("punch_hole"))?;
                self.bytes[start as usize..end as usize].fill(0);
                Ok(())
            }
            8 => {
                session.tally.raises += 1;
                file.raise_len_max(random.u64(0..1 << 30)).map_err(told("raise_len_max"))
            }
            _ => file.sync_data().map_err(told("sync_data")),
        }
    }

    /// Makes a call that may grow the file to `end`; first, sometimes, with a maximum length that
    /// is too low.
    fn grow(
        &self,
        file: &File,
        end: u64,
        session: &mut Session<'_>,
        call: impl Fn(&File) -> bifolio::Result<()>,
    ) -> Outcome {
        let is_refused = end > file.len_max();
        match call(file) {
            Ok(()) if !is_refused => return Ok(()),
            Err(error) if is_refused && matches!(error.kind(), ErrorKind::TooLong { .. }) => {}
            other => return Err(format!("a call to grow to {end}: {other:?}")),
        }
        self.check(file, 0..self.bytes.len() as u64)?;
        session.tally.raises += 1;
        file.raise_len_max(end).map_err(told("raise_len_max"))?;
        call(file).map_err(told("a call after raise_len_max"))
    }

    /// Changes the file as another program does.
    fn change_outside(&mut self, random: &mut Rng) -> std::io::Result<()> {
        let length = self.bytes.len();
        let (start, bytes) = (random.usize(0..=length), vec![random.u8(..); random.usize(1..9000)]);
        let open = || fs::OpenOptions::new().write(true).open(&self.path);
        match random.u32(0..4) {
            0 => {
                let length = random.usize(0..=length);
                open()?.set_len(length as u64)?;
                self.bytes.truncate(length);
            }
            1 => {
                let other = self.path.with_extension("new");
                fs::write(&other, &bytes)?;
                fs::rename(&other, &self.path)?;
                self.bytes = bytes;
            }
            2 => {
                fs::remove_file(&self.path)?;
                fs::write(&self.path, &bytes)?;
                self.bytes = bytes;
            }
            _ => {
                open()?.write_all_at(&bytes, start as u64)?;
                let end = start + bytes.len();
                self.bytes.resize(length.max(end), 0);
                self.bytes[start..end].copy_from_slice(&bytes);
            }
        }
        Ok(())
    }
}
