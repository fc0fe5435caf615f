//! A database that several processes use: one for all connections of this process to it.
//!
//! # Safety
//! Opens files of a VFS that is registered.
#![allow(unsafe_code)]

use super::descriptors::{Descriptors, Parked};
use super::index::Index;
use super::log::{Look, Regions, pages_of_rest};
use super::reads::Noted;
use crate::descriptors::{self, Key};
use crate::fork::{Mutex, PerProcess};
use crate::name::FileName;
use crate::refused::{OpenFailure, Refusal};
use crate::settings::Settings;
use crate::sqlite::{self, Api, Vfs};
use crate::system::{Answer, SystemFile};
use bifolio::{Access, Cache};
use std::collections::HashMap;
use std::ffi::{OsString, c_int};
use std::fs::File;
use std::mem;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Databases that are open in this process.
static REGISTRY: PerProcess<Mutex<HashMap<Key, Arc<Database>>>> = PerProcess::new();
/// Looks at an index whose header another process changes, which takes it less than a microsecond.
const LOOKS_MAX: u32 = 1000;

/// First byte and number of bytes of the header that tell a change: from the size of a page to the
/// count of free pages, with the format versions and the count of commits.
const HEADER_OFFSET: u64 = 16;
const HEADER_BYTES: usize = 24;
/// Bytes of a page at whose offset 18 the format versions are; 2 stands for a log.
const VERSIONS: Range<usize> = 18..20;

/// Bytes and size that tell a commit of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    bytes: [u8; HEADER_BYTES],
    size: i64,
}

impl Header {
    fn read(own: &mut SystemFile) -> Answer<Self> {
        let mut bytes = [0; HEADER_BYTES];
        match own.read(&mut bytes, HEADER_OFFSET) {
            Ok(()) | Err(sqlite::IOERR_SHORT_READ) => {}
            Err(code) => return Err(code),
        }
        Ok(Self { bytes, size: own.size()? })
    }

    /// Reads the header from the cache, which has what the file has.
    fn kept(file: &bifolio::File) -> Option<Self> {
        let mut bytes = [0; HEADER_BYTES];
        file.read_at(&mut bytes, HEADER_OFFSET).ok()?;
        Some(Self { bytes, size: i64::try_from(file.len()).ok()? })
    }

    fn has_log(&self) -> bool {
        let start = VERSIONS.start - HEADER_OFFSET as usize;
        self.bytes[start..start + VERSIONS.len()].contains(&2)
    }
}

pub(crate) struct Database {
    pub(super) cache: Cache,
    pub(super) index: Arc<Index>,
    api: Api,
    path: PathBuf,
    log_path: PathBuf,
    settings: Settings,
    noted: Arc<Noted>,
    /// Set if the database has a log, or may have one.
    has_log: AtomicBool,
    /// Cleared for good if a page that must go did not.
    is_trusted: AtomicBool,
    /// Number of changes of [`State::log`] that are more than a commit.
    log_version: AtomicU64,
    /// Set while pages are as new as the first SHARED of the process, and W1 has not come yet.
    is_fresh: AtomicBool,
    state: Mutex<State>,
}

/// Result of W1: all pages in the cache are at least as new as `look`.
#[derive(Debug)]
pub(super) struct Checked {
    version: u64,
    look: Look,
    stamp: Option<Stamp>,
}

impl Checked {
    /// Returns the size of the file, if it was looked at.
    pub(super) fn file_bytes(&self) -> Option<i64> {
        i64::try_from(self.stamp?.bytes).ok()
    }
}

/// Size and time of change of the file, which tell its content beside a log that is nameless
/// ([`Look::is_nameless`]). Such a log has nothing to checkpoint; only a program that replaces the
/// file changes it, while it has all locks and has the index made anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    bytes: u64,
    changed: (i64, i64),
}

impl Stamp {
    pub(super) fn of(file: &File) -> Option<Self> {
        let found = descriptors::status(file.as_fd()).ok()?;
        let bytes = u64::try_from(found.st_size).ok()?;
        Some(Self { bytes, changed: (found.st_ctime, found.st_ctime_nsec) })
    }
}

/// A file in its cache.
struct InCache {
    cache: Cache,
    file: bifolio::File,
    noted: Arc<Noted>,
}

