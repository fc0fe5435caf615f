//! The slots of the parts: in a memory file of the cache, or in a file of the disk tier, which the
//! cache keeps in memory as far as there is room.
//!
//! A part is checked when it is read, block by block, whether its bytes were in memory or not. That
//! also finds a slot that was reused between the look-up and the read.

use std::fs;
use std::future::{Future, poll_fn};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Instant;

use bifolio::{Cache, DiskFile, DiskOptions, Features, OpenOptions};
use bytes::Bytes;

use crate::disk::LossyDisk;
use crate::error::CacheError;
use crate::metrics::{Counters, add};
use crate::record::{HEADER_BYTES, Layout, PartKey, Record};
use crate::table::{Snapshot, Table};

/// Files of a disk tier.
const DATA: &str = "parts";
const INDEX: &str = "index";
const LOCK: &str = "lock";

/// The cached parts.
#[derive(Debug)]
pub(crate) struct Tier {
    pub(crate) layout: Layout,
    file: bifolio::File,
    /// The index of the disk tier, and the lock on its directory.
    disk: Option<(fs::File, fs::File)>,
    table: Mutex<Table>,
    counters: Arc<Counters>,
}

impl Tier {
    /// Creates an empty tier in memory.
    pub(crate) fn in_memory(
        cache: &Cache,
        layout: Layout,
        counters: Arc<Counters>,
    ) -> Result<Self, CacheError> {
        let options = OpenOptions::new().write(true).len_max(file_bytes(&layout));
        let file = cache.memory_file_with("parts of objects", &options);
        let file = file.map_err(|error| CacheError::Cache(Arc::new(error)))?;
        let table = Mutex::new(Table::new(layout.slots));
        Ok(Self { layout, file, disk: None, table, counters })
    }

    /// Opens a tier on disk, with the parts that an earlier process left there. Blocks.
    pub(crate) fn on_disk(
        cache: &Cache,
        directory: &Path,
        layout: Layout,
        counters: Arc<Counters>,
    ) -> Result<Self, CacheError> {
        let failed = |name: &str| {
            let path = directory.join(name);
            move |source| CacheError::Disk { path, source: Arc::new(source) }
        };
        fs::create_dir_all(directory).map_err(failed(""))?;
        let open = |name| {
            let mut options = fs::OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            options.open(directory.join(name)).map_err(failed(name))
        };
        let lock = open(LOCK)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => {
                return Err(CacheError::DiskInUse { path: directory.to_owned() });
            }
            Err(fs::TryLockError::Error(error)) => return Err(failed(LOCK)(error)),
        }
        let index = open(INDEX)?;
        let records = read_index(&index, &layout).map_err(failed(INDEX))?;
        let data = open(DATA)?;
        if data.metadata().map_err(failed(DATA))?.len() > file_bytes(&layout) {
            data.set_len(file_bytes(&layout)).map_err(failed(DATA))?;
        }
        let options = DiskOptions { read: true, write: true, ..Default::default() };
        let features = Features::probe(&[]);
        let file = DiskFile::open(directory.join(DATA), &options, &features)
            .map_err(|error| failed(DATA)(io::Error::other(error)))?;
        let disk = LossyDisk { file, counters: Arc::clone(&counters) };
        let options = OpenOptions::new().write(true).len_max(file_bytes(&layout));
        let file = cache.open_backing(Arc::new(disk), &options);
        let file = file.map_err(|error| CacheError::Cache(Arc::new(error)))?;
        // Sparse: the space is used part by part.
        let resized = file.set_len(file_bytes(&layout));
        resized.map_err(|error| CacheError::Cache(Arc::new(error)))?;
        let mut table = Table::new(layout.slots);
        records.into_iter().for_each(|record| table.restore(record));
        let (disk, table) = (Some((index, lock)), Mutex::new(table));
        Ok(Self { layout, file, disk, table, counters })
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads `range` of a part. Returns `None` if the bytes are not those of the part any more: it
    /// is no longer cached then.
    pub(crate) async fn read(
        &self,
        key: &PartKey,
        snapshot: &Snapshot,
        range: Range<u64>,
    ) -> Option<Bytes> {
        let block = self.layout.block_bytes;
        let start = range.start / block * block;
        let end = range.end.next_multiple_of(block).min(u64::from(snapshot.length_bytes));
        if range.end > end {
            return None;
        }
        let position = self.slot_position(snapshot.slot) + start;
        let mut future = self.file.read_async(position, vec![0; (end - start) as usize]);
        let first = poll_fn(|context| Poll::Ready(Pin::new(&mut future).poll(context))).await;
        let result = match first {
            Poll::Ready(result) => {
                add(&self.counters.memory_hits, 1);
                result
            }
            Poll::Pending => {
                let started = Instant::now();
                let result = future.await;
                add(&self.counters.disk_hits, 1);
                add(&self.counters.disk_wait_us, started.elapsed().as_micros() as u64);
                result
            }
        };
        let first_block = (start / block) as usize;
        let is_right = |bytes: &Vec<u8>| {
            let mut blocks = bytes.chunks(block as usize).enumerate();
            bytes.len() as u64 == end - start
                && blocks.all(|(index, bytes)| {
                    let block = first_block + index;
                    snapshot.checksums.get(block) == Some(&key.block_checksum(block, bytes))
                })
        };
        let Some(bytes) = result.ok().filter(is_right) else {
            if self.table().remove_wrong(key, snapshot) {
                add(&self.counters.corrupt, 1);
            }
            return None;
        };
        let wanted = (range.start - start) as usize..(range.end - start) as usize;
        if wanted.len() < bytes.len() / 2 {
            return Some(Bytes::copy_from_slice(&bytes[wanted]));
        }
        Some(Bytes::from(bytes).slice(wanted))
    }

