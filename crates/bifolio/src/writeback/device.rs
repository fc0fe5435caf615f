//! Devices: state shared by all files on one storage device.
//!
//! Files are on one device if their backings say so (`FileIdentity`: `st_dev`, or a number of the
//! user's, which is never taken for an `st_dev`). A backing that does not say is a device of its
//! own. A device that fails does not stop files of another.
//!
//! ROUNDS AND TROUBLE. A round in which the device wrote nothing and refused something records its
//! trouble: the cause, and the number of the round. A writer that finds no room asks for a round,
//! and waits for room, or for the trouble of a round that began after the writer arrived, whose
//! error it returns. The first folio that is written, by the flusher or a sync, clears the trouble.

use super::lsns::{HeldBack, UNCOMMITTED};
use super::throttle::{DirtyPages, part_of};
use crate::error::{Error, ErrorKind, Result, write_error};
use crate::inode::Inode;
use crate::io::{DeviceIdentity, Load};
use crate::page::{FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::DeviceStats;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, WeakList};
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Ranges that wait to be written soon, at most.
const RANGES_MAX: usize = 256;

/// Reason why a folio cannot become dirty now. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// The limit of dirty pages is reached.
    DirtyLimit,
    /// The table of LSNs must grow.
    Lsns,
}

/// Error of a gate that holds bytes back.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) file: String,
    pub(crate) held: HeldBack,
    pub(crate) held_bytes: u64,
    pub(crate) cause: Option<Arc<io::Error>>,
}

impl Refusal {
    pub(super) fn check(refusal: Option<Self>) -> Result<()> {
        refusal.map_or(Ok(()), |refusal| Err(refusal.to_error()))
    }

    pub(crate) fn to_error(&self) -> Error {
        let (lsn, held_bytes) = (self.held.lsn, self.held_bytes);
        let reason = match (lsn, &self.cause) {
            (_, Some(cause)) => format!("it cannot make LSN {lsn} durable: {cause}"),
            (UNCOMMITTED, None) => "they are not committed: written with LSN u64::MAX, or by a \
                                    PageRefMut that got no LSN (GatedFile::assign_lsn)"
                .to_owned(),
            (_, None) => format!("LSN {lsn} is not durable yet"),
        };
        let pinned_bytes = self.held_bytes / self.held.folios.max(1) * self.held.pinned;
        let pinned = match pinned_bytes {
            0 => String::new(),
            bytes => format!(
                "; {bytes} of them are in a PageRefMut that has no LSN yet (PageRefMut::assign_lsn)"
            ),
        };
        let text = format!("the write gate holds back {held_bytes} bytes: {reason}{pinned}");
        let error = Error::new(ErrorKind::Gated, text).in_file(self.file.clone());
        match &self.cause {
            Some(cause) => error.because(Arc::clone(cause)),
            None => error,
        }
    }

    /// Returns the refusal as the cause of an error of a write.
    pub(crate) fn to_io_error(&self, kind: io::ErrorKind) -> Error {
        let kind = self.cause.as_ref().map_or(kind, |cause| cause.kind());
        write_error(&self.file, 0..self.held_bytes, io::Error::new(kind, self.to_error()))
    }
}

/// Reservation for a folio in the dirty limit; released on drop.
#[derive(Debug)]
#[must_use]
pub(crate) struct RoomForDirt<'a> {
    pub(crate) inode: &'a Inode,
    /// Pages that are counted: 0 if the folio is dirty already, or is never written out.
    pub(crate) counted_pages: u64,
}

impl RoomForDirt<'_> {
    /// Marks the folio dirty. The caller has kept its lock since [`Inode::make_room`].
    pub(crate) fn mark_dirty(mut self, folio: &FolioRef<'_>, locked: &LockedFolio<'_>) {
        let inode = self.inode;
        if std::mem::take(&mut self.counted_pages) > 0 {
            inode.store.drop_slot(locked);
            let marked = inode.dirty.mark_counted(&inode.memory.folios, folio.id());
            debug_assert!(marked.is_new, "{:?} became dirty without its lock", folio.id());
            inode.enlist_if(marked.must_enlist);
            inode.device.iter().for_each(|device| inode.flusher.note_dirty(device));
        } else if inode.device.is_none() {
            inode.mark_dirty(folio, locked);
        }
    }
}

