//! Write gates: threads change a file whose log is simulated, and no LSN reaches the storage before
//! the log is durable up to it.
//!
//! Each 8-byte word of the file holds the LSN of the change that wrote it, or, while the change is
//! not committed, the number of its transaction with the highest bit set. Some transactions are
//! pins that end without an LSN, by a panic too. The storage ([`Checked`]) compares each word of
//! each write with the durable LSN of that moment, so that whatever a power cut leaves of the
//! writes is behind the log. Each thread has its own words in every page, and so knows which LSN it
//! wrote there last: that is checked in what a power cut leaves after a sync, after a checkpoint,
//! and below `oldest_dirty_lsn`.
//!
//! The log fails, is slow, and makes more durable than it is asked for, or no more. The storage
//! fails, is short and slow.

use crate::device::{Device, Faults};
use crate::history::Violation;
use crate::watchdog;
use bifolio::WriteGate;
use bifolio::backing::{Backing, DirectBacking, FileIdentity, IoBuf, IoBufMut};
use bifolio::{Cache, ErrorKind, GatedFile, OpenOptions};
use fastrand::Rng;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const THREADS: usize = 4;
const PAGE: u64 = 4096;
const WORDS: u64 = PAGE / 8;
/// Words of a page that belong to one thread.
const OWN_WORDS: u64 = WORDS / THREADS as u64;
/// Marks the words of a transaction that is not committed.
const TRANSACTION: u64 = 1 << 63;
/// Transactions of a scene, at most.
const TRANSACTIONS_MAX: usize = 1 << 16;
/// Bytes that appends add, at most.
const APPENDED_MAX: u64 = 1 << 20;

/// The work of a scene.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Writes with an LSN.
    pub writes: u64,
    pub syncs: u64,
    /// Words that were compared on their way to the storage.
    pub words: u64,
}

impl Tally {
    /// Adds what another scene has done.
    pub fn add(&mut self, other: Self) {
        self.writes += other.writes;
        self.syncs += other.syncs;
        self.words += other.words;
    }
}

/// The log: only its LSNs exist. Its accesses are relaxed, because the cache must order them: an
/// LSN precedes its write, and a durable LSN precedes what it lets pass.
#[derive(Debug)]
struct Log {
    appended: AtomicU64,
    durable: AtomicU64,
    /// LSN of each transaction's commit record; `u64::MAX` before.
    commits: Vec<AtomicU64>,
    transactions: AtomicU64,
    /// Failures among 256 calls.
    failures: AtomicU64,
    is_slow: bool,
    /// Makes durable only what it is asked for.
    is_exact: bool,
    has_failed: AtomicBool,
}

impl Log {
    fn append(&self) -> u64 {
        self.appended.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The LSN that must be durable before a word may be on the storage.
    fn lsn_of(&self, word: u64) -> u64 {
        if word & TRANSACTION == 0 {
            return word;
        }
        self.commits[(word & !TRANSACTION) as usize].load(Ordering::Relaxed)
    }
}

impl WriteGate for Log {
    fn durable_lsn(&self) -> u64 {
        self.durable.load(Ordering::Relaxed)
    }

