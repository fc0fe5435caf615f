//! Write gates: a folio is not written out before the [`WriteGate`] of its file says that the log
//! is durable up to the highest LSN of the folio's dirty bytes (`dirt/lsns.rs`).
//!
//! PROTOCOL GATE, as two columns (model-checked in `loom_gate`):
//!
//! ```text
//!  WRITER                                      WRITE-OUT (flusher, or a sync)
//!  W1 lock the folio; wait for its write-out   O1 load the LSN that is known to be durable
//!  W2 under the lock of the dirty list: add    O2 lock the folio
//!     the LSN to those of the folio            O3 under the lock of the dirty list: highest LSN
//!  W3 mark the folio dirty                        above the durable one? then pass it over;
//!  W4 change the bytes                            else from dirty to writing (SYNC-D2)
//!  W5 unlock the folio                         O4 unlock the folio, read its bytes
//!                                              O5 success: remove its LSNs; failure: keep them
//! ```
//!
//! O3 comes before W1, or after W5. Before W1, the writer waits at W1 until the bytes were read,
//! since the folio is writing. After W5, O3 finds the LSN of W2. The LSN of O1 only grows, so an
//! older value is safe.
//!
//! A `PageRefMut` is a writer whose LSN follows the change. It holds the folio lock from W1 to W5:
//!
//! ```text
//!  PIN                                         SYNC, which finds the folio locked
//!  P1 lock the folio; wait for its write-out   S1 wait for the folio lock; after 10 s: pinned?
//!  P2 under the lock of the dirty list: note      then it is held back
//!     that the folio is pinned
//!  P3 mark the folio dirty, change the bytes
//!  P4 under the lock of the dirty list: not
//!     pinned any more, and add its LSN; or,
//!     dropped without one: not committed,
//!     unless the bytes cannot have changed
//!  P5 unlock the folio
//! ```
//!
//! So O3 finds the LSN of P4, or that the folio is not committed, however the pin ended: only a
//! leak never gets there, and it keeps the lock. A folio that is not committed stays so until
//! `GatedFile::assign_lsn`, or until it is discarded or truncated: the LSN of a later pin does not
//! replace it.
//!
//! CALLS OF THE GATE. The flusher and reclaim never call it: they use the durable LSN that a
//! caller's thread has stored (`KnownDurable`), which each write with an LSN refreshes. For
//! folios that they pass over they ask a thread of the gate, which lives only while there is
//! something to ask for. It asks for the highest LSN that was passed over, or, if that fails, for
//! the lowest, and then calls the flusher again. After a failed call it pauses and tries again, as
//! long as the file has something that is held back. A sync calls the gate on its own thread: first
//! for the highest LSN of the file, without a lock; then for a folio that got a higher LSN
//! meanwhile, with the lock of that folio, so that a page that is written all the time is written
//! out, too.

use crate::dirt::{
    self, Ask, Gate, HeldBack, Lsns, NO_LSN, Opened, Refusal, UNCOMMITTED, WriteGate, may_pass,
};
use crate::error::{Error, Result};
use crate::inode::{Device, Flusher, Inode};
use crate::page::{ALL_BYTES, FolioId, FolioRef, LockedFolio, PAGE_BYTES};
use crate::stats::Counter;
use crate::sync::blocking;
use crate::sys::process::OwnedThread;
use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// State of the thread of a gate. It keeps no file open.
#[derive(Debug)]
struct Asker {
    gate: Arc<Gate>,
    flusher: Arc<Flusher>,
    device: Arc<Device>,
    file: Weak<Inode>,
    address: u64,
}

impl Asker {
    fn count_call(&self) {
        self.file.upgrade().iter().for_each(|file| count_gate_call(file));
    }

    /// Asks the gate for each queued request: for all LSNs at once or, if that fails, for the
    /// lowest. Then calls the flusher, which writes what may pass. Ends when nothing is queued.
    fn run(self) {
        while let Some(Ask { lsns: (lowest, highest), folios, range }) = self.gate.next() {
            let (gate, count) = (&self.gate, || self.count_call());
            let all = gate.try_make_durable(self.address, highest, count);
            if let Err(error) = all.or_else(|_| gate.make_durable(self.address, lowest, count)) {
                log::warn!("a write gate cannot make LSN {lowest} durable: {error}");
                // Throttled writers get this error.
                self.flusher.throttle.release();
                let held = self.file.upgrade().and_then(|file| file.held_back());
                if held.is_some_and(|refusal| refusal.held.lsn != UNCOMMITTED) {
                    // Another call may let them pass. This thread takes it.
                    let _ = self.gate.queue(Ask { lsns: (lowest, highest), folios, range });
                }
            } else {
                self.device.want_written(folios);
                if let (Some(range), Some(file)) = (range, self.file.upgrade()) {
                    file.write_soon(range);
                }
            }
            self.flusher.call(&self.device);
        }
    }
}