impl Drop for RoomForDirt<'_> {
    fn drop(&mut self) {
        self.inode.dirty.pages.sub(self.counted_pages);
    }
}

#[derive(Debug)]
struct Calls {
    /// Set while the flusher is called, or serves the device.
    is_called: bool,
    again: bool,
    ranges: Vec<(Weak<Inode>, Range<u64>)>,
    looked_for_stores: Instant,
}

/// Files of the device that the flusher serves; other open files cost a round nothing.
#[derive(Debug, Default)]
pub(crate) struct Files {
    /// Files that may have something dirty, or in flight: the first mark adds a file, and a round
    /// that finds it clean removes it.
    pub(crate) dirty: WeakList<Inode>,
    /// Files that maps may store to, which are searched for stores.
    pub(crate) mapped: WeakList<Inode>,
    /// Set while the device is on the flusher's list of active devices.
    is_enlisted: bool,
}

#[derive(Debug, Default)]
struct Rounds {
    begun: u64,
    answers: u64,
    trouble: Option<(u64, Error)>,
    /// Set if the last round wrote nothing because of write gates.
    is_held_back: bool,
    last_error: Option<Error>,
}

#[derive(Debug)]
pub(crate) struct Device {
    identity: Option<DeviceIdentity>,
    first_file: String,
    pub(crate) dirty_pages: DirtyPages,
    /// Pages in read, and threads, that wait for the device.
    pub(crate) load: Load,
    pub(super) files: Mutex<Files>,
    calls: Mutex<Calls>,
    /// Mirrors `Calls::is_called`, for threads that mark a page.
    is_called: AtomicBool,
    rounds: Mutex<Rounds>,
    /// Dirty folios that reclaim has met since the last round.
    wanted_folios: AtomicU64,
    pub(super) held: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Round {
    number: u64,
    answers: u64,
    pub(super) ranges: Vec<(Weak<Inode>, Range<u64>)>,
    /// Set if the round scans for stores through maps.
    pub(super) looks_for_stores: bool,
    /// Folios that reclaim wants clean.
    pub(super) wanted_folios: u64,
    /// Set if the device wrote nothing in the last round.
    pub(super) is_probe: bool,
}

impl Device {
    pub(super) fn new(
        identity: Option<DeviceIdentity>,
        first_file: String,
        dirty_pages: DirtyPages,
        load: Load,
    ) -> Self {
        Self {
            identity,
            first_file,
            dirty_pages,
            load,
            files: Mutex::default(),
            calls: Mutex::new(Calls {
                is_called: false,
                again: false,
                ranges: Vec::new(),
                looked_for_stores: Instant::now(),
            }),
            is_called: AtomicBool::new(false),
            rounds: Mutex::default(),
            wanted_folios: AtomicU64::new(0),
            held: AtomicU64::new(0),
        }
    }

    /// Adds a file to a list. Returns `true` if the device must be added to the flusher's list.
    pub(super) fn enlist(
        &self,
        file: &Weak<Inode>,
        list: impl FnOnce(&mut Files) -> &mut WeakList<Inode>,
    ) -> bool {
        let mut files = self.files.lock();
        list(&mut files).push(Weak::clone(file));
        !std::mem::replace(&mut files.is_enlisted, true)
    }

    /// Returns `true` if the flusher has nothing to do for the device, which is then off the
    /// flusher's list until a file is added to one of the device's lists. Not called during a
    /// round, which holds files.
    pub(super) fn delist(&self) -> bool {
        let mut files = self.files.lock();
        let is_idle = files.dirty.are_all_dropped() && files.mapped.are_all_dropped();
        files.is_enlisted &= !is_idle;
        is_idle
    }

    /// Iterates over the files that may have something dirty. Holds only the current one.
    pub(super) fn dirty_files(&self) -> impl Iterator<Item = Arc<Inode>> + use<> {
        self.files.lock().dirty.snapshot()
    }