    fn make_durable(&self, lsn: u64) -> io::Result<()> {
        let end = self.appended.load(Ordering::Relaxed);
        if lsn > end {
            return Err(io::Error::other(format!("LSN {lsn} of a log that ends at {end}")));
        }
        if self.is_slow {
            thread::sleep(Duration::from_micros(fastrand::u64(..300)));
        }
        if fastrand::u64(..256) < self.failures.load(Ordering::Relaxed) {
            self.has_failed.store(true, Ordering::Relaxed);
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.durable.fetch_max(if self.is_exact { lsn } else { end }, Ordering::Relaxed);
        Ok(())
    }
}

/// Storage that compares what is written with the log.
#[derive(Debug)]
struct Checked {
    device: Device,
    log: Arc<Log>,
    words: AtomicU64,
    wrong: Mutex<Option<String>>,
}

impl Checked {
    fn check(&self, bytes: &[u8], position: u64) {
        let durable = self.log.durable_lsn();
        self.words.fetch_add(bytes.len() as u64 / 8, Ordering::Relaxed);
        // A short write goes on anywhere.
        let first = position.next_multiple_of(8);
        let whole = bytes.get((first - position) as usize..).unwrap_or_default();
        for (at, word) in words(whole).enumerate() {
            let lsn = self.log.lsn_of(word);
            if lsn > durable {
                let at = first + at as u64 * 8;
                let told = format!("LSN {lsn} ({word:#x}) is written at {at}, durable: {durable}");
                self.wrong.lock().expect("no panic").get_or_insert(told);
            }
        }
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")))
}

impl Backing for Checked {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.device.read_at(target, position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        let mut bytes = vec![0; source.len()];
        source.copy_to_slice(0, &mut bytes);
        self.check(&bytes, position_bytes);
        self.device.write_at(source, position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.device.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.device.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.device.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        self.device.describe()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Checked {
    fn sync_all(&self) -> io::Result<()> {
        self.device.sync_all()
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.device.identity()
    }
}

/// A file with a gate.
struct Scene {
    cache: Cache,
    file: GatedFile,
    storage: Arc<Checked>,
    log: Arc<Log>,
    pages: u64,
    may_fail: bool,
    ends: AtomicBool,
    writes: AtomicU64,
    syncs: AtomicU64,
}

/// A thread, and what it wrote last to its words: the LSN for each page, or a transaction.
struct Worker<'s> {
    scene: &'s Scene,
    number: u64,
    random: Rng,
    last: Vec<u64>,
    appended: Vec<(u64, u64)>,
}

type Outcome = Result<(), Violation>;

/// Plays the scene of a seed.
pub fn play(seed: u64, duration: Duration) -> Result<Tally, Violation> {
    let scene = Scene::new(seed).map_err(|error| Violation(format!("set-up failed: {error}")))?;
    let begun = Instant::now();
    let workers = thread::scope(|scope| {
        let start = |number: u64| {
            let random = Rng::with_seed(seed.wrapping_mul(31) + number);
            let last = vec![0; scene.pages as usize];
            let worker = Worker { scene: &scene, number, random, last, appended: Vec::new() };
            scope.spawn(move || worker.run())
        };
        let workers: Vec<_> = (0..THREADS as u64).map(start).collect();
        while begun.elapsed() < duration && !scene.ends.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(5));
        }
        scene.ends.store(true, Ordering::Relaxed);
        let joined = workers.into_iter().map(|worker| {
            worker.join().unwrap_or_else(|_| Err(Violation("a thread panicked".into())))
        });
        joined.collect::<Result<Vec<_>, _>>()
    })?;
    scene.rest(workers)?;
    let [writes, syncs, words] = [&scene.writes, &scene.syncs, &scene.storage.words]
        .map(|count| count.load(Ordering::Relaxed));
    Ok(Tally { writes, syncs, words })
}

impl Scene {
    fn new(seed: u64) -> bifolio::Result<Self> {
        let mut random = Rng::with_seed(seed);
        let memory_bytes = (256 << 10) << random.u32(0..4);
        let may_fail = random.u32(0..3) == 0;
        let log = Arc::new(Log {
            appended: AtomicU64::new(0),
            durable: AtomicU64::new(0),
            commits: (0..TRANSACTIONS_MAX).map(|_| AtomicU64::new(u64::MAX)).collect(),
            transactions: AtomicU64::new(0),
            failures: AtomicU64::new(if may_fail { random.u64(0..64) } else { 0 }),
            is_slow: random.bool(),
            is_exact: random.bool(),
            has_failed: AtomicBool::new(false),
        });
        let rate = |random: &mut Rng| if may_fail { random.u32(0..20_000) } else { 0 };
        let (write, flush) = (rate(&mut random), rate(&mut random));
        let (short, slow) = (random.u32(0..20_000), random.u32(0..50_000));
        let faults = Faults { write, flush, short, slow, ..Faults::default() };
        let identity = FileIdentity::custom(1, 1);
        let device = Device::new(format!("gated-{seed}"), identity, faults);
        let (words, wrong) = (AtomicU64::new(0), Mutex::default());
        let storage = Arc::new(Checked { device, log: Arc::clone(&log), words, wrong });
        let age = random.choice([1, 5, 50, 30_000]).unwrap_or(5);
        let builder =
            Cache::builder().memory(memory_bytes).dirty_age_max(Duration::from_millis(age));
        let cache = builder.reclaim_wait_max(Duration::from_millis(60_000)).build()?;
        let folio_bytes = if memory_bytes >= 1 << 20 { PAGE << random.u32(0..3) } else { PAGE };
        let options = OpenOptions::new().read(true).write(true).folio_bytes(folio_bytes);
        let backing: Arc<dyn Backing> = Arc::<Checked>::clone(&storage);
        let file = cache.open_backing(backing, &options)?;
        // From all of it in memory to eight times the memory, and sometimes a few hot pages.
        let pages = [4, memory_bytes / PAGE / 4, 8 * memory_bytes / PAGE][random.usize(0..3)];
        file.set_len(pages * PAGE)?;
        let file = GatedFile::new(file, Arc::<Log>::clone(&log))?;
        let (ends, writes, syncs) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        Ok(Self { cache, file, storage, log, pages, may_fail, ends, writes, syncs })
    }