impl InCache {
    /// Opens the file of the cache, unless it is, and finds the pages that the cache has kept.
    fn open(path: &Path, settings: &Settings, parked: &mut Parked) -> Result<Self, String> {
        let cache = settings.cache()?;
        let storage = parked.open_storage(path, settings.direct())?;
        let noted = Arc::clone(storage.noted());
        let file = cache.open_backing(storage, &settings.options());
        let file = file.map_err(|error| error.to_string())?;
        // It reads the header only.
        file.set_access(Access::Random);
        Ok(Self { cache, file, noted })
    }
}

struct State {
    connections: usize,
    /// The file of the cache, and descriptors that no connection uses. Open until the last
    /// connection ends.
    parked: Parked,
    /// Those that have SHARED or more.
    holders: usize,
    /// Keeps the pages while there are connections.
    file: Option<bifolio::File>,
    /// As last seen with SHARED.
    header: Option<Header>,
    /// As last seen in the index; `None` if pages may be of any age.
    log: Option<Look>,
    /// As last seen beside a log that is nameless.
    stamp: Option<Stamp>,
}

/// Returns `true` if a database is open in this process, and shared.
pub(crate) fn is_open(key: Key) -> bool {
    REGISTRY.get().lock().contains_key(&key)
}

impl Database {
    /// Opens a database for a connection, or joins those that have it open, and returns the
    /// descriptors of the connection. `found` is what the path names, if that exists. No other is
    /// opened or closed meanwhile.
    ///
    /// # Safety
    /// `vfs` is registered.
    pub(super) unsafe fn open(
        api: Api,
        vfs: *mut Vfs,
        (name, found): (&impl Fn() -> FileName, Option<Key>),
        flags: c_int,
        settings: &Settings,
    ) -> Result<(Arc<Self>, Descriptors), OpenFailure> {
        let path = name().path().to_owned();
        let joined = found.and_then(|key| REGISTRY.get().lock().get(&key).cloned());
        if let Some(database) = joined {
            database.settings.check_joined_with(settings).map_err(|problem| {
                let text = format!("{}: {problem}", path.display());
                OpenFailure::Refused(Refusal { code: sqlite::MISUSE, text })
            })?;
            let mut state = database.state.lock();
            // SAFETY: the contract.
            let own = unsafe { state.parked.open(api, vfs, name, flags) };
            let own = own.map_err(OpenFailure::Code)?;
            state.connections += 1;
            drop(state);
            return Ok((database, own));
        }
        let mut parked = found.and_then(Parked::take).unwrap_or_else(|| Parked::of(found));
        // A file that exists is opened in the cache first: the cache finds its pages again only
        // while nothing has the file open for writing, such as the system's file.
        let in_cache = found.and_then(|_| InCache::open(&path, settings, &mut parked).ok());
        // SAFETY: the contract.
        let own = match unsafe { parked.open(api, vfs, name, flags) } {
            Ok(own) => own,
            Err(code) => {
                drop(in_cache);
                parked.close();
                return Err(OpenFailure::Code(code));
            }
        };
        let in_cache = in_cache.map_or_else(|| InCache::open(&path, settings, &mut parked), Ok);
        match in_cache.map(|in_cache| Self::first(api, &path, settings, &mut parked, in_cache)) {
            Ok(database) => Ok((database, own)),
            Err(text) => {
                parked.keep(own);
                parked.close();
                Err(OpenFailure::Refused(Refusal { code: sqlite::CANTOPEN, text }))
            }
        }
    }

    /// Returns the database of its first connection, which takes `parked`.
    fn first(
        api: Api,
        path: &Path,
        settings: &Settings,
        parked: &mut Parked,
        InCache { cache, file, noted }: InCache,
    ) -> Arc<Self> {
        let mut log_path = OsString::from(path);
        log_path.push("-wal");
        let database = Arc::new(Self {
            cache,
            index: parked.index(path),
            api,
            path: path.to_owned(),
            log_path: PathBuf::from(log_path),
            settings: settings.clone(),
            noted,
            has_log: AtomicBool::new(false),
            is_trusted: AtomicBool::new(true),
            log_version: AtomicU64::new(0),
            is_fresh: AtomicBool::new(false),
            state: Mutex::new(State {
                connections: 1,
                parked: mem::take(parked),
                holders: 0,
                file: Some(file),
                header: None,
                log: None,
                stamp: None,
            }),
        });
        let key = database.state.lock().parked.key();
        key.map(|key| REGISTRY.get().lock().insert(key, Arc::clone(&database)));
        database
    }