    /// Removes files that have nothing dirty from the list. A file that has something dirty is on
    /// the list all the time: a bound that falls, and a write gate, look for it there.
    fn delist_clean_files(&self) {
        // Addresses are unique: an entry keeps the memory of a dropped file allocated.
        let mut clean = HashSet::new();
        // Not under the lock: a thread that marks the first folio of a file holds the lock of the
        // file's dirty list.
        for inode in self.dirty_files() {
            if inode.dirty.delist() {
                if inode.has_gate() {
                    inode.free_lsns();
                }
                clean.insert(Arc::as_ptr(&inode));
            }
        }
        if !clean.is_empty() {
            // The first entry alone: a file marked since then has a second one.
            self.files.lock().dirty.retain(|entry| !clean.remove(&entry.as_ptr()));
        }
    }

    /// Returns `true` if the flusher is called, or serves the device.
    pub(crate) fn is_called(&self) -> bool {
        self.is_called.load(Ordering::Relaxed)
    }

    /// Asks for a round. Returns `true` if the caller must send a thread.
    pub(super) fn call(&self) -> bool {
        self.calls.lock().call(&self.is_called)
    }

    /// Asks for a round for a range of a file, which is else written when it reaches its age.
    pub(super) fn call_for(&self, inode: &Inode, range: Range<u64>) -> bool {
        let file = Weak::clone(&inode.this);
        let mut calls = self.calls.lock();
        let is_full = calls.ranges.len() >= RANGES_MAX;
        // Ranges of a caller that proceeds through a file in steps are merged.
        match calls.ranges.last_mut() {
            Some((other, last)) if Weak::ptr_eq(other, &file) && last.end == range.start => {
                last.end = range.end;
            }
            _ if is_full => return false,
            _ => calls.ranges.push((file, range)),
        }
        calls.call(&self.is_called)
    }

    /// Adds to the number of folios to write out: reclaim has met them, or a writer on another
    /// device waits.
    pub(crate) fn want_written(&self, folios: u64) {
        self.wanted_folios.fetch_add(folios, Ordering::Relaxed);
    }

    /// Begins a round. Later calls are for the next round.
    pub(super) fn begin_round(&self, tick: std::time::Duration) -> Round {
        let has_mapped = !self.files.lock().mapped.are_all_dropped();
        let mut calls = self.calls.lock();
        calls.again = false;
        let looks_for_stores = has_mapped && calls.looked_for_stores.elapsed() >= tick;
        if looks_for_stores {
            calls.looked_for_stores = Instant::now();
        }
        let ranges = std::mem::take(&mut calls.ranges);
        drop(calls);
        let mut rounds = self.rounds.lock();
        rounds.begun += 1;
        Round {
            number: rounds.begun,
            answers: rounds.answers,
            ranges,
            looks_for_stores,
            wanted_folios: self.wanted_folios.swap(0, Ordering::Relaxed),
            is_probe: rounds.trouble.is_some(),
        }
    }

    /// Ends a round, with its error, if any. `met_gates` is set if write gates held folios back.
    /// Returns `true` if the device is in trouble now.
    pub(super) fn end_round(&self, round: &Round, error: Option<Error>, met_gates: bool) -> bool {
        self.delist_clean_files();
        let mut rounds = self.rounds.lock();
        let has_taken = rounds.answers > round.answers;
        rounds.is_held_back = met_gates && !has_taken;
        if has_taken || self.dirty_pages.own() == 0 {
            rounds.trouble = None;
        } else if let Some(error) = error {
            rounds.trouble = Some((round.number, error));
        }
        rounds.trouble.is_some()
    }

    /// Ends the service of the flusher. Returns `true` if the device was called again, so that it
    /// needs another round.
    pub(super) fn end_service(&self) -> bool {
        let mut calls = self.calls.lock();
        calls.is_called = calls.again;
        self.is_called.store(calls.again, Ordering::Relaxed);
        calls.again
    }

    pub(super) fn rounds_begun(&self) -> u64 {
        self.rounds.lock().begun
    }

