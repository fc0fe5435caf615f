//! A simulated device: writes are durable only after a flush.
//!
//! A flush makes durable, page by page, what had been written when it *began*, and nothing else. A
//! real device guarantees no more, so a sync that relies on more is detected. The device can fail,
//! transfer less, be slow, or hang.

use crate::codec::opened;
use bifolio::backing::{Backing, DirectBacking, FallocateMode, FileIdentity, IoBuf, IoBufMut};
use std::collections::BTreeSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

const PAGE: usize = 4096;
/// Duration of a flush, in transfers.
const FLUSH_TRANSFERS: u32 = 8;

/// Rates of faults, in millionths.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Reads that fail with EIO.
    pub read: u32,
    /// Writes that fail with EIO.
    pub write: u32,
    /// Transfers that move a part only.
    pub short: u32,
    /// Calls that take up to a millisecond.
    pub slow: u32,
    /// Flushes that fail with EIO: the next flush covers their writes.
    pub flush: u32,
}

/// A device that is slow, fails and fills up at random.
#[derive(Debug)]
pub struct Device {
    name: String,
    identity: FileIdentity,
    /// Set if the pages of its file are sealed (`codec.rs`).
    is_sealed: bool,
    /// Number of the device's own, for its random faults.
    seed: u64,
    state: Mutex<State>,
    /// One flush at a time: the next one may rely on the writes that the last one covered.
    flushing: Mutex<()>,
    read: AtomicU32,
    write: AtomicU32,
    short: AtomicU32,
    slow: AtomicU32,
    flush: AtomicU32,
    /// Writes fail with ENOSPC.
    is_full: AtomicBool,
    /// Writes and flushes wait until this is reset.
    is_hung: AtomicBool,
    /// Number of calls; seeds the faults.
    calls: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    live: Image,
    durable: Image,
    /// Pages that have changed since the last flush began.
    unflushed: BTreeSet<usize>,
    /// Number of changes.
    changes: u64,
}

impl State {
    /// Notes a change of these bytes.
    fn note_change(&mut self, bytes: std::ops::Range<usize>) {
        self.changes += 1;
        for page in bytes.start / PAGE..bytes.end.div_ceil(PAGE) {
            self.live.versions[page] = self.changes;
            self.unflushed.insert(page);
        }
    }

    /// Changes the length of the file; new bytes are zeros.
    fn resize(&mut self, len: usize) {
        let before = self.live.bytes.len();
        self.live.resize(len);
        self.live.len_version += 1;
        self.unflushed.retain(|page| page * PAGE < len);
        self.note_change(len.min(before)..len);
    }
}

/// Bytes, and for each page the number of its last change.
#[derive(Debug, Default)]
struct Image {
    bytes: Vec<u8>,
    versions: Vec<u64>,
    len_version: u64,
}

impl Image {
    fn resize(&mut self, len: usize) {
        self.bytes.resize(len, 0);
        self.versions.resize(len.div_ceil(PAGE), 0);
    }
}

impl Device {
    /// Creates an empty device with one file.
    pub fn new(name: String, identity: FileIdentity, faults: Faults) -> Self {
        Self {
            name,
            identity,
            is_sealed: false,
            seed: BuildHasherDefault::<DefaultHasher>::default().hash_one(identity),
            state: Mutex::default(),
            flushing: Mutex::default(),
            read: AtomicU32::new(faults.read),
            write: AtomicU32::new(faults.write),
            short: AtomicU32::new(faults.short),
            slow: AtomicU32::new(faults.slow),
            flush: AtomicU32::new(faults.flush),
            is_full: AtomicBool::new(false),
            is_hung: AtomicBool::new(false),
            calls: AtomicU64::new(0),
        }
    }

    /// Creates the same device for a file with a codec.
    pub fn sealed(self) -> Self {
        Self { is_sealed: true, ..self }
    }

    /// Removes all faults.
    pub fn heal(&self) {
        for rate in [&self.read, &self.write, &self.short, &self.slow, &self.flush] {
            rate.store(0, Ordering::Relaxed);
        }
        self.is_full.store(false, Ordering::Relaxed);
        self.is_hung.store(false, Ordering::Relaxed);
    }

    /// Returns `true` if writes find no space.
    pub fn set_full(&self, is_full: bool) {
        self.is_full.store(is_full, Ordering::Relaxed);
    }

    /// Returns `true` if writes and flushes wait.
    pub fn set_hung(&self, is_hung: bool) {
        self.is_hung.store(is_hung, Ordering::Relaxed);
    }

    /// Returns the bytes of `length` at `position` that remain after a power cut now.
    pub fn durable(&self, position: u64, length: usize) -> Vec<u8> {
        let bytes = part(&self.state().durable.bytes, position, length);
        if self.is_sealed { opened(position, bytes) } else { bytes }
    }

    /// Returns `true` if a power cut now would lose changes.
    pub fn has_unflushed(&self) -> bool {
        !self.state().unflushed.is_empty()
    }