    /// Opens the database of a connection that a child has inherited, or joins those that have. No
    /// other is opened or closed meanwhile.
    pub(super) fn adopt(parents: &Self, own: &mut Descriptors) -> Option<Arc<Self>> {
        let key = own.key()?;
        let joined = REGISTRY.get().lock().get(&key).cloned();
        if let Some(database) = joined {
            database.state.lock().connections += 1;
            return Some(database);
        }
        let Self { api, path, settings, .. } = parents;
        let mut parked = Parked::of(Some(key));
        let in_cache = InCache::open(path, settings, &mut parked);
        let told = |text: &String| api.log(sqlite::CANTOPEN, text);
        let in_cache = in_cache.inspect_err(told).ok()?;
        Some(Self::first(*api, path, settings, &mut parked, in_cache))
    }

    /// Returns another handle of the file in the cache, which does not read ahead yet.
    pub(super) fn handle(&self) -> Result<bifolio::File, String> {
        let storage = self.state.lock().parked.open_storage(&self.path, self.settings.direct())?;
        let opened = self.cache.open_backing(storage, &self.settings.options());
        opened.inspect(|file| file.set_access(Access::Random)).map_err(|error| error.to_string())
    }

    /// Ends a connection, whose handle is closed and whose locks are released. No other is opened
    /// or closed meanwhile.
    pub(super) fn leave(&self, own: Descriptors) {
        let mut state = self.state.lock();
        state.parked.keep(own);
        state.connections -= 1;
        if state.connections > 0 {
            return;
        }
        let (file, parked) = (state.file.take(), mem::take(&mut state.parked));
        drop(state);
        if let Some(Err(error)) = file.map(bifolio::File::close) {
            self.api.log(sqlite::IOERR_CLOSE, &error.to_string());
        }
        parked.key().map(|key| REGISTRY.get().lock().remove(&key));
        parked.close();
    }

    /// Returns `true` if reads may be served by the cache at all.
    pub(super) fn is_trusted(&self) -> bool {
        // Acquire: pairs with the Release in `distrust`.
        self.is_trusted.load(Ordering::Acquire)
    }

    /// Has all reads go past the cache from now on.
    pub(super) fn distrust(&self, why: &str) {
        let text = format!("{}: {why}: it is read past the cache from now on", self.path.display());
        self.api.log(sqlite::IOERR_READ, &text);
        // Release: pairs with the Acquire in `is_trusted`.
        self.is_trusted.store(false, Ordering::Release);
    }

    pub(super) fn has_log(&self) -> bool {
        // Relaxed: changes under SHARED of the first connection, or under EXCLUSIVE.
        self.has_log.load(Ordering::Relaxed)
    }

    pub(super) fn note_log(&self) {
        // Relaxed: as above.
        self.has_log.store(true, Ordering::Relaxed);
    }

    /// Has the pages with bytes of `range` go.
    fn forget(&self, file: &bifolio::File, range: Range<u64>) {
        if let Err(error) = file.invalidate(range) {
            self.distrust(&error.to_string());
        }
    }

    fn forget_all(&self, state: &State) {
        if let Some(file) = &state.file {
            self.forget(file, 0..u64::MAX >> 1);
        }
    }

    /// Has all pages go of which nothing else is known, unless the file is as it was before the
    /// first of them was read (K1). With EXCLUSIVE, or after a look at the index.
    fn forget_unknown(&self, state: &State) {
        if !state.file.as_ref().is_some_and(bifolio::File::is_unchanged) {
            self.forget_all(state);
        }
    }

    /// Notes what was seen of the log.
    fn see(&self, state: &mut State, log: Option<Look>) {
        // Relaxed: see `is_fresh`.
        self.is_fresh.store(false, Ordering::Relaxed);
        let is_same = |(before, now): (Look, Look)| before.has_same_file(&now);
        if !state.log.zip(log).is_some_and(is_same) {
            // Relaxed: see `is_checked`.
            self.log_version.fetch_add(1, Ordering::Relaxed);
        }
        state.log = log;
    }

