//! The slots of the parts: in memory files of the cache, or in a file of the disk tier, which the
//! cache keeps in memory as far as there is room. For the kept blocks of a disk tier it has another
//! file for each class (`keep.rs`), over the same file on disk.
//!
//! A block is checked when it was read from the disk, and not again while it stays in memory: the
//! slot's state says so, and that the slot was not reused between the look-up and the end of the
//! read (`states.rs`). A read of checked blocks that are in memory is one copy, into the buffer that
//! the caller gets.
//!
//! A disk that hangs, or is slower than the store, is left alone for a while after each read that it
//! did not answer in time: reads find only what is in memory, and nothing is inserted. What must wait
//! for the disk (opening the tier, flushing and closing it) is done in a thread, which is waited for
//! as long as the disk answers anything.

use std::fs;
use std::future::{Future, poll_fn};
use std::io::{self, Read};
use std::mem;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{self, Path, PathBuf};
use std::pin::{Pin, pin};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use bifolio::backing::DiskFile;
use bifolio::{Cache, OpenOptions};
use bytes::Bytes;
use object_store::path::Path as Location;
use scopeguard::ScopeGuard;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::disk::LossyDisk;
use super::error::CacheError;
use super::keep::{Home, Region};
use super::metrics::{Counters, add};
use super::names::{NAMES, Names};
use super::object::ObjectId;
use super::object_store;
use super::record::{HEADER_BYTES, Layout, PartKey, Record};
use super::states::SlotStates;
use super::table::{Snapshot, Table};

/// Files of a disk tier.
const DATA: &str = "parts";
const INDEX: &str = "index";
const LOCK: &str = "lock";

/// Time for which a late disk is left alone, in multiples of the time that a read waits for it.
const PAUSE: u32 = 10;
/// Time without any answer after which a disk hangs, in the same multiples.
const HANG: u32 = 10;

/// How long a tier waits for the lock of its directory: a store that was dropped may still put parts
/// into it, and a process that was killed may not be gone.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(1);
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// Why a part was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    /// The bytes are not those of the part. It is no longer cached.
    Lost,
    /// The disk is late. The part is still cached.
    Late,
}

/// The cached parts.
#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) layout: Layout,
    pub(crate) regions: Vec<Region>,
    /// The file of each region, or one for all in memory; empty once the tier is being dropped.
    files: Vec<bifolio::File>,
    disk: Option<Disk>,
    table: Mutex<Table>,
    states: Arc<SlotStates>,
    counters: Arc<Counters>,
    /// How long a read waits for the disk.
    timeout: Duration,
    opened_at: Instant,
    /// End of the time for which the disk is left alone, microseconds since the tier was opened.
    paused_until_us: AtomicU64,
}

/// The files of a disk tier beside the parts.
#[derive(Debug)]
struct Disk {
    index: fs::File,
    names: Mutex<Names>,
    /// The lock on the directory.
    _lock: LockFile,
    directory: PathBuf,
    /// Number of reads, writes and flushes of the parts that the disk has answered.
    answers: Arc<AtomicU64>,
}

/// A file that this process has locked.
#[derive(Debug)]
struct LockFile {
    file: fs::File,
    process: u32,
}

impl Drop for LockFile {
    /// Unlocks the file. Closing it would leave it locked while another thread starts a program,
    /// which has copies of all descriptors for a moment. The lock of a parent process stays.
    fn drop(&mut self) {
        if self.process == process::id() {
            let _ = self.file.unlock();
        }
    }
}

impl Tier {
    /// Creates an empty tier in memory.
    pub(crate) fn in_memory(
        cache: &Cache,
        (layout, regions): (Layout, Vec<Region>),
        timeout: Duration,
        counters: Arc<Counters>,
    ) -> Result<Self, CacheError> {
        let options = OpenOptions::new().write(true).len_max(file_bytes(&layout));
        let file = cache.memory_file_with("parts of objects", &options);
        let files = vec![file.map_err(|error| CacheError::Cache(Arc::new(error)))?];
        let states = Arc::new(SlotStates::new(&layout));
        let table = Table::new(&regions, Arc::clone(&states));
        Ok(Self::new((layout, regions), files, None, (table, states), timeout, counters))
    }