    fn check_storage(&self) -> Outcome {
        let wrong = self.storage.wrong.lock().expect("no panic").take();
        wrong.map_or(Ok(()), |told| Err(Violation(told)))
    }

    /// Everything is committed and at rest: the storage has each thread's last words.
    fn rest(&self, workers: Vec<Worker<'_>>) -> Outcome {
        self.storage.device.heal();
        self.log.failures.store(0, Ordering::Relaxed);
        // A sync tells once of what failed before.
        let _ = self.file.sync_data();
        let synced = self.file.sync_data();
        synced.map_err(|error| Violation(format!("the last sync failed: {error}")))?;
        for worker in &workers {
            (0..self.pages).try_for_each(|page| worker.check_durable("at rest", page))?;
            for (position, lsn) in &worker.appended {
                let found = self.storage.device.durable(*position, 8);
                if words(&found).next() != Some(*lsn) {
                    return Err(Violation(format!("{found:x?} is at {position}, appended: {lsn}")));
                }
            }
        }
        if let Some(lsn) = self.file.oldest_dirty_lsn() {
            return Err(Violation(format!("LSN {lsn} counts as not durable at rest")));
        }
        let stats = self.cache.stats();
        if stats.memory.dirty_bytes > 0 {
            return Err(Violation(format!("{} bytes are dirty at rest", stats.memory.dirty_bytes)));
        }
        self.check_storage()?;
        self.cache.close().map_err(|error| Violation(format!("close failed: {error}")))
    }
}

impl<'s> Worker<'s> {
    fn run(mut self) -> Result<Self, Violation> {
        while !self.scene.ends.load(Ordering::Relaxed) {
            let done = self.step().and_then(|()| self.scene.check_storage());
            if let Err(violation) = done {
                self.scene.ends.store(true, Ordering::Relaxed);
                return Err(violation);
            }
            watchdog::progress();
        }
        Ok(self)
    }

    fn step(&mut self) -> Outcome {
        match self.random.u32(0..100) {
            0..55 => self.write(),
            55..75 => self.pin(),
            75..80 => self.append(),
            80..88 => self.transaction(),
            88..92 => self.read(),
            92..94 => self.sync(),
            94..96 => self.checkpoint(),
            96..98 => self.look_at_oldest(),
            _ => {
                let page = self.page();
                let range = page * PAGE..(page + self.random.u64(1..8)) * PAGE;
                self.expect("write_out", self.scene.file.write_out(range))
            }
        }
    }

    fn page(&mut self) -> u64 {
        // Half of the calls meet in the first pages.
        let pages = if self.random.bool() { self.scene.pages.min(4) } else { self.scene.pages };
        self.random.u64(0..pages)
    }