    /// Notes that a connection has SHARED (R1).
    pub(super) fn enter(&self, own: &mut SystemFile) -> Answer {
        let mut state = self.state.lock();
        if state.holders == 0 {
            let untrusted = self.noted.lock();
            let is_unknown = self.has_log() || state.header.is_none();
            let kept = state.file.as_ref().filter(|file| is_unknown && file.is_unchanged());
            let kept = kept.and_then(Header::kept);
            let found = kept.map_or_else(|| Header::read(own), Ok).inspect_err(|_| {
                self.noted.unlock();
                // What was not to be trusted is not known any more.
                self.forget_all(&state);
            })?;
            let has_log = found.has_log() || self.log_path.exists();
            if is_unknown || has_log || state.header != Some(found) {
                // K1 is also true of what was read without the lock.
                if kept.is_none() {
                    self.forget_all(&state);
                }
                self.see(&mut state, None);
            } else if let Some(file) = &state.file {
                untrusted.into_iter().for_each(|range| self.forget(file, range));
            }
            // Relaxed: see `has_log`.
            self.has_log.store(has_log, Ordering::Relaxed);
            self.is_fresh.store(true, Ordering::Relaxed);
            state.header = Some(found);
        }
        state.holders += 1;
        Ok(())
    }

    /// Returns `true` if pages may be read before the index of a log was asked for, as SQLite does
    /// to learn that there is one.
    pub(super) fn is_fresh(&self) -> bool {
        // Relaxed: set under SHARED of the first connection; cleared by the first W1, before that
        // has pages go.
        self.is_fresh.load(Ordering::Relaxed)
    }

    /// Notes that a connection is about to release SHARED.
    pub(super) fn exit(&self) {
        let mut state = self.state.lock();
        state.holders -= 1;
        if state.holders == 0 {
            self.noted.unlock();
        }
    }

    /// Notes that a connection has EXCLUSIVE, or is about to release it: with a log, nothing that
    /// was seen of it counts.
    pub(super) fn note_exclusive(&self) {
        if self.has_log() {
            let mut state = self.state.lock();
            self.forget_unknown(&state);
            self.see(&mut state, None);
        }
    }

    /// Notes header and size before a lock is lowered under which this process may have changed
    /// the file (R4).
    ///
    /// With a log, the header tells nothing, and `enter` does not compare it.
    pub(super) fn note_own(&self, own: &mut SystemFile) {
        let header = if self.has_log() { None } else { Header::read(own).ok() };
        self.noted.end_writes();
        self.state.lock().header = header;
    }

    /// Notes that no other process can take back what this one has written: its journal is gone.
    pub(super) fn note_commit(&self) {
        self.noted.keep_writes();
    }

    /// Notes a write of this process, which the system's file has, or part of it if it failed (R3).
    pub(super) fn note_write(
        &self,
        file: &bifolio::File,
        position: u64,
        bytes: &[u8],
        is_written: bool,
    ) {
        let range = position..position.saturating_add(bytes.len() as u64);
        if !is_written {
            self.forget(file, range.clone());
        } else if let Err(error) = file.update(bytes, position) {
            self.distrust(&error.to_string());
        }
        if position == 0
            && let Some(versions) = bytes.get(VERSIONS)
        {
            // Relaxed: see `has_log`.
            self.has_log.store(versions.contains(&2), Ordering::Relaxed);
        }
        if !self.has_log() {
            // If this transaction fails, another process may roll it back, without a trace.
            self.noted.note_write(range);
        }
    }

    /// Takes the length of the file, which it has on the storage.
    pub(super) fn refresh(&self, file: &bifolio::File) {
        if let Err(error) = file.refresh_len() {
            self.distrust(&error.to_string());
        }
    }

    /// Returns `true` if W1 would find nothing since it returned `checked`. Looks at `stamped`, if
    /// given, where the log does not tell its content.
    pub(super) fn is_checked(
        &self,
        checked: &Checked,
        regions: &Regions,
        stamped: Option<&File>,
    ) -> bool {
        // Relaxed: pages never become older than `checked.look` while the connection has SHARED.
        // What makes them so excludes that, and changes the version before `enter` locks the state.
        let version = self.log_version.load(Ordering::Relaxed);
        let is_same = |now: Look| {
            let has_stamp = |file: &File| checked.stamp == Stamp::of(file);
            checked.look.has_same_file(&now)
                && (!now.is_nameless() || stamped.is_none_or(has_stamp))
        };
        checked.version == version && regions.look().is_some_and(is_same)
    }