    /// Opens a tier on disk, with the parts that an earlier process left there. Blocks until the
    /// disk hangs.
    pub(crate) fn on_disk(
        cache: &Cache,
        directory: &Path,
        slots: (Layout, Vec<Region>),
        timeout: Duration,
        counters: Arc<Counters>,
    ) -> Result<Self, CacheError> {
        let (answer, answers) = mpsc::channel();
        let (cache, path) = (cache.clone(), directory.to_owned());
        let open = move || {
            let answered = || drop(answer.send(None));
            let opened = Self::open(&cache, &path, slots, timeout, counters, &answered);
            // Dropped, and so closed, if it is late.
            let _ = answer.send(Some(opened));
        };
        let started = thread::Builder::new().name("open-tier".into()).spawn(open);
        let failed = |source| CacheError::Disk { path: directory.to_owned(), source };
        started.map_err(|error| failed(Arc::new(error)))?;
        loop {
            match answers.recv_timeout(timeout.saturating_mul(HANG)) {
                Ok(Some(opened)) => return opened,
                Ok(None) => {}
                Err(RecvTimeoutError::Timeout) => {
                    let (path, waited) = (directory.to_owned(), timeout.saturating_mul(HANG));
                    return Err(CacheError::DiskHangs { path, waited });
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(failed(Arc::new(io::Error::other("the thread panicked"))));
                }
            }
        }
    }

