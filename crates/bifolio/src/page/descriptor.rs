//! The descriptor of a folio, the folio lock, the array of all descriptors, and the guards that
//! hold references and locks. The pin word, with its protocol, is in `pin_word.rs`, the flags are
//! in `flags.rs`.
//!
//! The last put frees the folio: it must be removed from the LRU, and its frame must return to the
//! arena, both in layers above. This only call upwards is the trait [`Reaper`].
//!
//! # Safety
//! The descriptor consists of words that are valid when zero, as reserved memory is.
#![allow(unsafe_code)]

use super::entry::FolioId;
use super::flags::{Flag, Flags};
use super::pin_word::{PinWord, Put, TryGet};
use super::table::{ReservedArray, ZeroValid};
use crate::sync::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, blocking, fence, waiters};
use std::fmt;
use std::marker::PhantomData;
use std::task::Waker;
use std::time::{Duration, Instant};

pub(crate) const NO_FOLIO: u32 = u32::MAX;

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
const CONTENDED: u32 = 2;

/// The folio lock: a futex in the descriptor, four bytes, no allocation.
///
/// Held by the thread that fills, writes, truncates or evicts a folio, for at most one I/O; a
/// thread that waits for a fill waits for it.
///
/// ```text
///  UNLOCKED --try/lock--> LOCKED --a thread waits--> CONTENDED
///     ^--------unlock-------'                            |
///     ^--------unlock, wake one--------------------------'
/// ```
///
/// A waker can wait, too (`sync/waiters.rs`): an unlock calls all that were registered.
///
/// Lock order: folio locks of one file in order of index; a folio lock before the LRU lock, the
/// dirty lock of its owner and the lock of the arena. Reclaim only tries folio locks, so it may try
/// one while it holds any lock. A holder must have a reference, or the folio could be freed while
/// locked.
#[derive(Debug, Default)]
struct FolioLock(AtomicU32);

impl FolioLock {
    fn try_acquire(&self) -> bool {
        // Acquire: pairs with the Release in `release`: this thread sees what the last holder did.
        self.0.compare_exchange(UNLOCKED, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn acquire(&self) {
        if self.try_acquire() {
            return;
        }
        // A thread that slept takes the lock as CONTENDED: other threads may be asleep.
        // Acquire: pairs with the Release in `release`.
        while self.0.swap(CONTENDED, Ordering::Acquire) != UNLOCKED {
            waiters::sleep(&self.0, CONTENDED);
        }
    }

    fn release(&self) {
        // Release: pairs with the Acquire in `try_acquire` and `acquire`.
        if self.0.swap(UNLOCKED, Ordering::Release) == CONTENDED {
            // Acquire: pairs with the Release in `try_lock_or_wake`.
            fence(Ordering::Acquire);
            waiters::wake_sleepers(&self.0, 1);
            waiters::call_wakers(&self.0);
        }
    }
}

/// Descriptor of a folio. The rules of `page/mod.rs` say which thread may access which field.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Folio {
    pin: PinWord,
    index: AtomicU64,
    owner: AtomicU64,
    lock: FolioLock,
    pub(crate) flags: Flags,
    pub(crate) lru_next: AtomicU32,
    pub(crate) lru_previous: AtomicU32,
    pub(crate) dirty_next: AtomicU32,
    pub(crate) dirty_previous: AtomicU32,
    /// Sequence number on the dirty list of the owner; orders dirty folios by age.
    pub(crate) dirtied: AtomicU64,
    version: AtomicU32,
    /// Number of the CPU whose LRU batch the folio was last added to, plus 1; 0 if none.
    batch: AtomicU16,
    order: AtomicU8,
    /// LRU clock at which the folio was added to its list; gives its age there.
    pub(crate) lru_epoch: AtomicU8,
}

#[cfg(not(all(test, loom)))]
const _: () = assert!(size_of::<Folio>() == 64);

// SAFETY: all fields are atomics, for which zero is a valid value; nothing needs dropping.
unsafe impl ZeroValid for Folio {}

impl Folio {
    pub(crate) fn index(&self) -> u64 {
        self.index.load(Ordering::Relaxed)
    }

