//! The child of a scene of kills: works on real files until it is killed, and keeps a journal.
//!
//! Everything except the files and their maximum length is drawn anew for each session: the bound,
//! the folio size, direct or buffered transfers, maps, threads, operations.
//!
//! # Safety
//! Stores raw words through maps, inside their ranges, one aligned word at a time; a session with
//! maps truncates no file.
#![allow(unsafe_code)]

use crate::history::{WORD_BYTES, word_of};
use crate::journal::{CALLS, Journal, What};
use anyhow::{Context as _, bail, ensure};
use bifolio::{Access, Cache, DirectIo, ErrorKind, File, OpenOptions};
use fastrand::Rng;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Files of a scene.
pub const FILES: usize = 2;
const OPERATIONS: usize = 12;
const WRITE_BYTES_MAX: u64 = 128 << 10;

/// Returns the maximum length of a scene's files.
pub fn len_bytes_max(seed: u64) -> u64 {
    (128 << 10) << Rng::with_seed(seed).u64(0..4)
}

/// The folder of the files, which holds nothing else.
pub fn files_in(directory: &Path) -> PathBuf {
    directory.join("files")
}

/// The names of a file: it has two.
pub fn names(directory: &Path, file: usize) -> [PathBuf; 2] {
    ["file", "link"].map(|name| files_in(directory).join(format!("{name}-{file}")))
}

/// State that the threads of a session share.
struct Session<'l> {
    journal: &'l Journal,
    cache: &'l Cache,
    directory: &'l Path,
    options: OpenOptions,
    /// A file that is swapped; each of its words is zero or encodes its position.
    ballast: File,
    weights: Vec<u32>,
    len_bytes_max: u64,
    is_mappable: bool,
    /// It ends by a loss of power, not by a kill.
    loses_power: bool,
}

/// A thread of a session.
struct Victim<'l> {
    session: &'l Session<'l>,
    number: usize,
    random: Rng,
    files: Vec<File>,
}

/// Runs one session. It ends by itself when the journal is full: then everything is closed
/// normally.
pub fn live(directory: &Path, seed: u64, number: u64, loses_power: bool) -> anyhow::Result<()> {
    let journal = Journal::open(&directory.join("journal"))?;
    let mut random = Rng::with_seed(seed.wrapping_mul(0x9E37_79B9).wrapping_add(number));
    let is_mappable = random.u32(0..4) == 0 && crate::scene::can_map();
    // A map in a smaller cache may find it full.
    let memory_bytes = (if is_mappable { 2 << 20 } else { 256 << 10 }) << random.u32(0..4);
    let mut builder =
        Cache::builder().memory(memory_bytes).reclaim_wait_max(Duration::from_millis(60_000));
    builder = builder
        .dirty_age_max(Duration::from_millis(random.choice([2, 10, 50, 30_000]).unwrap_or(10)));
    builder = builder.swap_max(16 << 20).swap_directory(files_in(directory));
    let cache = builder.build()?;
    let folio_bytes = match is_mappable || memory_bytes < 2 << 20 {
        true => 4096,
        false => 4096 << random.u64(0..5),
    };
    let direct = random.choice([DirectIo::Auto, DirectIo::Auto, DirectIo::Never]);
    let options = OpenOptions::new().read(true).write(true).mappable(is_mappable);
    let options = options.faults(crate::scene::fault_mode(number % 2 == 1));
    let options = options.direct(direct.unwrap_or_default()).folio_bytes(folio_bytes);
    let mut weights: Vec<u32> =
        (0..OPERATIONS).map(|_| random.choice([0, 1, 2, 4, 16]).unwrap_or(1)).collect();
    // A session that never writes or never syncs shows nothing.
    (weights[0], weights[5]) = (weights[0].max(2), weights[5].max(1));
    let session = Session {
        journal: &journal,
        cache: &cache,
        directory,
        options: options.len_max(len_bytes_max(seed)),
        ballast: cache.memory_file("ballast")?,
        weights,
        len_bytes_max: len_bytes_max(seed),
        is_mappable,
        loses_power,
    };
    let threads = random.usize(1..4);
    let seeds: Vec<u64> = (0..threads).map(|_| random.u64(..)).collect();
    thread::scope(|scope| {
        let work = |(number, seed): (usize, u64)| {
            let (session, random) = (&session, Rng::with_seed(seed));
            scope.spawn(move || Victim { session, number, random, files: Vec::new() }.work())
        };
        let workers: Vec<_> = seeds.into_iter().enumerate().map(work).collect();
        let ends = workers.into_iter().map(|worker| worker.join().expect("a victim panicked"));
        ends.collect::<anyhow::Result<Vec<()>>>()
    })?;
    drop(session);
    cache.close().context("the close of the cache")
}