    /// Opens a tier on disk. Calls `answered` whenever the disk has answered.
    fn open(
        cache: &Cache,
        directory: &Path,
        (layout, regions): (Layout, Vec<Region>),
        timeout: Duration,
        counters: Arc<Counters>,
        answered: &dyn Fn(),
    ) -> Result<Self, CacheError> {
        let failed = |name: &str| {
            let path = directory.join(name);
            move |source| CacheError::Disk { path, source: Arc::new(source) }
        };
        fs::create_dir_all(directory).map_err(failed(""))?;
        // A relative path is that of now, whatever the program's directory becomes.
        let directory = &path::absolute(directory).map_err(failed(""))?;
        let open = |name| {
            answered();
            let mut options = fs::OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let opened = options.open(directory.join(name)).and_then(above_standard);
            opened.map_err(failed(name))
        };
        let lock = open(LOCK)?;
        let started = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(fs::TryLockError::WouldBlock) => {}
                Err(fs::TryLockError::Error(error)) => return Err(failed(LOCK)(error)),
            }
            if started.elapsed() >= timeout.min(LOCK_WAIT_MAX) {
                return Err(CacheError::DiskInUse { path: directory.to_owned() });
            }
            thread::sleep(LOCK_PAUSE);
        }
        let lock = LockFile { file: lock, process: process::id() };
        let index = open(INDEX)?;
        let records = read_index(&index, &layout, answered).map_err(failed(INDEX))?;
        let (names, locations) = Names::open(directory).map_err(failed(NAMES))?;
        answered();
        let data = open(DATA)?;
        answered();
        if data.metadata().map_err(failed(DATA))?.len() != file_bytes(&layout) {
            // Sparse: the space is used part by part.
            data.set_len(file_bytes(&layout)).map_err(failed(DATA))?;
        }
        answered();
        let (answers, states) = (Arc::default(), Arc::new(SlotStates::new(&layout)));
        let mut files = Vec::with_capacity(regions.len());
        for region in &regions {
            let file = DiskFile::open(directory.join(DATA), &OpenOptions::new().write(true))
                .map_err(|error| failed(DATA)(io::Error::other(error)))?;
            answered();
            let disk = LossyDisk {
                file,
                view_bytes: region
                    .class
                    .is_some()
                    .then(|| u64::from(region.slots.end) * layout.part_bytes),
                counters: Arc::clone(&counters),
                answers: Arc::clone(&answers),
                states: Arc::clone(&states),
            };
            let options = OpenOptions::new().write(true).len_max(file_bytes(&layout));
            let options = match &region.class {
                Some(class) => options.class(class),
                None => options,
            };
            let file = cache.open_backing(Arc::new(disk), &options);
            files.push(file.map_err(|error| CacheError::Cache(Arc::new(error)))?);
            answered();
        }
        let mut table = Table::new(&regions, Arc::clone(&states));
        table.restore(records, &locations);
        let (names, directory) = (Mutex::new(names), directory.to_owned());
        let disk = Disk { index, names, _lock: lock, directory, answers };
        Ok(Self::new((layout, regions), files, Some(disk), (table, states), timeout, counters))
    }

    fn new(
        (layout, regions): (Layout, Vec<Region>),
        files: Vec<bifolio::File>,
        disk: Option<Disk>,
        (table, states): (Table, Arc<SlotStates>),
        timeout: Duration,
        counters: Arc<Counters>,
    ) -> Self {
        let (table, opened_at) = (Mutex::new(table), Instant::now());
        Self {
            layout,
            regions,
            files,
            disk,
            table,
            states,
            counters,
            timeout,
            opened_at,
            paused_until_us: AtomicU64::new(0),
        }
    }

    /// Returns how many parts each region has room for.
    pub(crate) fn room(&self) -> Vec<u64> {
        self.regions.iter().map(|region| region.slots.len() as u64).collect()
    }

    /// Returns the time without an answer after which the disk hangs.
    fn hang_time(&self) -> Duration {
        self.timeout.saturating_mul(HANG)
    }

    /// Returns the file of the kept blocks of a slot, or of its other blocks.
    fn file(&self, slot: u32, is_kept: bool) -> &bifolio::File {
        let last = self.files.len() - 1;
        let region = self.regions.partition_point(|region| region.slots.end <= slot);
        &self.files[if is_kept { region.min(last) } else { last }]
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `true` while the disk is left alone, because a read of it was late.
    pub(crate) fn is_paused(&self) -> bool {
        // Relaxed: only the value counts; a read that misses a change waits once more.
        self.paused_until_us.load(Ordering::Relaxed) > self.opened_at.elapsed().as_micros() as u64
    }

    /// Reads `range` of a part into `target`. A late disk is waited for with a timer of `runtime`.
    pub(crate) async fn read(
        &self,
        key: &PartKey,
        snapshot: &Snapshot,
        range: Range<u64>,
        target: &mut [u8],
        runtime: &Handle,
    ) -> Result<(), Miss> {
        if range.end > u64::from(snapshot.length_bytes) {
            return Err(Miss::Lost);
        }
        let mut rest = target;
        for (range, is_kept) in self.pieces(snapshot, &range) {
            let length = (range.end - range.start) as usize;
            let (target, left) = mem::take(&mut rest).split_at_mut(length);
            rest = left;
            if self.read_verified(snapshot, &range, is_kept, target) {
                add(&self.counters.memory_hits, 1);
            } else {
                self.read_unverified(key, snapshot, range, is_kept, target, runtime).await?;
            }
        }
        Ok(())
    }

    /// Divides a range of a part into those that are in one file: before, in and after the kept
    /// blocks. The others are left out.
    fn pieces(
        &self,
        snapshot: &Snapshot,
        range: &Range<u64>,
    ) -> impl Iterator<Item = (Range<u64>, bool)> + use<> {
        let at = |block| (u64::from(block) * self.layout.block_bytes).clamp(range.start, range.end);
        let (start, end) = (at(snapshot.kept_blocks.start), at(snapshot.kept_blocks.end));
        let pieces = [(range.start..start, false), (start..end, true), (end..range.end, false)];
        pieces.into_iter().filter(|(piece, _)| !piece.is_empty())
    }

    /// Reads bytes that are on the disk, or in memory and not verified.
    async fn read_unverified(
        &self,
        key: &PartKey,
        snapshot: &Snapshot,
        range: Range<u64>,
        is_kept: bool,
        target: &mut [u8],
        runtime: &Handle,
    ) -> Result<(), Miss> {
        let block = self.layout.block_bytes;
        let start = range.start / block * block;
        let end = range.end.next_multiple_of(block).min(u64::from(snapshot.length_bytes));
        let mut before = self.states.get(snapshot.slot);
        let buffer = vec![0; (end - start) as usize];
        let file = self.file(snapshot.slot, is_kept);
        let position = self.slot_position(snapshot.slot) + start;
        let (result, was_in_memory) = self.read_file(file, position, buffer, runtime).await?;
        let blocks = self.blocks(&(start..end));
        add(&self.counters.verified_bytes, end - start);
        let is_right = |bytes: &Vec<u8>| {
            bytes.len() as u64 == end - start
                && blocks.clone().zip(bytes.chunks(block as usize)).all(|(block, bytes)| {
                    snapshot.checksums.get(block) == Some(&key.block_checksum(block, bytes))
                })
        };
        let Some(bytes) = result.ok().filter(is_right) else {
            if self.table().remove_wrong(key, snapshot) {
                add(&self.counters.corrupt, 1);
            }
            return Err(Miss::Lost);
        };
        target.copy_from_slice(&bytes[(range.start - start) as usize..][..target.len()]);
        if !was_in_memory {
            // What was read, and came from the disk meanwhile, may have left memory again.
            before = self.states.get(snapshot.slot);
            if !has_in_memory(file, position, &bytes) {
                return Ok(());
            }
        }
        self.states.verified(snapshot.slot, before, &blocks);
        Ok(())
    }

    /// Copies verified bytes that are in memory. Returns `false` if some of them are not.
    fn read_verified(
        &self,
        snapshot: &Snapshot,
        range: &Range<u64>,
        is_kept: bool,
        target: &mut [u8],
    ) -> bool {
        let (slot, before) = (snapshot.slot, self.states.get(snapshot.slot));
        // The slot has held the part since it was found there, and its bytes have been right since
        // `before`.
        before.is_unchanged(snapshot.state)
            && before.covers(&self.blocks(range))
            && {
                let (file, position) = (self.file(slot, is_kept), self.slot_position(slot));
                file.try_read_at(target, position + range.start).ok() == Some(target.len())
            }
            && self.states.get(slot).is_unchanged(before)
    }

    /// Returns the blocks of a range of a part.
    fn blocks(&self, range: &Range<u64>) -> Range<usize> {
        let block = self.layout.block_bytes;
        (range.start / block) as usize..range.end.div_ceil(block) as usize
    }

    /// Fills `buffer` from memory, or from the disk unless it is late. Returns with it `true` if it
    /// was all in memory.
    async fn read_file(
        &self,
        file: &bifolio::File,
        position: u64,
        mut buffer: Vec<u8>,
        runtime: &Handle,
    ) -> Result<(bifolio::Result<Vec<u8>>, bool), Miss> {
        if self.is_paused() {
            if file.try_read_at(&mut buffer, position).ok() == Some(buffer.len()) {
                add(&self.counters.memory_hits, 1);
                return Ok((Ok(buffer), true));
            }
            add(&self.counters.disk_late, 1);
            return Err(Miss::Late);
        }
        let mut future = file.read_async(buffer, position);
        let first = poll_fn(|context| Poll::Ready(Pin::new(&mut future).poll(context))).await;
        if let Poll::Ready(result) = first {
            add(&self.counters.memory_hits, 1);
            return Ok((result, true));
        }
        let started = Instant::now();
        let limited = {
            let _entered = runtime.enter();
            timeout(self.timeout, future)
        };
        let result = limited.await;
        add(&self.counters.disk_wait_us, started.elapsed().as_micros() as u64);
        let Ok(result) = result else {
            let pause = self.timeout.saturating_mul(PAUSE);
            let until_us = self.opened_at.elapsed().saturating_add(pause).as_micros();
            // Relaxed: only the value counts.
            self.paused_until_us.store(until_us.try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
            add(&self.counters.disk_late, 1);
            return Err(Miss::Late);
        };
        add(&self.counters.disk_hits, 1);
        Ok((result, false))
    }

    /// Puts a part into a slot of its region, unless it comes with a flight that has ended. Blocks
    /// while the cache is busy. Returns the slot, to be [written out](Self::write_out).
    pub(crate) fn insert(
        &self,
        location: &Location,
        (key, home): (PartKey, Home),
        blocks: &[Bytes],
        flight: Option<u64>,
    ) -> Option<u32> {
        let Some(taken) = self.table().take_slot(home.region) else {
            add(&self.counters.not_inserted, 1);
            return None;
        };
        let slot = taken.slot;
        // Freed, unless a part is published in it.
        let busy = scopeguard::guard(slot, |slot| self.table().free_slot(slot));
        if taken.evicted_bytes > 0 {
            add(&self.counters.evicted, 1);
        }
        let position = self.slot_position(slot);
        let length_bytes: u64 = blocks.iter().map(|block| block.len() as u64).sum();
        let end = position + length_bytes;
        if self.disk.is_none() && u64::from(taken.evicted_bytes) > length_bytes {
            // Ends inside the slot. A failure costs memory that the next part of the slot uses.
            let _ = self.file(slot, false).punch_hole(end..position + self.layout.part_bytes);
        }
        let before = self.states.get(slot);
        let mut checksums = Vec::with_capacity(blocks.len());
        let mut next = position;
        for (number, block) in blocks.iter().enumerate() {
            checksums.push(key.block_checksum(number, block));
            let is_kept = home.kept_blocks.contains(&(number as u32));
            let file = self.file(slot, is_kept);
            let mut written = file.write_all_at(block, next);
            let other = self.file(slot, !is_kept);
            if self.is_kept(slot) && has_unwritten(other, next..next + block.len() as u64) {
                // What the part before this one has there would be written over this block.
                written = written.and_then(|()| other.write_all_at(block, next));
            }
            if written.is_err() {
                add(&self.counters.not_inserted, 1);
                self.erase(&[slot]);
                return None;
            }
            next += block.len() as u64;
        }
        let record = Record { key, length_bytes: length_bytes as u32, checksums: checksums.into() };
        if let Some(Disk { index, .. }) = &self.disk {
            let bytes = record.encode(&self.layout, slot);
            if index.write_all_at(&bytes, self.layout.record_position(slot)).is_err() {
                add(&self.counters.disk_write_failures, 1);
            }
        }
        let published = {
            let mut table = self.table();
            let is_wanted = flight.is_none_or(|flight| table.has_flight(&key, flight));
            is_wanted.then(|| {
                self.states.verified(slot, before, &(0..blocks.len()));
                table.publish(slot, record, Some(home.kept_blocks), location)
            })
        };
        let Some(is_first) = published else {
            // The object has changed.
            self.erase(&[slot]);
            return None;
        };
        ScopeGuard::into_inner(busy);
        if is_first {
            self.add_name(&key.object, location);
        }
        add(&self.counters.inserted, 1);
        Some(slot)
    }

    /// Writes a part to the disk, if there is one. Blocks for it.
    pub(crate) fn write_out(&self, slot: u32) {
        if self.disk.is_some() {
            let position = self.slot_position(slot);
            let bytes = position..position + self.layout.part_bytes;
            // Fails for a closed cache only; then the part is lost with the process.
            let _ = self.file(slot, false).write_out(bytes.clone());
            if self.is_kept(slot) {
                let _ = self.file(slot, true).write_out(bytes);
            }
        }
    }

    /// Returns `true` if blocks of a slot may be in two files.
    fn is_kept(&self, slot: u32) -> bool {
        self.files.len() > 1 && self.regions.last().is_some_and(|last| slot < last.slots.start)
    }

    /// Notes the name of an object in the disk tier. Blocks.
    fn add_name(&self, object: &ObjectId, location: &Location) {
        let Some(Disk { names, .. }) = &self.disk else { return };
        let mut names = names.lock().unwrap_or_else(PoisonError::into_inner);
        let result = names.add(object, location).and_then(|has_grown| {
            if !has_grown {
                return Ok(());
            }
            let objects: Vec<_> =
                self.table().objects().map(|(id, location)| (id, location.clone())).collect();
            names.rewrite(objects)
        });
        if result.is_err() {
            add(&self.counters.disk_write_failures, 1);
        }
    }

    /// Erases slots that were removed from the table, which the caller then frees. Blocks.
    pub(crate) fn erase(&self, slots: &[u32]) {
        for &slot in slots {
            match &self.disk {
                Some(Disk { index, .. }) => {
                    let zeros = vec![0; self.layout.record_bytes()];
                    if index.write_all_at(&zeros, self.layout.record_position(slot)).is_err() {
                        add(&self.counters.disk_write_failures, 1);
                    }
                }
                None => {
                    let position = self.slot_position(slot);
                    // A failure costs memory that the next part of the slot uses.
                    let bytes = position..position + self.layout.part_bytes;
                    let _ = self.file(slot, false).punch_hole(bytes);
                }
            }
        }
    }

    /// Returns the result of `work`, unless the disk hangs meanwhile.
    pub(crate) async fn unless_disk_hangs<T>(
        &self,
        work: impl Future<Output = T>,
    ) -> Result<T, CacheError> {
        let Some(disk) = &self.disk else { return Ok(work.await) };
        let mut work = pin!(work);
        // Relaxed: only the value counts, here and below.
        let mut before = disk.answers.load(Ordering::Relaxed);
        loop {
            if let Ok(result) = timeout(self.hang_time(), &mut work).await {
                return Ok(result);
            }
            let answers = disk.answers.load(Ordering::Relaxed);
            if answers == before {
                let (path, waited) = (disk.directory.clone(), self.hang_time());
                return Err(CacheError::DiskHangs { path, waited });
            }
            before = answers;
        }
    }

    /// Makes the disk tier durable. Blocks.
    pub(crate) fn sync(&self) -> Result<(), CacheError> {
        let Some(Disk { index, names, .. }) = &self.disk else { return Ok(()) };
        // All, also after a failure, which leaves the others to be written.
        let synced: Vec<_> = self.files.iter().map(bifolio::File::sync_data).collect();
        let synced: Result<(), _> = synced.into_iter().collect();
        synced.map_err(|error| CacheError::Cache(Arc::new(error)))?;
        let failed = |name: &str| {
            let path = name.into();
            |source| CacheError::Disk { path, source: Arc::new(source) }
        };
        index.sync_data().map_err(failed(INDEX))?;
        let names = names.lock().unwrap_or_else(PoisonError::into_inner);
        names.sync().map_err(failed(NAMES))
    }

    fn slot_position(&self, slot: u32) -> u64 {
        u64::from(slot) * self.layout.part_bytes
    }
}

impl Drop for Tier {
    /// Closes the files of a disk tier in a thread, and waits for it until the disk hangs.
    fn drop(&mut self) {
        let (files, Some(disk)) = (mem::take(&mut self.files), self.disk.take()) else { return };
        let answers = Arc::clone(&disk.answers);
        let (closing, closed) = mpsc::channel::<()>();
        // In this thread if there is none. The lock is the last to go.
        let close = move || drop((files, disk, closing));
        let _ = thread::Builder::new().name("close-tier".into()).spawn(close);
        // Relaxed: only the value counts, here and below.
        let mut before = answers.load(Ordering::Relaxed);
        while closed.recv_timeout(self.hang_time()) == Err(RecvTimeoutError::Timeout) {
            let now = answers.load(Ordering::Relaxed);
            if now == before {
                return;
            }
            before = now;
        }
    }
}

/// Gives a file another descriptor if it has that of a standard stream: the program has closed the
/// stream, and messages to it would be written to the file.
pub(crate) fn above_standard(file: fs::File) -> io::Result<fs::File> {
    if file.as_raw_fd() >= 3 {
        return Ok(file);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&file, 3)?.into())
}