    pub(crate) fn order(&self) -> u8 {
        self.order.load(Ordering::Relaxed)
    }

    pub(crate) fn pages(&self) -> u64 {
        1 << self.order()
    }

    /// Returns the address of the owner; 0 once it was cleared (rule 2).
    pub(crate) fn owner(&self) -> u64 {
        self.owner.load(Ordering::Relaxed)
    }

    /// Returns the CPU whose LRU batch the folio was last added to, in any generation: it is in
    /// that batch or in none.
    pub(crate) fn batch_cpu(&self) -> Option<usize> {
        usize::from(self.batch.load(Ordering::Relaxed)).checked_sub(1)
    }

    pub(crate) fn set_batch_cpu(&self, cpu: usize) {
        self.batch.store(cpu as u16 + 1, Ordering::Relaxed);
    }

    /// Forgets the wakers with data at `data` that were registered for the folio lock or the end of
    /// a write-out, at any time.
    pub(crate) fn forget_waker(&self, data: *const ()) {
        waiters::forget(&self.lock.0, data);
        self.flags.forget_waker(data);
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn lock_wakers(&self) -> usize {
        waiters::registered(&self.lock.0)
    }

    /// Returns `true` if the folio lock is held now; a hint.
    pub(crate) fn is_locked(&self) -> bool {
        self.lock.0.load(Ordering::Relaxed) != UNLOCKED
    }

    /// Copies the flags of `folio`, which this new folio will replace, that describe its use and
    /// its bytes.
    pub(crate) fn copy_usage_of(&self, folio: &LockedFolio<'_>) {
        for flag in [Flag::Readahead, Flag::Punched] {
            if folio.flags.get(flag) {
                self.flags.set(flag);
            }
        }
    }

    /// USE-F3: takes over a first use that was recorded on the replaced folio during the move.
    pub(crate) fn take_first_use_of(&self, gone: &Frozen<'_>) {
        if !gone.folio().flags.clear(Flag::Readahead) {
            self.flags.clear(Flag::Readahead);
        }
    }

    pub(crate) fn set_owner(locked: &LockedFolio<'_>, owner: u64) {
        locked.owner.store(owner, Ordering::Relaxed);
    }

    pub(crate) fn clear_owner(locked: &LockedFolio<'_>) {
        locked.owner.store(0, Ordering::Relaxed);
    }

    /// Returns the swap slot of a clean folio; 0 if none (rule 4).
    pub(crate) fn slot(&self) -> u32 {
        self.dirtied.load(Ordering::Relaxed) as u32
    }

    pub(crate) fn set_slot(&self, slot: u32) {
        self.dirtied.store(u64::from(slot), Ordering::Relaxed);
    }

    /// Returns the Entry version last used with this frame (rule 6).
    pub(crate) fn version(&self) -> u32 {
        self.version.load(Ordering::Relaxed)
    }

    pub(crate) fn set_version(&self, version: u32) {
        self.version.store(version, Ordering::Relaxed);
    }

    pub(crate) fn references(&self) -> u64 {
        self.pin.state().count()
    }

    /// Puts a reference that [`FolioRef::into_folio`] kept. Asks for `folios` if it is the last.
    #[inline(always)]
    pub(crate) fn put<'f>(&self, folios: impl FnOnce() -> &'f Folios) {
        if self.pin.put_and_test(1) == Put::Last {
            reap_cold(folios(), self);
        }
    }
}

pub(crate) trait Reaper: Send + Sync {
    fn reap(&self, frozen: Frozen<'_>);

    fn reap_all(&self, frozen: &mut Vec<Frozen<'_>>) {
        frozen.drain(..).for_each(|frozen| self.reap(frozen));
    }
}

pub(crate) struct Folios {
    array: ReservedArray<Folio>,
    reaper: Box<dyn Reaper>,
}

impl fmt::Debug for Folios {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Folios").field("len", &self.array.len()).finish_non_exhaustive()
    }
}

impl Folios {
    pub(crate) fn new(length: usize, reaper: Box<dyn Reaper>) -> std::io::Result<Self> {
        Ok(Self { array: ReservedArray::new(length)?, reaper })
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn without_reaper(length: usize) -> Self {
        struct NoReaper;
        impl Reaper for NoReaper {
            fn reap(&self, frozen: Frozen<'_>) {
                unreachable!("{:?} was freed", frozen.id());
            }
        }
        Self::new(length, Box::new(NoReaper)).unwrap()
    }

    pub(crate) fn len(&self) -> usize {
        self.array.len()
    }

    #[inline(always)]
    pub(crate) fn get(&self, id: FolioId) -> &Folio {
        self.array.get(id.0 as usize)
    }

    pub(crate) fn init_free(&self, first: FolioId, count: usize) {
        for id in first.0..first.0 + count as u32 {
            self.get(FolioId(id)).pin.init_free();
        }
    }

    /// Starts a new generation of a free folio, which comes from the arena, with one reference.
    pub(crate) fn start(&self, id: FolioId, owner: u64, index: u64, order: u8) -> FolioRef<'_> {
        let folio = self.get(id);
        // No other thread sees the folio yet (rule 2).
        folio.owner.store(owner, Ordering::Relaxed);
        folio.index.store(index, Ordering::Relaxed);
        folio.order.store(order, Ordering::Relaxed);
        folio.set_slot(0);
        folio.flags.reset();
        folio.pin.init(1);
        FolioRef { folios: self, folio }
    }

