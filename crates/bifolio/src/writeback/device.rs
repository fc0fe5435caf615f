//! A device, as write-back knows it: what the files that stand on it share.
//!
//! Files are of one device if their backings say so (`Backing::device`: by default `st_dev`, or a
//! number of the user's own, which is never taken for one); a backing that says nothing is a device
//! of its own. A device has its dirty pages, its part of what may be dirty, its flusher, and its
//! trouble: what one device does must not stop the files of another.
//!
//! ```text
//!   Flusher ---- devices, threads, the gate of held writers      flusher.rs, throttle.rs
//!     '-- Device   files, dirty pages, calls, rounds, trouble    here
//!           '-- DirtyPages   its part of what may be dirty       throttle.rs
//! ```
//!
//! ROUNDS AND TROUBLE. The flusher comes to a device in rounds. A round in which the device took
//! nothing and refused something leaves its trouble: the cause, and the number of the round. A
//! writer who finds no room asks for a round and waits for room, or for the trouble of a round that
//! began after he came: then the device was asked on his behalf, and its answer is his error. The
//! first folio that is taken, for the flusher or for a sync, ends the trouble.

use super::inode::Inode;
use super::inode::Load;
use super::throttle::{DirtyPages, part_of};
use crate::io::{DeviceIdentity, IoError};
use crate::page::{FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::DeviceStats;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, WeakList};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Ranges that wait to be written out soon, at the most. What does not fit waits for its age.
const RANGES_MAX: usize = 256;

/// As much is dirty as may be; nothing was changed.
#[derive(Debug)]
pub(crate) struct NoRoom;

/// Room for a folio among what is dirty; given back if it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct RoomForDirt<'a> {
    pub(super) inode: &'a Inode,
    /// Pages that are counted; none if the folio is dirty already, or is never written out.
    pub(super) counted_pages: u64,
}

impl RoomForDirt<'_> {
    /// The folio's bytes are about to become newer than its storage's. The caller has kept its lock
    /// since [`Inode::make_room`].
    pub(crate) fn mark_dirty(mut self, folio: &FolioRef<'_>, locked: &LockedFolio<'_>) {
        let inode = self.inode;
        if std::mem::take(&mut self.counted_pages) > 0 {
            inode.store.drop_slot(locked);
            let marked = inode.dirty.mark_counted(&inode.memory.folios, folio.id());
            debug_assert!(marked.is_new, "{:?} has become dirty without its lock", folio.id());
            inode.enlist_if(marked.must_enlist);
            inode.device.iter().for_each(|device| inode.flusher.note_dirty(device));
        } else if inode.device.is_none() {
            inode.mark_dirty(folio, locked);
        }
    }
}

impl Drop for RoomForDirt<'_> {
    fn drop(&mut self) {
        self.inode.dirty.uncount(self.counted_pages);
    }
}

/// Requests to the flusher for a device.
#[derive(Debug)]
struct Calls {
    /// It is on its way to the device, or there.
    is_called: bool,
    /// It has been called since it came there.
    again: bool,
    /// Bytes of files that are to be written out soon.
    ranges: Vec<(Weak<Inode>, Range<u64>)>,
    /// When stores through maps were last looked for.
    looked_for_stores: Instant,
}

/// Those of its files that the flusher looks after. What a round costs does not grow with files
/// that have nothing dirty, however many are open.
#[derive(Debug, Default)]
pub(super) struct Files {
    /// Those that may have something dirty, or in flight: the first mark puts a file here, and the
    /// end of a round takes it off that finds it settled.
    pub(super) dirty: WeakList<Inode>,
    /// Those in regions, where stores are looked for.
    pub(super) mapped: WeakList<Inode>,
    /// The device is among those that the flusher looks after.
    is_enlisted: bool,
}

/// The results of rounds.
#[derive(Debug, Default)]
struct Rounds {
    begun: u64,
    /// Write-outs that have ended well.
    answers: u64,
    trouble: Option<(u64, Arc<IoError>)>,
    last_error: Option<Arc<IoError>>,
}

/// See the head of the file.
#[derive(Debug)]
pub(crate) struct Device {
    identity: Option<DeviceIdentity>,
    /// The file that was first opened on it.
    first_file: String,
    pub(super) dirty_pages: DirtyPages,
    /// Pages in the hands of readers that wait for it.
    pub(super) load: Load,
    files: Mutex<Files>,
    /// Some of its files are in regions, where stores must be looked for.
    has_regions: AtomicBool,
    calls: Mutex<Calls>,
    /// Mirrors `Calls::is_called`: whoever marks a page need not take the lock to find it set.
    is_called: AtomicBool,
    rounds: Mutex<Rounds>,
    /// Mirrors `Rounds::trouble`.
    is_stuck: AtomicBool,
    /// Dirty folios that reclaim has met since the last round.
    wanted_folios: AtomicU64,
    /// Writers who are held.
    held: AtomicU64,
}