    /// Returns the current bytes.
    pub fn live(&self, position: u64, length: usize) -> Vec<u8> {
        let bytes = part(&self.state().live.bytes, position, length);
        if self.is_sealed { opened(position, bytes) } else { bytes }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with a device locked")
    }

    /// Returns `true` if a fault of this rate strikes now.
    fn strikes(&self, rate: &AtomicU32) -> bool {
        let rate = rate.load(Ordering::Relaxed);
        rate > 0 && {
            let call = self.calls.fetch_add(1, Ordering::Relaxed);
            fastrand::Rng::with_seed(call ^ self.seed).u32(..1_000_000) < rate
        }
    }

    fn dawdle(&self) {
        if self.strikes(&self.slow) {
            thread::sleep(Duration::from_micros(fastrand::u64(10..1000)));
        }
    }

    fn hang(&self) {
        while self.is_hung.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

fn part(bytes: &[u8], position: u64, length: usize) -> Vec<u8> {
    let start = bytes.len().min(position as usize);
    let end = bytes.len().min(start + length);
    let mut found = bytes[start..end].to_vec();
    found.resize(length, 0);
    found
}

fn error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

impl Backing for Device {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.dawdle();
        if self.strikes(&self.read) {
            return Err(error(libc::EIO));
        }
        let state = self.state();
        let bytes = &state.live.bytes;
        let start = bytes.len().min(position_bytes as usize);
        let mut end = bytes.len().min(start + target.len());
        if end > start + 1 && self.strikes(&self.short) {
            end = start + fastrand::usize(1..end - start);
        }
        target.copy_from_slice(0, &bytes[start..end]);
        Ok(end - start)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.dawdle();
        self.hang();
        if self.strikes(&self.write) {
            return Err(error(libc::EIO));
        }
        if self.is_full.load(Ordering::Relaxed) {
            return Err(error(libc::ENOSPC));
        }
        let mut length = source.len();
        if length > 1 && self.strikes(&self.short) {
            length = fastrand::usize(1..length);
        }
        let mut copy = vec![0; source.len()];
        source.copy_to_slice(0, &mut copy);
        let mut again = vec![0; source.len()];
        source.copy_to_slice(0, &mut again);
        if copy != again {
            eprintln!("{}: the bytes of a write changed while it ran", self.name);
            std::process::abort();
        }
        let start = position_bytes as usize;
        let mut state = self.state();
        if state.live.bytes.len() < start + length {
            state.resize(start + length);
        }
        state.live.bytes[start..start + length].copy_from_slice(&copy[..length]);
        state.note_change(start..start + length);
        Ok(length)
    }

    fn sync_data(&self) -> io::Result<()> {
        let _alone = self.flushing.lock().expect("no thread panics in a flush");
        if self.strikes(&self.flush) {
            return Err(error(libc::EIO));
        }
        let (pages, len, len_version) = {
            let mut state = self.state();
            let numbers = std::mem::take(&mut state.unflushed);
            let live = &state.live;
            let copy = |page: usize| {
                let end = live.bytes.len().min((page + 1) * PAGE);
                let version = live.versions.get(page).copied();
                version.map(|version| (page, version, live.bytes[page * PAGE..end].to_vec()))
            };
            let pages: Vec<_> = numbers.into_iter().filter_map(copy).collect();
            (pages, state.live.bytes.len(), state.live.len_version)
        };
        // A flush takes longer than a transfer.
        (0..FLUSH_TRANSFERS).for_each(|_| self.dawdle());
        self.hang();
        let mut state = self.state();
        let durable = &mut state.durable;
        if durable.len_version <= len_version {
            durable.resize(len);
            durable.len_version = len_version;
        }
        for (page, version, bytes) in pages {
            let end = page * PAGE + bytes.len();
            if durable.versions.get(page).is_some_and(|old| *old < version)
                && end <= durable.bytes.len()
            {
                durable.bytes[page * PAGE..end].copy_from_slice(&bytes);
                durable.versions[page] = version;
            }
        }
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.state().live.bytes.len() as u64)
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.dawdle();
        self.state().resize(length_bytes as usize);
        Ok(())
    }

    fn describe(&self) -> String {
        self.name.clone()
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for Device {
    fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> io::Result<()> {
        self.dawdle();
        if self.strikes(&self.write) {
            return Err(error(libc::EIO));
        }
        let mut state = self.state();
        let len = state.live.bytes.len();
        let [start, end] = [bytes.start, bytes.end].map(|end| len.min(end as usize));
        match mode {
            FallocateMode::Allocate => state.resize(len.max(bytes.end as usize)),
            FallocateMode::AllocateKeepLen => {}
            _ => {
                state.live.bytes[start..end].fill(0);
                state.note_change(start..end);
            }
        }
        Ok(())
    }

    fn identity(&self) -> Option<FileIdentity> {
        Some(self.identity)
    }
}