/// Returns `true` if some of these bytes of a file are newer than the disk, or being written to it.
fn has_unwritten(file: &bifolio::File, bytes: Range<u64>) -> bool {
    file.residency(bytes).is_ok_and(|found| found.dirty + found.writeback > 0)
}

/// Returns `true` if these bytes of a file are in memory.
fn has_in_memory(file: &bifolio::File, position: u64, bytes: &[u8]) -> bool {
    let mut page = [0; 4096];
    (position..).step_by(page.len()).zip(bytes.chunks(page.len())).all(|(position, bytes)| {
        let page = &mut page[..bytes.len()];
        file.try_read_at(page, position).ok() == Some(bytes.len()) && page == bytes
    })
}

fn file_bytes(layout: &Layout) -> u64 {
    u64::from(layout.slots) * layout.part_bytes
}

/// Reads the records of an index. One of another layout is emptied. Calls `answered` whenever the
/// disk has answered.
fn read_index(
    index: &fs::File,
    layout: &Layout,
    answered: &dyn Fn(),
) -> io::Result<Vec<Option<Record>>> {
    let mut header = vec![0; HEADER_BYTES as usize];
    let is_ours = index.read_exact_at(&mut header, 0).is_ok() && layout.accepts(&header);
    if !is_ours {
        index.set_len(0)?;
    }
    if !is_ours || header != layout.encode() {
        index.write_all_at(&layout.encode(), 0)?;
    }
    let end = layout.record_position(layout.slots);
    if index.metadata()?.len() > end {
        index.set_len(end)?;
    }
    answered();
    let mut reader = io::BufReader::with_capacity(1 << 20, index);
    reader.read_exact(&mut header)?;
    let mut records = Vec::new();
    let mut record = vec![0; layout.record_bytes()];
    for slot in 0..layout.slots {
        match reader.read_exact(&mut record) {
            Ok(()) => records.push(Record::decode(&record, layout, slot)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error),
        }
        if slot % 1024 == 0 {
            answered();
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::super::table::Place;
    use super::*;

    #[test]
    fn a_part_that_is_replaced_while_it_is_copied_is_not_returned() {
        const PART: usize = 2 << 20;
        const BLOCK: usize = 64 << 10;
        let cache = Cache::builder().memory(8 << 20).build().unwrap();
        let layout = Layout { part_bytes: PART as u64, block_bytes: BLOCK as u64, slots: 1 };
        let wait = Duration::from_secs(1);
        let regions = vec![Region { slots: 0..1, class: None }];
        let tier = Tier::in_memory(&cache, (layout, regions), wait, Arc::default()).unwrap();
        let key = |number| PartKey { object: [7; 16], number };
        let (location, home) = (Location::from("a"), Home { region: 0, kept_blocks: 0..0 });
        let is_over = AtomicBool::new(false);
        let (mut copied, mut refused, mut wrong) = (0, 0, 0);
        thread::scope(|scope| {
            scope.spawn(|| {
                let parts = [1, 2].map(|byte| vec![Bytes::from(vec![byte; BLOCK]); PART / BLOCK]);
                for number in (0..2).cycle() {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    let part = &parts[number as usize];
                    tier.insert(&location, (key(number), home.clone()), part, None);
                    // Now and then a copy ends before the next part.
                    thread::sleep(Duration::from_micros(300));
                }
            });
            let (started, mut target) = (Instant::now(), vec![0; PART]);
            while (copied < 5 || refused < 20) && started.elapsed() < Duration::from_secs(30) {
                for number in 0..2 {
                    let Place::Slot(snapshot) = tier.table().find(&key(number), &home) else {
                        continue;
                    };
                    if tier.read_verified(&snapshot, &(0..PART as u64), false, &mut target) {
                        copied += 1;
                        let is_right = target.iter().all(|byte| u32::from(*byte) == number + 1);
                        wrong += u32::from(!is_right);
                    } else {
                        refused += 1;
                    }
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert!(copied >= 5 && refused >= 20, "{copied} copied, {refused} refused");
        assert_eq!(wrong, 0);
    }
}