/// The start of a round.
#[derive(Debug)]
pub(super) struct Round {
    number: u64,
    /// Write-outs that had ended well before it.
    answers: u64,
    pub(super) ranges: Vec<(Weak<Inode>, Range<u64>)>,
    /// The stores through maps are to be looked for.
    pub(super) looks_for_stores: bool,
    /// Folios that reclaim wants clean.
    pub(super) wanted_folios: u64,
    /// The device took nothing in the last one.
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
            has_regions: AtomicBool::new(false),
            calls: Mutex::new(Calls {
                is_called: false,
                again: false,
                ranges: Vec::new(),
                looked_for_stores: Instant::now(),
            }),
            is_called: AtomicBool::new(false),
            rounds: Mutex::default(),
            is_stuck: AtomicBool::new(false),
            wanted_folios: AtomicU64::new(0),
            held: AtomicU64::new(0),
        }
    }

    /// Puts a file on a list; whether the device is to be put on that of the flusher.
    pub(super) fn enlist(
        &self,
        file: &Weak<Inode>,
        list: impl FnOnce(&mut Files) -> &mut WeakList<Inode>,
    ) -> bool {
        let mut files = self.files.lock();
        list(&mut files).push(Weak::clone(file));
        if files.mapped.len() > 0 {
            self.has_regions.store(true, Ordering::Relaxed);
        }
        !std::mem::replace(&mut files.is_enlisted, true)
    }

    /// Whether the flusher has nothing to look after: then the next file that is put on a list is
    /// to put the device on the flusher's again. Not during a round, which has files in its hands.
    pub(super) fn delist(&self) -> bool {
        let mut files = self.files.lock();
        let is_idle = files.dirty.are_all_gone() && files.mapped.are_all_gone();
        files.is_enlisted &= !is_idle;
        is_idle
    }

    /// The files that may have something dirty, one after the other: only the one that is at hand
    /// is kept from being freed.
    pub(super) fn dirty_files(&self) -> impl Iterator<Item = Arc<Inode>> + use<> {
        self.files.lock().dirty.snapshot()
    }

    /// The files that are in regions, in the same way.
    pub(super) fn mapped_files(&self) -> impl Iterator<Item = Arc<Inode>> + use<> {
        self.files.lock().mapped.snapshot()
    }

    /// Takes off the list what has nothing dirty any more.
    fn delist_clean_files(&self) {
        let count = self.files.lock().dirty.len();
        for _ in 0..count {
            // Not under the lock: whoever marks the first folio of a file has that of its list.
            let Some(inode) = self.files.lock().dirty.pop() else { break };
            if !inode.dirty.delist() {
                self.files.lock().dirty.push(Weak::clone(&inode.this));
            }
        }
    }

    /// Whether the flusher is on its way, or there.
    pub(super) fn is_called(&self) -> bool {
        self.is_called.load(Ordering::Relaxed)
    }

    /// Asks for a round; whether somebody must be sent for it.
    pub(super) fn call(&self) -> bool {
        self.calls.lock().call(&self.is_called)
    }

    /// As [`Self::call`], for a range of a file. What does not fit waits for its age.
    pub(super) fn call_for(&self, inode: &Inode, range: Range<u64>) -> bool {
        let file = Weak::clone(&inode.this);
        let mut calls = self.calls.lock();
        let is_full = calls.ranges.len() >= RANGES_MAX;
        // A caller that goes through a file step by step asks for one range.
        match calls.ranges.last_mut() {
            Some((other, last)) if Weak::ptr_eq(other, &file) && last.end == range.start => {
                last.end = range.end;
            }
            _ if is_full => return false,
            _ => calls.ranges.push((file, range)),
        }
        calls.call(&self.is_called)
    }

    /// So many folios are to be written out: reclaim has met them, or a writer elsewhere waits.
    pub(super) fn want_written(&self, folios: u64) {
        self.wanted_folios.fetch_add(folios, Ordering::Relaxed);
    }

    /// The flusher is there. Calls from now on are for the next round.
    pub(super) fn begin_round(&self, tick: std::time::Duration) -> Round {
        let mut calls = self.calls.lock();
        calls.again = false;
        let looks_for_stores =
            self.has_regions.load(Ordering::Relaxed) && calls.looked_for_stores.elapsed() >= tick;
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

    /// A round has come to this error, if to one. Whether there is trouble now.
    pub(super) fn end_round(&self, round: &Round, error: Option<Arc<IoError>>) -> bool {
        self.delist_clean_files();
        let mut rounds = self.rounds.lock();
        let has_taken = rounds.answers > round.answers;
        if has_taken || self.dirty_pages.own() == 0 {
            rounds.trouble = None;
        } else if let Some(error) = error {
            rounds.trouble = Some((round.number, error));
        }
        let is_stuck = rounds.trouble.is_some();
        self.is_stuck.store(is_stuck, Ordering::Relaxed);
        is_stuck
    }

    /// The flusher leaves; whether it has been called again, and must come back.
    pub(super) fn leave(&self) -> bool {
        let mut calls = self.calls.lock();
        calls.is_called = calls.again;
        self.is_called.store(calls.again, Ordering::Relaxed);
        calls.again
    }

    /// How many rounds have begun.
    pub(super) fn rounds_begun(&self) -> u64 {
        self.rounds.lock().begun
    }

    /// Why a round that began after the first so many took nothing, if that was the last one.
    pub(super) fn trouble_after(&self, round: u64) -> Option<Arc<IoError>> {
        let rounds = self.rounds.lock();
        let trouble = rounds.trouble.as_ref().filter(|(number, _)| *number > round);
        trouble.map(|(_, error)| Arc::clone(error))
    }

    /// Why nothing can be written there, if that is so.
    pub(super) fn trouble(&self) -> Option<Arc<IoError>> {
        self.trouble_after(0)
    }

    /// Whether the device took nothing when it was last asked.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_stuck.load(Ordering::Relaxed)
    }

    /// A write-out has ended, whoever began it.
    pub(super) fn note_end(&self, error: Option<&Arc<IoError>>) {
        let mut rounds = self.rounds.lock();
        match error {
            None => {
                rounds.answers += 1;
                rounds.trouble = None;
                self.is_stuck.store(false, Ordering::Relaxed);
            }
            Some(error) => rounds.last_error = Some(Arc::clone(error)),
        }
    }

    /// Write-outs that have ended well.
    pub(super) fn answers(&self) -> u64 {
        self.rounds.lock().answers
    }

    /// A writer is held, until the result is dropped.
    pub(super) fn hold(&self) -> Held<'_> {
        self.held.fetch_add(1, Ordering::Relaxed);
        Held(self)
    }

    /// Whether writers are held.
    pub(super) fn holds_writers(&self) -> bool {
        self.held.load(Ordering::Relaxed) > 0
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

/// See [`Device::hold`].
#[derive(Debug)]
pub(super) struct Held<'d>(&'d Device);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::inode::Loads;
    use super::*;

    #[test]
    fn the_trouble_of_an_older_round_is_not_a_later_writers() {
        let dirty_pages = DirtyPages::alone(&Arc::new(AtomicU64::new(0)));
        let device = Device::new(None, "f".into(), dirty_pages, Loads::default().new_load());
        device.dirty_pages.add(1);
        let error = || {
            Some(Arc::new(IoError {
                file: "f".into(),
                operation: crate::io::Operation::Write,
                position_bytes: 0,
                length_bytes: 1,
                source: std::io::ErrorKind::StorageFull.into(),
            }))
        };
        assert!(device.call() && !device.call());
        let round = device.begin_round(std::time::Duration::ZERO);
        assert!(!round.is_probe);
        let came = device.rounds_begun();
        assert!(device.end_round(&round, error()) && device.is_stuck());
        assert!(device.trouble().is_some() && device.trouble_after(came).is_none());
        assert!(!device.leave(), "the calls were before the round");
        assert!(device.call());
        let round = device.begin_round(std::time::Duration::ZERO);
        assert!(round.is_probe);
        assert!(!device.call(), "somebody is there");
        device.end_round(&round, error());
        assert!(device.trouble_after(came).is_some());
        assert!(device.leave(), "called meanwhile");
        let round = device.begin_round(std::time::Duration::ZERO);
        device.note_end(None);
        assert!(!device.is_stuck(), "something was taken");
        assert!(!device.end_round(&round, error()) && !device.is_stuck());
        assert!(!device.leave());
    }
}