/// Makes the log durable for all dirty folios of the file. Blocks for the gate.
pub(super) fn open_for_all(gate: &Gate, inode: &Inode) -> Opened {
    let durable = gate.durable();
    let lsn = inode.dirty.with_lsns(|it| it.highest_above(durable));
    gate.make_durable(inode.address, lsn, || count_gate_call(inode))
}

/// Locks a folio for a patient write-out (GATE-S1). Returns `None` if a `PageRefMut` without an LSN
/// has kept the lock for `patience`.
pub(super) fn lock<'f>(
    inode: &Inode,
    folio: &FolioRef<'f>,
    patience: Duration,
) -> Option<LockedFolio<'f>> {
    blocking::check_user("a folio lock");
    let pinned_since = Cell::new(None);
    folio.lock_while(&|| {
        let is_pinned = inode.dirty.with_lsns(|lsns| lsns.is_pinned(folio.id()));
        let since = is_pinned.then(|| pinned_since.get().unwrap_or_else(Instant::now));
        pinned_since.set(since);
        since.is_none_or(|since| since.elapsed() < patience)
    })
}

/// Makes the log durable for a folio that the caller has locked, so that it gets no further LSN,
/// unless that failed before. Blocks for the gate.
pub(super) fn open_for(gate: &Gate, inode: &Inode, id: FolioId, opened: &mut Opened) {
    let lsn = inode.dirty.with_lsns(|lsns| lsns.highest_of(id));
    // One that is not committed stays behind the gate.
    if opened.is_ok() && lsn != UNCOMMITTED {
        *opened = gate.make_durable(inode.address, lsn, || count_gate_call(inode));
    }
}

/// Ends a write-out of `bytes` whose folios were held back. Returns the refusal to a patient
/// one; otherwise asks in the background to let them pass.
pub(super) fn end_held_back(
    inode: &Inode,
    held: HeldBack,
    opened: Option<Opened>,
    bytes: &Range<u64>,
) -> Option<Refusal> {
    if let Some(opened) = opened {
        return Some(inode.refusal(held, opened.err()));
    }
    ask_gate(inode, held, (*bytes != ALL_BYTES).then(|| bytes.clone()));
    None
}

/// Sets the gate, or replaces it by one for the same log.
pub(crate) fn set_gate(inode: &Inode, user: Arc<dyn WriteGate>) {
    inode.dirty.keep_lsns();
    let gate = inode.gate.get_or_init(|| Arc::new(Gate::new(Arc::clone(&user))));
    gate.replace(user);
    gate.refresh(inode.address);
}

/// Asks the gate how far the log is durable. The caller holds no lock.
pub(crate) fn refresh_gate(inode: &Inode) {
    if let Some(gate) = inode.gate.get() {
        gate.refresh(inode.address);
    }
}

/// Fails if the calling thread is in a call of this file's gate.
pub(crate) fn check_outside_gate(inode: &Inode) -> Result<()> {
    if inode.has_gate() && dirt::is_inside(inode.address) {
        return Err(Error::inside_gate(inode.name()));
    }
    Ok(())
}

fn count_gate_call(inode: &Inode) {
    inode.memory.counters.add(Counter::GateAsk, 1);
}

/// Asks the gate in the background to let folios pass, and then writes them. Never waits.
fn ask_gate(inode: &Inode, held: HeldBack, range: Option<Range<u64>>) {
    let (Some(gate), Some(device)) = (inode.gate.get(), &inode.device) else { return };
    let HeldBack { folios, lsn, highest, .. } = held;
    let folios = if range.is_some() { 0 } else { folios };
    if highest == NO_LSN {
        return;
    }
    if !gate.queue(Ask { lsns: (lsn, highest), folios, range }) {
        return;
    }
    let asker = Asker {
        gate: Arc::clone(gate),
        flusher: Arc::clone(&inode.flusher),
        device: Arc::clone(device),
        file: Weak::clone(&inode.this),
        address: inode.address,
    };
    match OwnedThread::start("bifolio-gate", move || asker.run()) {
        Ok(thread) => thread.detach(),
        Err(error) => gate.note_no_thread(error),
    }
}

/// Grows the table of LSNs, if it is full. `charge` charges the memory, in bytes.
pub(crate) fn grow_lsns(inode: &Inode, charge: impl FnOnce(u64) -> Result<()>) -> Result<()> {
    let sizes = |lsns: &mut Lsns| lsns.slots_wanted().map(|wanted| (lsns.slots(), wanted));
    let Some((slots, wanted)) = inode.dirty.with_lsns(sizes) else { return Ok(()) };
    let bytes = Lsns::bytes_of(wanted) - Lsns::bytes_of(slots);
    charge(bytes)?;
    let is_grown = inode.dirty.with_lsns(|lsns| {
        let is_unchanged = lsns.slots() == slots;
        if is_unchanged {
            lsns.grow(wanted);
        }
        is_unchanged
    });
    if !is_grown {
        // Another thread has grown it.
        inode.memory.arena.uncharge(bytes);
    }
    Ok(())
}