    /// Takes a reference unless the folio is frozen or free. Only a recheck of the Entry tells
    /// which page the folio holds.
    #[inline(always)]
    pub(crate) fn try_get(&self, id: FolioId) -> Result<FolioRef<'_>, TryGet> {
        let folio = self.get(id);
        match folio.pin.try_get(1) {
            TryGet::Got => Ok(FolioRef { folios: self, folio }),
            other => Err(other),
        }
    }

    /// Takes a reference like [`Self::try_get`], with the compare-and-swap loop of the kernel.
    #[inline(always)]
    pub(crate) fn try_get_compare_exchange(&self, id: FolioId) -> Result<FolioRef<'_>, TryGet> {
        let folio = self.get(id);
        match folio.pin.try_get_compare_exchange(1) {
            TryGet::Got => Ok(FolioRef { folios: self, folio }),
            other => Err(other),
        }
    }

    /// Takes over a reference that [`FolioRef::into_id`] stored in a list or a batch.
    pub(crate) fn adopt(&self, id: FolioId) -> FolioRef<'_> {
        let folio = self.get(id);
        debug_assert!(folio.references() > 0, "adopting {id:?} without a reference");
        FolioRef { folios: self, folio }
    }

    pub(crate) fn id_of(&self, folio: &Folio) -> FolioId {
        let offset_bytes = std::ptr::from_ref(folio).addr() - self.array.as_ptr().addr();
        FolioId((offset_bytes / size_of::<Folio>()) as u32)
    }
}

/// One counted reference: while it exists, the frame and the descriptor belong to the folio.
#[derive(Debug)]
pub(crate) struct FolioRef<'a> {
    folios: &'a Folios,
    folio: &'a Folio,
}

impl<'a> FolioRef<'a> {
    pub(crate) fn id(&self) -> FolioId {
        self.folios.id_of(self.folio)
    }