    /// Returns the trouble of the last round, if that began after round number `round` and wrote
    /// nothing.
    pub(super) fn trouble_after(&self, round: u64) -> Option<Error> {
        let rounds = self.rounds.lock();
        let trouble = rounds.trouble.as_ref().filter(|(number, _)| *number > round);
        trouble.map(|(_, error)| error.clone())
    }

    /// Returns `true` if the device accepted no write when last asked.
    pub(crate) fn is_stuck(&self) -> bool {
        self.rounds.lock().trouble.is_some()
    }

    /// Returns `true` if the last round wrote nothing because write gates held the folios back:
    /// another one is futile until a gate opens, and calls the flusher.
    pub(super) fn is_held_back(&self) -> bool {
        self.rounds.lock().is_held_back
    }

    /// Records the end of a write-out of any origin.
    pub(super) fn note_end(&self, error: Option<&Error>) {
        let mut rounds = self.rounds.lock();
        match error {
            None => {
                rounds.answers += 1;
                rounds.trouble = None;
                rounds.is_held_back = false;
            }
            Some(error) => rounds.last_error = Some(error.clone()),
        }
    }

    pub(super) fn answers(&self) -> u64 {
        self.rounds.lock().answers
    }

    pub(super) fn stats(&self, max_pages: u64) -> DeviceStats {
        let rounds = self.rounds.lock();
        DeviceStats {
            device: self.identity.map(DeviceIdentity::number),
            first_file: self.first_file.clone(),
            dirty_bytes: self.dirty_pages.own() * PAGE_BYTES,
            dirty_bytes_max: part_of(self.dirty_pages.left_of(max_pages)) * PAGE_BYTES,
            is_stuck: rounds.trouble.is_some(),
            last_error: rounds.last_error.as_ref().map(ToString::to_string),
        }
    }
}

impl Calls {
    fn call(&mut self, mirror: &AtomicBool) -> bool {
        self.again = true;
        let must_send = !std::mem::replace(&mut self.is_called, true);
        mirror.store(true, Ordering::Relaxed);
        must_send
    }
}

#[cfg(all(test, not(loom)))]
impl Inode {
    /// Asks for `rounds` rounds of the file's device. Returns `true` if the file was on the list of
    /// dirty files all the time.
    pub(crate) fn stays_listed_for(&self, rounds: u64) -> bool {
        let device = self.device.as_ref().expect("a file over storage");
        let end = device.rounds_begun() + rounds;
        let is_listed = || device.dirty_files().any(|inode| std::ptr::eq(&*inode, self));
        while device.rounds_begun() < end {
            self.flusher.call(device);
            if !is_listed() {
                return false;
            }
        }
        true
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::error::io_error;
    use crate::io::Loads;

    #[test]
    fn a_later_writer_does_not_get_the_trouble_of_an_older_round() {
        let dirty_pages = DirtyPages::alone(&Arc::new(AtomicU64::new(0)));
        let device =
            Device::new(None, "f".into(), dirty_pages, Arc::new(Loads::default()).new_load());
        device.dirty_pages.add(1);
        let error =
            || Some(io_error("f", "write", Some(0..1), std::io::ErrorKind::StorageFull.into()));
        assert!(device.call() && !device.call());
        let round = device.begin_round(std::time::Duration::ZERO);
        assert!(!round.is_probe);
        let came = device.rounds_begun();
        assert!(device.end_round(&round, error(), false) && device.is_stuck());
        assert!(device.trouble_after(0).is_some() && device.trouble_after(came).is_none());
        assert!(!device.end_service(), "the calls were before the round");
        assert!(device.call());
        let round = device.begin_round(std::time::Duration::ZERO);
        assert!(round.is_probe);
        assert!(!device.call(), "the flusher serves the device");
        device.end_round(&round, error(), false);
        assert!(device.trouble_after(came).is_some());
        assert!(device.end_service(), "called during the round");
        let round = device.begin_round(std::time::Duration::ZERO);
        device.note_end(None);
        assert!(!device.is_stuck(), "something was written");
        assert!(!device.end_round(&round, error(), false) && !device.is_stuck());
        assert!(!device.end_service());
    }
}
