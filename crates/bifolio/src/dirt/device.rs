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

use super::throttle::{DirtyPages, part_of};
use crate::error::Error;
use crate::io::{DeviceIdentity, Load};
use crate::page::PAGE_BYTES;
use crate::stats::DeviceStats;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, WeakList};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Ranges that wait to be written soon, at most. Other dirty pages are written when they reach
/// their age.
const RANGES_MAX: usize = 256;

#[derive(Debug)]
struct Calls<F> {
    /// Set while the flusher is called, or serves the device.
    is_called: bool,
    again: bool,
    ranges: Vec<(Weak<F>, Range<u64>)>,
    looked_for_stores: Instant,
}

/// Files of the device that the flusher serves; other open files cost a round nothing.
#[derive(Debug)]
pub(crate) struct Files<F> {
    /// Files that may have something dirty, or in flight: the first mark adds a file, and a round
    /// that finds it clean removes it.
    pub(crate) dirty: WeakList<F>,
    /// Files that maps may store to, which are searched for stores.
    pub(crate) mapped: WeakList<F>,
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

/// A storage device, with files of the type `F`.
#[derive(Debug)]
pub(crate) struct Device<F> {
    identity: Option<DeviceIdentity>,
    first_file: String,
    pub(crate) dirty_pages: DirtyPages,
    /// Pages in read, and threads, that wait for the device.
    pub(crate) load: Load,
    pub(crate) files: Mutex<Files<F>>,
    calls: Mutex<Calls<F>>,
    /// Mirrors `Calls::is_called`, for threads that mark a page.
    is_called: AtomicBool,
    rounds: Mutex<Rounds>,
    /// Dirty folios that reclaim has met since the last round.
    wanted_folios: AtomicU64,
    pub(crate) held: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Round<F> {
    number: u64,
    answers: u64,
    pub(crate) ranges: Vec<(Weak<F>, Range<u64>)>,
    /// Set if the round scans for stores through maps.
    pub(crate) looks_for_stores: bool,
    /// Folios that reclaim wants clean.
    pub(crate) wanted_folios: u64,
    /// Set if the device wrote nothing in the last round.
    pub(crate) is_probe: bool,
}

impl<F> Default for Files<F> {
    fn default() -> Self {
        Self { dirty: WeakList::default(), mapped: WeakList::default(), is_enlisted: false }
    }
}

impl<F> Device<F> {
    pub(crate) fn new(
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
    pub(crate) fn enlist(
        &self,
        file: &Weak<F>,
        list: impl FnOnce(&mut Files<F>) -> &mut WeakList<F>,
    ) -> bool {
        let mut files = self.files.lock();
        list(&mut files).push(Weak::clone(file));
        !std::mem::replace(&mut files.is_enlisted, true)
    }

    /// Returns `true` if the flusher has nothing to do for the device, which is then off the
    /// flusher's list until a file is added to one of the device's lists. Not called during a
    /// round, which holds files.
    pub(crate) fn delist(&self) -> bool {
        let mut files = self.files.lock();
        let is_idle = files.dirty.are_all_dropped() && files.mapped.are_all_dropped();
        files.is_enlisted &= !is_idle;
        is_idle
    }

    /// Iterates over the files that may have something dirty. Holds only the current one.
    pub(crate) fn dirty_files(&self) -> impl Iterator<Item = Arc<F>> + use<F> {
        self.files.lock().dirty.snapshot()
    }

    /// Removes files that have nothing dirty from the list. A file that has something dirty is on
    /// the list all the time: a bound that falls, and a write gate, look for it there. `delist`
    /// returns `true` if the file has nothing dirty and is enlisted again by its next mark.
    pub(crate) fn delist_clean_files(&self, delist: impl Fn(&F) -> bool) {
        // Addresses are unique: an entry keeps the memory of a dropped file allocated.
        let mut clean = HashSet::new();
        // Not under the lock: a thread that marks the first folio of a file holds the lock of the
        // file's dirty list.
        for file in self.dirty_files() {
            if delist(&file) {
                clean.insert(Arc::as_ptr(&file));
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
    pub(crate) fn call(&self) -> bool {
        self.calls.lock().call(&self.is_called)
    }

    /// Asks for a round for a range of a file, which is else written when it reaches its age.
    pub(crate) fn call_for(&self, file: &Weak<F>, range: Range<u64>) -> bool {
        let mut calls = self.calls.lock();
        let is_full = calls.ranges.len() >= RANGES_MAX;
        // Ranges of a caller that proceeds through a file in steps are merged.
        match calls.ranges.last_mut() {
            Some((other, last)) if Weak::ptr_eq(other, file) && last.end == range.start => {
                last.end = range.end;
            }
            _ if is_full => return false,
            _ => calls.ranges.push((Weak::clone(file), range)),
        }
        calls.call(&self.is_called)
    }

    /// Adds to the number of folios to write out: reclaim has met them, or a writer on another
    /// device waits.
    pub(crate) fn want_written(&self, folios: u64) {
        self.wanted_folios.fetch_add(folios, Ordering::Relaxed);
    }

    /// Begins a round. Later calls are for the next round.
    pub(crate) fn begin_round(&self, tick: std::time::Duration) -> Round<F> {
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
    pub(crate) fn end_round(
        &self,
        round: &Round<F>,
        error: Option<Error>,
        met_gates: bool,
    ) -> bool {
        let mut rounds = self.rounds.lock();
        debug_assert!(round.number <= rounds.begun, "round {} has not begun", round.number);
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
    pub(crate) fn end_service(&self) -> bool {
        let mut calls = self.calls.lock();
        calls.is_called = calls.again;
        self.is_called.store(calls.again, Ordering::Relaxed);
        calls.again
    }

    pub(crate) fn rounds_begun(&self) -> u64 {
        self.rounds.lock().begun
    }

    /// Returns the trouble of the last round, if that began after round number `round` and wrote
    /// nothing.
    pub(crate) fn trouble_after(&self, round: u64) -> Option<Error> {
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
    pub(crate) fn is_held_back(&self) -> bool {
        self.rounds.lock().is_held_back
    }

    /// Records the end of a write-out of any origin.
    pub(crate) fn note_end(&self, error: Option<&Error>) {
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

    pub(crate) fn answers(&self) -> u64 {
        self.rounds.lock().answers
    }

    pub(crate) fn stats(&self, max_pages: u64) -> DeviceStats {
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

impl<F> Calls<F> {
    fn call(&mut self, mirror: &AtomicBool) -> bool {
        self.again = true;
        let must_send = !std::mem::replace(&mut self.is_called, true);
        mirror.store(true, Ordering::Relaxed);
        must_send
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
        let load = Arc::new(Loads::default()).new_load();
        let device = Device::<()>::new(None, "f".into(), dirty_pages, load);
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