    /// Has pages go that other processes have written in checkpoints (W1 to W3). Returns `None` if
    /// nothing can be said: the connection itself changes the index.
    pub(super) fn check_log(
        &self,
        regions: &mut Regions,
        file: &File,
        is_writer: bool,
    ) -> Option<Checked> {
        let mut state = self.state.lock();
        let mut now = regions.look();
        if now.is_none() {
            // The barrier between the two copies of the header that this connection writes: it
            // reads no page before the next barrier. Or another connection writes them: a commit
            // writes nothing to the file.
            let is_same = |seen: &Look| regions.is_backfilled_as(seen);
            if is_writer || state.log.as_ref().is_some_and(is_same) {
                return None;
            }
            now = look(regions);
        }
        // After the look: pages that are read from now on are as new as both.
        let stamp = now.filter(Look::is_nameless).and_then(|_| Stamp::of(file));
        let is_same = |(seen, now): (Look, Look)| {
            seen.has_same_file(&now) && (!now.is_nameless() || state.stamp == stamp)
        };
        if !state.log.zip(now).is_some_and(is_same) {
            self.catch_up(&mut state, now, regions);
        }
        state.stamp = stamp;
        self.see(&mut state, now);
        // Relaxed: see `is_checked`.
        now.map(|look| Checked { version: self.log_version.load(Ordering::Relaxed), look, stamp })
    }

    /// Has the pages go that were written to the file between what was seen and `now`.
    fn catch_up(&self, state: &mut State, now: Option<Look>, regions: &mut Regions) {
        let pages = match (&state.log, &now) {
            (Some(seen), Some(now)) => self.pages_between(seen, now, regions),
            _ => None,
        };
        let is_same = |again: Look| now.is_some_and(|now| again.salts == now.salts);
        match (pages, now, &state.file) {
            (Some(pages), Some(now), Some(file)) if look(regions).is_some_and(is_same) => {
                for page in pages {
                    let start = u64::from(page - 1) * now.page_bytes;
                    self.forget(file, start..start + now.page_bytes);
                }
            }
            // All pages that are read from now on are as new as this.
            _ => self.forget_unknown(state),
        }
    }

    /// Returns the pages that were written to the file between two looks; `None` if it cannot be
    /// known.
    fn pages_between(&self, seen: &Look, now: &Look, regions: &mut Regions) -> Option<Vec<u32>> {
        let (mut pages, mut frame) = (Vec::new(), seen.backfill);
        if now.salts != seen.salts {
            if !now.restarts(seen) {
                return None;
            }
            pages = pages_of_rest(&self.log_path, seen, now)?;
            frame = 0;
        }
        if frame > now.backfill || now.page_bytes == 0 {
            return None;
        }
        while frame < now.backfill {
            frame += 1;
            while Regions::region_of(frame) >= regions.len() {
                let number = regions.len();
                let region = self.index.map_existing(u64::from(number))?;
                // SAFETY: of that size, and mapped until `xShmUnmap` of the connection.
                unsafe { regions.note(number as usize, region.cast()) };
            }
            pages.push(regions.page(frame)?);
        }
        pages.iter().all(|page| *page > 0).then_some(pages)
    }

    /// Notes the end of a checkpoint of this process, which began with [`Self::check_log`] (W4).
    pub(super) fn note_checkpoint(&self, regions: &Regions) {
        let mut state = self.state.lock();
        if let (Some(seen), Some(now)) = (state.log, look(regions))
            && seen.salts == now.salts
            && seen.backfill <= now.backfill
        {
            self.see(&mut state, Some(now));
        }
    }

    /// Returns what was seen of the log if all of its frames were, in the file.
    pub(super) fn seen_whole(&self) -> Option<Look> {
        self.state.lock().log.filter(|seen| seen.backfill == seen.last)
    }

    /// Notes a restart of this process, before which all frames of `whole` were in the file (W5).
    pub(super) fn note_restart(&self, whole: &Look, regions: &Regions) {
        let mut state = self.state.lock();
        if let Some(now) = look(regions)
            && state.log == Some(*whole)
            && now.restarts(whole)
        {
            self.see(&mut state, Some(now));
        }
    }
}

/// Looks at the index until its header is whole.
fn look(regions: &Regions) -> Option<Look> {
    for _ in 0..LOOKS_MAX {
        if let Some(found) = regions.look() {
            return Some(found);
        }
        std::hint::spin_loop();
    }
    None
}