    /// Returns the descriptor; it describes this folio only while the reference is held.
    #[inline(always)]
    pub(crate) fn folio(&self) -> &'a Folio {
        self.folio
    }

    /// Blocks until the caller holds the folio lock. The guard must not outlive the caller's
    /// reference (or the freeze that consumed it): the descriptor stays, but the folio could be
    /// freed while locked.
    pub(crate) fn lock(&self) -> LockedFolio<'a> {
        blocking::check_user("a folio lock");
        self.lock_new()
    }

    /// Blocks until the caller holds the lock of a folio that was just started: no user has it.
    pub(crate) fn lock_new(&self) -> LockedFolio<'a> {
        self.folio.lock.acquire();
        LockedFolio::of(self.folio)
    }

    /// Blocks until the caller holds the folio lock. Calls `wants` about once a millisecond, and
    /// returns `None` once that returns `false`.
    pub(crate) fn lock_while(&self, wants: &dyn Fn() -> bool) -> Option<LockedFolio<'a>> {
        // Acquire: pairs with the Release in `release`. A thread that gives up leaves the word
        // CONTENDED: at worst, one needless wake-up.
        while self.folio.lock.0.swap(CONTENDED, Ordering::Acquire) != UNLOCKED {
            if !wants() {
                return None;
            }
            waiters::sleep_briefly(&self.folio.lock.0, CONTENDED);
        }
        Some(LockedFolio::of(self.folio))
    }

    /// Blocks until the caller holds the folio lock. Calls `note` once if that takes `time`.
    pub(crate) fn lock_noting(&self, time: Duration, note: impl FnOnce()) -> LockedFolio<'a> {
        blocking::check_user("a folio lock");
        if let Some(locked) = self.try_lock() {
            return locked;
        }
        if cfg!(loom) {
            // No time passes in a model run.
            return self.lock();
        }
        let begun = Instant::now();
        self.lock_while(&|| begun.elapsed() < time).unwrap_or_else(|| {
            note();
            self.lock()
        })
    }

    pub(crate) fn try_lock(&self) -> Option<LockedFolio<'a>> {
        // Not `then_some`: an unused guard would release the lock of another thread.
        self.folio.lock.try_acquire().then(|| LockedFolio::of(self.folio))
    }

    /// Takes the folio lock if it is free. Otherwise `waker` is called when it has been released,
    /// or before.
    pub(crate) fn try_lock_or_wake(&self, waker: Waker) -> Option<LockedFolio<'a>> {
        if let Some(locked) = self.try_lock() {
            return Some(locked);
        }
        let word = &self.folio.lock.0;
        waiters::register(word, waker);
        // AcqRel: as Acquire in `acquire`; its Release pairs with the Acquire in `release`, which
        // finds the waker. A thread that gets the lock here has it as CONTENDED: its release calls
        // the waker without need.
        let is_free = word.swap(CONTENDED, Ordering::AcqRel) == UNLOCKED;
        is_free.then(|| LockedFolio::of(self.folio))
    }

    /// Takes over the folio lock that [`LockedFolio::detach_lock`] kept, on any thread.
    pub(crate) fn adopt_lock(&self) -> LockedFolio<'a> {
        debug_assert!(self.folio.is_locked(), "adopting the lock of an unlocked folio");
        LockedFolio::of(self.folio)
    }

    /// Returns another reference to the same folio; `None` if the count is at its limit.
    pub(crate) fn try_clone(&self) -> Option<FolioRef<'a>> {
        self.folios.try_get(self.id()).ok()
    }

    /// Moves the reference into a list or a batch; [`Folios::adopt`] takes it back.
    pub(crate) fn into_id(self) -> FolioId {
        let id = self.id();
        std::mem::forget(self);
        id
    }

    /// Moves the reference into a structure that knows the folios; [`Folio::put`] ends it.
    #[inline(always)]
    pub(crate) fn into_folio(self) -> &'a Folio {
        let folio = self.folio;
        std::mem::forget(self);
        folio
    }

    /// Freezes the folio if this reference and `others` more, for which the caller is responsible,
    /// are the only ones. On success all of them are consumed: the caller owns the folio.
    pub(crate) fn try_freeze(self, others: u64) -> Result<Frozen<'a>, FolioRef<'a>> {
        if !self.folio().pin.try_freeze(others + 1) {
            return Err(self);
        }
        blocking::note_frozen();
        let frozen = Frozen { folios: self.folios, id: self.id(), references: others + 1 };
        std::mem::forget(self);
        Ok(frozen)
    }
}