pub(super) fn gate_failures(inode: &Inode) -> u64 {
    inode.gate.get().map_or(0, |gate| gate.failures())
}

/// Returns the error for a writer that finds no room on `device`: everything dirty there is
/// held back, and the gate of this file will not let it pass by itself, because nothing is
/// committed, or it has failed since there were `failures`.
pub(super) fn shut_gate(inode: &Inode, device: &Device, failures: u64) -> Option<Error> {
    let own = inode.held_back()?;
    // The LSN of a pin may follow.
    let is_uncommitted = own.held.lsn == UNCOMMITTED && own.held.pinned == 0;
    let is_shut = is_uncommitted || gate_failures(inode) > failures;
    let held_bytes = || {
        let refusals = device.dirty_files().filter_map(|file| file.held_back());
        refusals.map(|refusal| refusal.held_bytes).sum::<u64>()
    };
    let is_all = is_shut && held_bytes() >= device.dirty_pages.own() * PAGE_BYTES;
    is_all.then(|| own.to_io_error(io::ErrorKind::Other))
}

/// Returns `true` if the gate holds a dirty folio back and will not let it pass by itself: it
/// is not committed, or the gate's last call has failed.
pub(crate) fn is_shut_for(inode: &Inode, id: FolioId) -> bool {
    let Some(gate) = inode.gate.get() else { return false };
    let lsn = inode.dirty.with_lsns(|lsns| lsns.highest_of(id));
    !may_pass(lsn, gate.durable()) && (lsn == UNCOMMITTED || gate.failure().is_some())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ErrorKind;
    use crate::cache::Cache;
    use crate::file::OpenOptions;
    use crate::sync::{AtomicBool, AtomicU64, Ordering, test_hook};

    #[derive(Debug)]
    struct Shut;

    impl WriteGate for Shut {
        fn durable_lsn(&self) -> u64 {
            0
        }

        fn make_durable(&self, _lsn: u64) -> io::Result<()> {
            Err(io::ErrorKind::StorageFull.into())
        }
    }

    /// A gate whose log becomes durable once it is opened.
    #[derive(Debug, Default)]
    struct Slow {
        is_open: AtomicBool,
        calls: AtomicU64,
    }

    impl WriteGate for Slow {
        fn durable_lsn(&self) -> u64 {
            if self.is_open.load(Ordering::Acquire) { 100 } else { 0 }
        }

        fn make_durable(&self, _lsn: u64) -> io::Result<()> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            while !self.is_open.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }
    }

    /// Everything dirty is behind a gate, above the threshold of the flusher, and writers wait.
    #[test]
    fn a_slow_gate_is_waited_for_without_rounds_of_the_flusher() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let age = Duration::from_secs(3600);
        let cache = Cache::builder().memory(256 << 10).dirty_age_max(age).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).create(true);
        let gate = Arc::new(Slow::default());
        let file = cache.open_gated(&path, &options, Arc::<Slow>::clone(&gate)).unwrap();
        let device = file.unlogged().handle.inode.device.clone().unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                (0..64).for_each(|page| file.write_at(&[1; 8], page * PAGE_BYTES, 5).unwrap());
            });
            while cache.stats().writes.throttle_waits == 0
                && device.held.load(Ordering::Relaxed) == 0
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            let (begun, since) = (device.rounds_begun(), Instant::now());
            std::thread::sleep(Duration::from_millis(300));
            let rounds = device.rounds_begun() - begun;
            // The writer asks for a round each 50 ms.
            let rounds_max = 10 + since.elapsed().as_millis() as u64 / 10;
            gate.is_open.store(true, Ordering::Release);
            writer.join().unwrap();
            assert!(rounds <= rounds_max, "{rounds} rounds while the gate was shut");
        });
        file.sync_data().unwrap();
        assert_eq!(cache.stats().writes.gate_asks, gate.calls.load(Ordering::Relaxed));
    }

    #[test]
    fn a_sync_is_refused_by_a_gate_that_was_set_since_it_began() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).create(true);
        let file = cache.open(&path, &options).unwrap();
        file.write_all_at(b"before", 0).unwrap();
        let other = cache.clone();
        test_hook::set("before folios are written out", move || {
            let gated = other.open_gated(&path, &options, Arc::new(Shut)).unwrap();
            gated.write_at(b"held back", 100, 7).unwrap();
        });
        let error = file.sync_data().unwrap_err();
        assert!(test_hook::has_run());
        assert_eq!(error.kind(), ErrorKind::Gated, "{error}");
        assert_eq!(file.discard_dirty().unwrap(), 109, "the whole file");
    }
}