impl Victim<'_> {
    /// Works until the journal is full.
    fn work(mut self) -> anyhow::Result<()> {
        for file in 0..FILES {
            let opened = self.open(file)?;
            self.files.push(opened);
        }
        let total: u32 = self.session.weights.iter().sum();
        loop {
            let mut drawn = self.random.u32(0..total);
            let mut operation = 0;
            while drawn >= self.session.weights[operation] {
                drawn -= self.session.weights[operation];
                operation += 1;
            }
            let file = self.random.usize(0..FILES);
            let done = match operation {
                0 | 1 => self.write(file),
                2 => self.pin_mut(file),
                3 => self.map(file),
                4 => self.set_len(file),
                5..=7 => self.sync(file),
                8 => self.read(file),
                9 => self.advise(file),
                10 => self.reopen(file),
                _ => self.swap(),
            };
            if done.with_context(|| format!("operation {operation}, file {file}"))?.is_none() {
                return Ok(());
            }
        }
    }

    /// Opens a file by either of its names.
    fn open(&mut self, file: usize) -> anyhow::Result<File> {
        let names = names(self.session.directory, file);
        let name = &names[self.random.usize(0..2)];
        let opened = match self.random.u32(0..4) {
            0 => {
                let descriptor = std::fs::File::options().read(true).write(true).open(name)?;
                self.session.cache.open_fd(descriptor.into(), &self.session.options)
            }
            _ => self.session.cache.open(name, &self.session.options),
        };
        opened.with_context(|| format!("open {}", name.display()))
    }

    fn range(&mut self, bytes_max: u64) -> Range<u64> {
        let most = bytes_max.min(self.session.len_bytes_max);
        let length = match self.random.u32(0..4) {
            0 => self.random.u64(1..=64) * WORD_BYTES,
            1 | 2 => 4096,
            _ => self.random.u64(1..=most / WORD_BYTES) * WORD_BYTES,
        };
        let length = length.min(most);
        let places = (self.session.len_bytes_max - length) / WORD_BYTES;
        let mut start = self.random.u64(0..=places) * WORD_BYTES;
        if self.random.bool() {
            start &= !4095;
        }
        start..start + length
    }

    fn range_in_folio(&mut self, file: &File) -> Range<u64> {
        let range = self.range(file.folio_bytes());
        let folio_end = (range.start / file.folio_bytes() + 1) * file.folio_bytes();
        range.start..range.end.min(folio_end)
    }

    /// Records a change, makes it, and records how far it certainly got; `None` if the journal is
    /// full. After a truncation by another thread, there may be nothing to change.
    fn change(
        &self,
        call: &str,
        file: usize,
        range: Range<u64>,
        make: impl FnOnce(u64) -> bifolio::Result<u64>,
    ) -> anyhow::Result<Option<()>> {
        let what = if call == "set_len" { What::Zero } else { What::Write };
        let (journal, call) = (self.session.journal, number_of(call));
        let begun = journal.begin(what, call, file, self.number, range);
        let Some(begun) = begun else { return Ok(None) };
        match make(begun.id) {
            Ok(certain_end) => journal.end(begun, certain_end),
            Err(error) if error.kind() == ErrorKind::PastEnd => {}
            Err(error) => bail!("{} failed: {error} ({error:?})", CALLS[call]),
        }
        Ok(Some(()))
    }

    fn write(&mut self, file: usize) -> anyhow::Result<Option<()>> {
        let range = self.range(WRITE_BYTES_MAX);
        self.change("write_at", file, range.clone(), |id| {
            let written = self.files[file].write_at(&words(id, &range), range.start)?;
            Ok(range.start + written as u64)
        })
    }

    fn pin_mut(&mut self, file: usize) -> anyhow::Result<Option<()>> {
        let opened = self.files[file].clone();
        let range = self.range_in_folio(&opened);
        self.change("pin_mut", file, range.clone(), |id| {
            opened.pin_mut(range.clone())?.copy_from(0, &words(id, &range)).unwrap();
            Ok(range.end)
        })
    }

    fn map(&mut self, file: usize) -> anyhow::Result<Option<()>> {
        if !self.session.is_mappable {
            return self.write(file);
        }
        let range = self.range(64 << 10);
        if self.files[file].len() < range.end {
            return self.write(file);
        }
        let mut map = self.files[file].map_mut(range.clone())?;
        let stored = self.change("map store", file, range.clone(), |id| {
            for (offset, index) in (range.start / WORD_BYTES..range.end / WORD_BYTES).enumerate() {
                let word = map.as_mut_ptr().wrapping_add(offset * 8).cast::<u64>();
                // SAFETY: an aligned word inside the map, of a file that this session does not cut.
                unsafe { word.write_volatile(word_of(id, index)) };
            }
            Ok(range.end)
        });
        if self.random.bool() {
            return stored;
        }
        let length = map.len();
        self.note_sync("map sync", file, range, |_| map.sync(0..length))
    }

    fn set_len(&mut self, file: usize) -> anyhow::Result<Option<()>> {
        if self.session.is_mappable {
            return self.write(file);
        }
        let length = self.random.u64(0..=self.session.len_bytes_max / WORD_BYTES) * WORD_BYTES;
        let end = self.session.len_bytes_max;
        self.change("set_len", file, length..end, |_| {
            self.files[file].set_len(length).map(|()| end)
        })
    }

    fn sync(&mut self, file: usize) -> anyhow::Result<Option<()>> {
        let whole = 0..self.session.len_bytes_max;
        match self.random.u32(0..4) {
            0 => self.note_sync("sync_all", file, whole, File::sync_all),
            1 => {
                let range = self.range(64 << 10);
                let durable = self.session.loses_power || self.random.bool();
                let call = if durable { File::sync_range } else { File::write_back };
                self.note_sync("sync_range", file, range.clone(), |f| call(f, range))
            }
            _ => self.note_sync("sync_data", file, whole, File::sync_data),
        }
    }

    fn note_sync(
        &self,
        call: &str,
        file: usize,
        range: Range<u64>,
        sync: impl FnOnce(&File) -> bifolio::Result<()>,
    ) -> anyhow::Result<Option<()>> {
        let end = range.end;
        let number = number_of(call);
        let begun = self.session.journal.begin(What::Sync, number, file, self.number, range);
        let Some(begun) = begun else { return Ok(None) };
        sync(&self.files[file]).with_context(|| format!("{call} failed"))?;
        self.session.journal.end(begun, end);
        Ok(Some(()))
    }

    fn read(&mut self, file: usize) -> anyhow::Result<Option<()>> {
        let range = self.range(WRITE_BYTES_MAX);
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.files[file].read_at(&mut bytes, range.start)?;
        Ok(Some(()))
    }

    fn advise(&mut self, file: usize) -> anyhow::Result<Option<()>> {
        let range = self.range(WRITE_BYTES_MAX);
        let file = &self.files[file];
        match self.random.u32(0..4) {
            0 => file.set_access(Access::Random),
            1 => file.prefetch(range)?,
            _ => drop(file.evict(range)?),
        }
        Ok(Some(()))
    }

    /// Closes the handle, which makes everything durable, and opens the file by a name again.
    fn reopen(&mut self, file: usize) -> anyhow::Result<Option<()>> {
        let again = self.open(file)?;
        let old = std::mem::replace(&mut self.files[file], again);
        let whole = 0..self.session.len_bytes_max;
        self.note_sync("close", file, whole, |_| old.close())
    }

    /// Makes the memory file grow beyond the bound.
    fn swap(&mut self) -> anyhow::Result<Option<()>> {
        let position = self.random.u64(0..256) * (16 << 10);
        let range = position..position + (16 << 10);
        let wanted = words(1, &range);
        if self.random.bool() {
            self.session.ballast.write_at(&wanted, position)?;
            return Ok(Some(()));
        }
        let mut found = vec![0; wanted.len()];
        let read = self.session.ballast.read_at(&mut found, position)?;
        let pairs = found[..read].chunks_exact(8).zip(wanted.chunks_exact(8));
        for (found, wanted) in pairs {
            ensure!(found == wanted || found == [0; 8], "the swapped file is wrong in {range:?}");
        }
        Ok(Some(()))
    }
}

fn number_of(call: &str) -> usize {
    CALLS.iter().position(|name| *name == call).expect("a call that the journal knows")
}

/// Returns the bytes that the change `id` leaves in a range.
fn words(id: u64, range: &Range<u64>) -> Vec<u8> {
    let words = range.start / WORD_BYTES..range.end / WORD_BYTES;
    words.flat_map(|index| word_of(id, index).to_le_bytes()).collect()
}