    /// Puts a part into a slot, unless its flight has ended. Blocks while the cache or the disk is
    /// busy.
    pub(crate) fn insert(&self, key: PartKey, part: &[u8], flight: u64) {
        let Some(taken) = self.table().take_slot() else {
            add(&self.counters.not_inserted, 1);
            return;
        };
        let slot = taken.slot;
        if taken.evicted_bytes > 0 {
            add(&self.counters.evicted, 1);
        }
        let position = self.slot_position(slot);
        let end = position + part.len() as u64;
        if self.disk.is_none() && u64::from(taken.evicted_bytes) > part.len() as u64 {
            // Ends inside the slot. A failure costs memory that the next part of the slot uses.
            let _ = self.file.punch_hole(end..position + self.layout.part_bytes);
        }
        let checksums = key.checksums(part, self.layout.block_bytes as usize);
        let record = Record { key, length_bytes: part.len() as u32, checksums };
        if self.file.write_all_at(part, position).is_err() {
            add(&self.counters.not_inserted, 1);
            self.erase(&[slot]);
            return;
        }
        if let Some((index, _)) = &self.disk {
            let bytes = record.encode(&self.layout, slot);
            if index.write_all_at(&bytes, self.layout.record_position(slot)).is_err() {
                add(&self.counters.disk_write_failures, 1);
            }
        }
        let is_wanted = {
            let mut table = self.table();
            let is_wanted = table.has_flight(&key, flight);
            if is_wanted {
                table.publish(slot, record);
            }
            is_wanted
        };
        if !is_wanted {
            // The object has changed.
            self.erase(&[slot]);
            return;
        }
        add(&self.counters.inserted, 1);
        if self.disk.is_some() {
            // Fails for a closed cache only; then the part is lost with the process.
            let _ = self.file.write_out(position..end);
        }
    }

    /// Erases slots that were removed from the table, and frees them. Blocks.
    pub(crate) fn erase(&self, slots: &[u32]) {
        for &slot in slots {
            match &self.disk {
                Some((index, _)) => {
                    let zeros = vec![0; self.layout.record_bytes()];
                    if index.write_all_at(&zeros, self.layout.record_position(slot)).is_err() {
                        add(&self.counters.disk_write_failures, 1);
                    }
                }
                None => {
                    let position = self.slot_position(slot);
                    // A failure costs memory that the next part of the slot uses.
                    let _ = self.file.punch_hole(position..position + self.layout.part_bytes);
                }
            }
            self.table().free_slot(slot);
        }
    }

    /// Makes the disk tier durable. Blocks.
    pub(crate) fn sync(&self) -> Result<(), CacheError> {
        let Some((index, _)) = &self.disk else { return Ok(()) };
        self.file.sync_data().map_err(|error| CacheError::Cache(Arc::new(error)))?;
        index
            .sync_data()
            .map_err(|error| CacheError::Disk { path: INDEX.into(), source: Arc::new(error) })
    }

    fn slot_position(&self, slot: u32) -> u64 {
        u64::from(slot) * self.layout.part_bytes
    }
}

fn file_bytes(layout: &Layout) -> u64 {
    u64::from(layout.slots) * layout.part_bytes
}

/// Reads the records of an index. One of another layout is emptied.
fn read_index(index: &fs::File, layout: &Layout) -> io::Result<Vec<Option<Record>>> {
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
    }
    Ok(records)
}