/// Frees a folio after the last put. Not of a `FolioRef`, which would force a pin into memory.
#[cold]
fn reap_cold(folios: &Folios, folio: &Folio) {
    folios.reaper.reap(Frozen { folios, id: folios.id_of(folio), references: 0 });
}

impl Drop for FolioRef<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.folio.put(|| self.folios);
    }
}

/// Proof that no other reference exists or can be taken. A lookup of the folio waits for
/// [`Frozen::unfreeze`] or [`Frozen::free`].
#[must_use]
#[derive(Debug)]
pub(crate) struct Frozen<'a> {
    folios: &'a Folios,
    id: FolioId,
    /// References consumed by the freeze; 0 if the last put froze the folio.
    references: u64,
}

impl<'a> Frozen<'a> {
    pub(crate) fn id(&self) -> FolioId {
        self.id
    }

    pub(crate) fn folio(&self) -> &'a Folio {
        self.folios.get(self.id)
    }

    pub(crate) fn folios(&self) -> &'a Folios {
        self.folios
    }

    /// Ends the freeze: all consumed references exist again, and the caller's is returned.
    pub(crate) fn unfreeze(self) -> FolioRef<'a> {
        debug_assert!(self.references > 0, "the last put cannot be undone");
        let folio = self.folio();
        folio.pin.unfreeze(self.references);
        blocking::note_unfrozen();
        FolioRef { folios: self.folios, folio }
    }

    /// Notes that the folio is in no table any more. No lookup waits for it, so the thread may keep
    /// it until it frees several at once ([`Self::free_all`]).
    pub(crate) fn note_removed(&self) {
        blocking::note_unfrozen();
    }

    /// Passes folios that were removed from their tables to the reaper, which frees them.
    pub(crate) fn free_all(removed: &mut Vec<Self>) {
        if let Some(folios) = removed.first().map(|first| first.folios) {
            folios.reaper.reap_all(removed);
        }
    }

    pub(crate) fn free(self) {
        blocking::note_unfrozen();
        self.folios.reaper.reap(self);
    }
}

/// Proof that the caller holds the lock of a folio; unlocks on drop.
#[derive(Debug)]
pub(crate) struct LockedFolio<'a> {
    folio: &'a Folio,
    /// `sync/blocking.rs` counts the lock for this thread.
    not_send: PhantomData<*const ()>,
}

impl<'a> LockedFolio<'a> {
    fn of(folio: &'a Folio) -> Self {
        blocking::track(1);
        Self { folio, not_send: PhantomData }
    }

    /// Keeps the folio locked for an I/O that completes on another thread.
    pub(crate) fn detach_lock(self) {
        blocking::track(-1);
        std::mem::forget(self);
    }
}

impl std::ops::Deref for LockedFolio<'_> {
    type Target = Folio;

    fn deref(&self) -> &Folio {
        self.folio
    }
}

impl Drop for LockedFolio<'_> {
    fn drop(&mut self) {
        self.folio.lock.release();
        blocking::track(-1);
    }
}

/// Folios per batch of reads, LRU insertion and reclaim: with a count they fill whole cache lines.
/// Small in a model run, so that a full batch is common there.
pub(crate) const BATCH_SLOTS: usize = if cfg!(all(test, loom)) { 2 } else { 31 };

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_failed_try_lock_does_not_release_the_lock() {
        let folios = Folios::without_reaper(1);
        folios.init_free(FolioId(0), 1);
        let folio = folios.start(FolioId(0), 1, 0, 0);
        let held = folio.lock();
        assert!(folio.try_lock().is_none());
        assert!(folio.try_lock().is_none(), "the first try unlocked it");
        drop(held);
        assert!(folio.try_lock().is_some());
        let _kept = folio.into_id();
    }
}