    /// The words of a page that this thread writes.
    fn own(&self, page: u64) -> Range<u64> {
        let start = page * PAGE + self.number * OWN_WORDS * 8;
        start..start + OWN_WORDS * 8
    }

    /// Whether a failure may be.
    fn expect<T>(&self, call: &str, answer: bifolio::Result<T>) -> Result<(), Violation> {
        let Err(error) = answer else { return Ok(()) };
        let is_gate = error.kind() == ErrorKind::Gated;
        // Transactions of other threads are held back.
        let is_uncommitted = is_gate && error.raw_os_error().is_none();
        if self.scene.may_fail || is_uncommitted {
            return Ok(());
        }
        Err(Violation(format!("{call} failed: {error} ({error:?})")))
    }

    fn write(&mut self) -> Outcome {
        let page = self.page();
        let lsn = self.scene.log.append();
        let bytes = lsn.to_le_bytes().repeat(OWN_WORDS as usize);
        let start = self.own(page).start;
        let answer = self.scene.file.write_at(&bytes, start, lsn);
        if answer.is_ok() {
            self.note(page, lsn);
        }
        self.expect("write_at", answer)
    }

    fn note(&mut self, page: u64, lsn: u64) {
        self.last[page as usize] = lsn;
        self.scene.writes.fetch_add(1, Ordering::Relaxed);
    }

    /// The record is appended after the change.
    fn pin(&mut self) -> Outcome {
        if self.random.u32(0..8) == 0 {
            return self.pin_without_lsn();
        }
        let page = self.page();
        let mut pin = match self.scene.file.pin_mut(self.own(page)) {
            Ok(pin) => pin,
            Err(error) => return self.expect("pin_mut", Err::<(), _>(error)),
        };
        let lsn = self.scene.log.append();
        pin.copy_from(0, &lsn.to_le_bytes().repeat(OWN_WORDS as usize)).unwrap();
        pin.assign_lsn(lsn);
        drop(pin);
        self.note(page, lsn);
        Ok(())
    }

    /// Changes a page through a pin that ends without an LSN, half of the time by a panic. The
    /// change is a transaction, whose record is appended later.
    fn pin_without_lsn(&mut self) -> Outcome {
        let Some((page, number)) = self.begin_transaction() else { return Ok(()) };
        let bytes = (TRANSACTION | number).to_le_bytes().repeat(OWN_WORDS as usize);
        let range = self.own(page);
        let mut pin = match self.scene.file.pin_mut(range.clone()) {
            Ok(pin) => pin,
            Err(error) => return self.expect("pin_mut", Err::<(), _>(error)),
        };
        pin.copy_from(0, &bytes).unwrap();
        if self.random.bool() {
            drop(pin);
        } else {
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                let _pin = pin;
                // Without the message of a panic.
                resume_unwind(Box::new("before the record is appended"));
            }));
            debug_assert!(panicked.is_err());
        }
        self.note(page, TRANSACTION | number);
        self.commit(number, range)
    }

    fn append(&mut self) -> Outcome {
        let file = &self.scene.file;
        if file.len() > self.scene.pages * PAGE + APPENDED_MAX {
            return Ok(());
        }
        let lsn = self.scene.log.append();
        let bytes = lsn.to_le_bytes().repeat(self.random.usize(1..600));
        match file.append(&bytes, lsn) {
            Ok(position) => {
                self.appended.push((position + bytes.len() as u64 - 8, lsn));
                self.scene.writes.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => self.expect("append", Err::<(), _>(error)),
        }
    }

    /// Changes a page, and commits after a while. A page belongs to one transaction at a time, so
    /// only the pages of this thread are used.
    fn transaction(&mut self) -> Outcome {
        let scene = self.scene;
        let Some((page, number)) = self.begin_transaction() else { return Ok(()) };
        let bytes = (TRANSACTION | number).to_le_bytes().repeat(OWN_WORDS as usize);
        let range = self.own(page);
        let written = scene.file.write_at(&bytes, range.start, u64::MAX);
        if written.is_ok() {
            self.note(page, TRANSACTION | number);
        }
        // The page may be behind the gate even if the write has failed in part.
        self.commit(number, range)?;
        self.expect("an uncommitted write", written)
    }

    /// Returns a page of this thread, and the number of a transaction.
    fn begin_transaction(&mut self) -> Option<(u64, u64)> {
        let scene = self.scene;
        let number = scene.log.transactions.fetch_add(1, Ordering::Relaxed);
        let pages_per_folio = scene.file.unlogged().folio_bytes() / PAGE;
        let folio = self.random.u64(0..scene.pages) / pages_per_folio;
        let page = folio / THREADS as u64 * THREADS as u64 + self.number;
        let page = page * pages_per_folio;
        (number < TRANSACTIONS_MAX as u64 && page < scene.pages).then_some((page, number))
    }

    fn commit(&mut self, number: u64, range: Range<u64>) -> Outcome {
        if self.random.bool() {
            thread::yield_now();
        }
        let log = &self.scene.log;
        let lsn = log.append();
        log.commits[number as usize].store(lsn, Ordering::Relaxed);
        let committed = self.scene.file.assign_lsn(range, lsn);
        committed.map_err(|error| Violation(format!("commit failed: {error}")))
    }

    fn read(&mut self) -> Outcome {
        let page = self.page();
        let mut bytes = vec![0; (OWN_WORDS * 8) as usize];
        let start = self.own(page).start;
        let read = self.scene.file.read_exact_at(&mut bytes, start);
        if read.is_ok() && !self.scene.may_fail {
            let last = self.last[page as usize];
            if let Some(word) = words(&bytes).find(|word| *word != last) {
                return Err(Violation(format!("read {word:#x} at {start}, written: {last:#x}")));
            }
        }
        self.expect("read", read)
    }

    fn sync(&mut self) -> Outcome {
        let page = self.page();
        let file = &self.scene.file;
        let answer = match self.random.u32(0..3) {
            0 => file.unlogged().sync_range(self.own(page)),
            _ => file.sync_data(),
        };
        self.scene.syncs.fetch_add(1, Ordering::Relaxed);
        if answer.is_ok() {
            self.check_durable("after a sync", page)?;
        }
        self.expect("sync", answer)
    }

    fn checkpoint(&mut self) -> Outcome {
        let page = self.page();
        let checkpoint = match self.scene.file.checkpoint() {
            Ok(checkpoint) => checkpoint,
            Err(error) => return self.expect("checkpoint", Err::<(), _>(error)),
        };
        let answer = checkpoint.sync();
        if answer.is_ok() {
            self.check_durable("after a checkpoint", page)?;
        }
        self.expect("the sync of a checkpoint", answer)
    }

    /// Changes with LSNs below the oldest that is not durable are durable.
    fn look_at_oldest(&mut self) -> Outcome {
        let page = self.page();
        let last = self.last[page as usize];
        let oldest = self.scene.file.oldest_dirty_lsn();
        if last & TRANSACTION == 0 && oldest.is_none_or(|oldest| last < oldest) {
            self.check_durable("below the oldest LSN", page)?;
        }
        Ok(())
    }

    /// Checks that a power cut now would leave the words of a page that the thread wrote last.
    fn check_durable(&self, when: &str, page: u64) -> Outcome {
        if self.scene.may_fail && when != "at rest" {
            // A write that has failed may have changed some of the words.
            return Ok(());
        }
        let (range, last) = (self.own(page), self.last[page as usize]);
        let found = self.scene.storage.device.durable(range.start, (OWN_WORDS * 8) as usize);
        let wrong = words(&found).find(|word| *word != last);
        let log = &self.scene.log;
        let is_failed_write = |word| self.scene.may_fail && log.lsn_of(word) > log.lsn_of(last);
        match wrong.filter(|word| !is_failed_write(*word)) {
            Some(word) => Err(Violation(format!(
                "a power cut {when} leaves {word:#x} in page {page} of thread {}, not {last:#x}",
                self.number
            ))),
            None => Ok(()),
        }
    }
}
