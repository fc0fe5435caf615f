//! The descriptor of a folio, the array of all of them, and the guards that hold references and
//! locks.
//!
//! [`Folios`] is the array; [`FolioRef`] is one counted reference, [`Frozen`] the proof that there
//! is no other one, [`LockedFolio`] the folio lock. Nothing outside this folder adds to or
//! subtracts from a count by hand.
//!
//! The last reference to go frees the folio: it must come off the LRU and its frame must go back
//! to the arena, both in layers above. That is the one call upwards, and it is the small trait
//! [`Reaper`].
//!
//! # Safety
//! Vouches that its words are valid when zero, as reserved memory is.
#![allow(unsafe_code)]

use super::flags::{Flag, Flags};
use super::pin::{PinWord, Put, TryGet};
use crate::sync::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, blocking, futex, inside};
use crate::sys::array::{ReservedArray, ZeroValid};
use std::fmt;
use std::marker::PhantomData;

/// Names a folio: the number of its first frame, and of its descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FolioId(pub(crate) u32);

/// The end of a list of folios.
pub(crate) const NO_FOLIO: u32 = u32::MAX;

/// The rules of `page/mod.rs` say which threads may touch which field.
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
    /// Its number among all markings of its owner's dirty list: how old its dirt is.
    pub(crate) dirtied: AtomicU64,
    version: AtomicU32,
    /// See [`Self::batch_cpu`], plus one; 0 is none.
    batch: AtomicU16,
    order: AtomicU8,
    /// When it came to its list, by the clock of the lists: how old it is there.
    pub(crate) lru_epoch: AtomicU8,
}

#[cfg(not(all(test, loom)))]
const _: () = assert!(size_of::<Folio>() == 64);

// SAFETY: all fields are atomics, for which zero is a valid value; nothing needs dropping.
unsafe impl ZeroValid for Folio {}

impl Folio {
    /// Page index of the folio's first page in its file (rule 2).
    pub(crate) fn index(&self) -> u64 {
        self.index.load(Ordering::Relaxed)
    }

    /// log2 of the folio's pages (rule 2).
    pub(crate) fn order(&self) -> u8 {
        self.order.load(Ordering::Relaxed)
    }

    /// How many base pages the folio has.
    pub(crate) fn pages(&self) -> u64 {
        1 << self.order()
    }

    /// Address of the owner, 0 once the folio has left its table (rule 2).
    pub(crate) fn owner(&self) -> u64 {
        self.owner.load(Ordering::Relaxed)
    }

    /// Sets up a folio nobody else can see yet (rule 2).
    pub(crate) fn set_up(&self, owner: u64, index: u64, order: u8) {
        self.owner.store(owner, Ordering::Relaxed);
        self.index.store(index, Ordering::Relaxed);
        self.order.store(order, Ordering::Relaxed);
        self.set_slot(0);
        self.flags.reset();
    }

    /// The CPU to whose LRU batch the folio was given last, in this life or an earlier one, if it
    /// ever was: it is in that one, or in none.
    pub(crate) fn batch_cpu(&self) -> Option<usize> {
        usize::from(self.batch.load(Ordering::Relaxed)).checked_sub(1)
    }

    /// Notes what [`Self::batch_cpu`] tells. The caller has the lock of that CPU's batch.
    pub(crate) fn set_batch_cpu(&self, cpu: usize) {
        self.batch.store(cpu as u16 + 1, Ordering::Relaxed);
    }

    /// Whether somebody has the folio lock now; a hint.
    pub(crate) fn is_locked(&self) -> bool {
        self.lock.0.load(Ordering::Relaxed) != UNLOCKED
    }

    /// Takes over what is known of the use of another folio, whose place it will take. Nobody else
    /// can see this one yet.
    pub(crate) fn take_after(&self, folio: &LockedFolio<'_>) {
        for flag in [Flag::Workingset, Flag::Readahead] {
            if folio.flags.get(flag) {
                self.flags.set(flag);
            }
        }
    }

    /// F3 of `page/optimistic.rs`: this one has taken the place of another, whose first use may
    /// have been noted there meanwhile.
    pub(crate) fn settle_after(&self, gone: &Frozen<'_>) {
        if !gone.folio().flags.clear(Flag::Readahead) {
            self.flags.clear(Flag::Readahead);
        }
    }

    /// The folio is about to enter its owner's table; the proof is the lock (rule 2).
    pub(crate) fn set_owner(locked: &LockedFolio<'_>, owner: u64) {
        locked.owner.store(owner, Ordering::Relaxed);
    }

    /// The folio has left its table; the proof is the lock (rule 2).
    pub(crate) fn clear_owner(locked: &LockedFolio<'_>) {
        locked.owner.store(0, Ordering::Relaxed);
    }

    /// The swap slot of a folio that is not dirty; 0 is none (rule 4).
    pub(crate) fn slot(&self) -> u32 {
        self.dirtied.load(Ordering::Relaxed) as u32
    }

    /// Sets what [`Self::slot`] tells (rule 4).
    pub(crate) fn set_slot(&self, slot: u32) {
        self.dirtied.store(u64::from(slot), Ordering::Relaxed);
    }

    /// The Entry version last used with this frame (rule 6).
    pub(crate) fn version(&self) -> u32 {
        self.version.load(Ordering::Relaxed)
    }

    /// Remembers the Entry version last used with this frame (rule 6).
    pub(crate) fn set_version(&self, version: u32) {
        self.version.store(version, Ordering::Relaxed);
    }

    /// References held now; a hint.
    pub(crate) fn references(&self) -> u64 {
        self.pin.state().count()
    }
}

/// Takes back a folio whose last reference is gone.
pub(crate) trait Reaper: Send + Sync {
    /// Frees the folio that `frozen` proves to be nobody else's.
    fn reap(&self, frozen: Frozen<'_>);
}

/// All descriptors of a cache.
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
    /// Reserves `length` descriptors; `reaper` takes what dies.
    pub(crate) fn new(length: usize, reaper: Box<dyn Reaper>) -> std::io::Result<Self> {
        Ok(Self { array: ReservedArray::new(length)?, reaper })
    }

    /// For tests in which no folio dies.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn without_reaper(length: usize) -> Self {
        struct NoReaper;
        impl Reaper for NoReaper {
            fn reap(&self, frozen: Frozen<'_>) {
                unreachable!("{:?} died", frozen.id());
            }
        }
        Self::new(length, Box::new(NoReaper)).unwrap()
    }

    /// How many descriptors there are.
    pub(crate) fn len(&self) -> usize {
        self.array.len()
    }

    /// The descriptor of `id`.
    #[inline(always)]
    pub(crate) fn get(&self, id: FolioId) -> &Folio {
        self.array.get(id.0 as usize)
    }

    /// Makes the descriptors of fresh frames free ones, before their first use.
    pub(crate) fn init_free(&self, first: FolioId, count: usize) {
        for id in first.0..first.0 + count as u32 {
            self.get(FolioId(id)).pin.init_free();
        }
    }

    /// Starts the life of a free folio with one reference, which the caller gets.
    ///
    /// `FolioId` must come from the arena: then nobody else can start it.
    pub(crate) fn start(&self, id: FolioId, owner: u64, index: u64, order: u8) -> FolioRef<'_> {
        let folio = self.get(id);
        folio.set_up(owner, index, order);
        folio.pin.init(1);
        FolioRef { folios: self, folio }
    }

    /// Takes a reference, unless the folio is frozen or free. Whose folio it is now, only a second
    /// look at the table tells.
    #[inline(always)]
    pub(crate) fn try_get(&self, id: FolioId) -> Result<FolioRef<'_>, TryGet> {
        let folio = self.get(id);
        match folio.pin.try_get(1) {
            TryGet::Got => Ok(FolioRef { folios: self, folio }),
            other => Err(other),
        }
    }

    /// [`Self::try_get`] with the kernel's loop.
    #[inline(always)]
    pub(crate) fn try_get_compare_exchange(&self, id: FolioId) -> Result<FolioRef<'_>, TryGet> {
        let folio = self.get(id);
        match folio.pin.try_get_compare_exchange(1) {
            TryGet::Got => Ok(FolioRef { folios: self, folio }),
            other => Err(other),
        }
    }

    /// Takes over a reference that [`FolioRef::into_id`] put in a list or a batch.
    pub(crate) fn adopt(&self, id: FolioId) -> FolioRef<'_> {
        let folio = self.get(id);
        debug_assert!(folio.references() > 0, "adopting {id:?} without a reference");
        FolioRef { folios: self, folio }
    }

    fn id_of(&self, folio: &Folio) -> FolioId {
        let offset_bytes = std::ptr::from_ref(folio).addr() - self.array.as_ptr().addr();
        FolioId((offset_bytes / size_of::<Folio>()) as u32)
    }
}

/// One counted reference: the folio's frame and descriptor stay what they are while it lives.
#[derive(Debug)]
pub(crate) struct FolioRef<'a> {
    folios: &'a Folios,
    folio: &'a Folio,
}

impl<'a> FolioRef<'a> {
    pub(crate) fn id(&self) -> FolioId {
        self.folios.id_of(self.folio)
    }

    /// The descriptor, for as long as the array lives; its content is the folio's only while the
    /// reference is held.
    #[inline(always)]
    pub(crate) fn folio(&self) -> &'a Folio {
        self.folio
    }

    /// Blocks until the folio lock is ours. The guard must not outlive the caller's reference
    /// (or the freeze it turned into): the descriptor stays, but the folio could die locked.
    pub(crate) fn lock(&self) -> LockedFolio<'a> {
        blocking::check_user("a folio lock");
        self.lock_new()
    }

    /// As [`Self::lock`], for a folio that was just started: nobody keeps its lock.
    pub(crate) fn lock_new(&self) -> LockedFolio<'a> {
        self.folio.lock.acquire();
        LockedFolio::of(self.folio)
    }

    /// As [`Self::lock`]; nothing if the lock is not wanted any more, which is asked now and then.
    pub(crate) fn lock_while(&self, wants: &dyn Fn() -> bool) -> Option<LockedFolio<'a>> {
        self.folio.lock.acquire_while(wants).then(|| LockedFolio::of(self.folio))
    }

    /// Takes the folio lock if it is free.
    pub(crate) fn try_lock(&self) -> Option<LockedFolio<'a>> {
        // Not `then_some`: a guard made in vain would unlock what somebody else has locked.
        self.folio.lock.try_acquire().then(|| LockedFolio::of(self.folio))
    }

    /// Takes over the folio lock that [`LockedFolio::leave_locked`] left, on whatever thread.
    pub(crate) fn adopt_lock(&self) -> LockedFolio<'a> {
        debug_assert!(self.folio.is_locked(), "adopting a lock that nobody left");
        LockedFolio::of(self.folio)
    }

    /// Another reference to the same folio; `None` when the count is at its limit.
    pub(crate) fn try_clone(&self) -> Option<FolioRef<'a>> {
        self.folios.try_get(self.id()).ok()
    }

    /// Gives the reference to a list or a batch; [`Folios::adopt`] takes it back.
    pub(crate) fn into_id(self) -> FolioId {
        let id = self.id();
        std::mem::forget(self);
        id
    }

    /// Freezes the folio if this reference and `others` more, which the caller answers for, are
    /// all there are. On success all of them are gone: the caller owns the folio.
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

/// The last reference was put. By value: a pin must not be forced into memory for this.
#[cold]
fn reap_cold(folios: &Folios, folio: &Folio) {
    folios.reaper.reap(Frozen { folios, id: folios.id_of(folio), references: 0 });
}

impl Drop for FolioRef<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.folio.pin.put_and_test(1) == Put::Last {
            reap_cold(self.folios, self.folio);
        }
    }
}

/// Proof that nobody else holds a reference, or can get one.
///
/// Must be consumed: [`Frozen::unfreeze`] brings the references it was made of back to life,
/// [`Frozen::free`] ends the folio's life. Whoever meets a frozen folio waits for one of the two.
#[must_use]
#[derive(Debug)]
pub(crate) struct Frozen<'a> {
    folios: &'a Folios,
    id: FolioId,
    /// References that went into the freeze; 0 when the last put made it.
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

    /// Ends the freeze: all references that went in exist again, and the caller's is returned.
    pub(crate) fn unfreeze(self) -> FolioRef<'a> {
        debug_assert!(self.references > 0, "the last put cannot be taken back");
        let folio = self.folio();
        folio.pin.unfreeze(self.references);
        blocking::note_unfrozen();
        FolioRef { folios: self.folios, folio }
    }

    /// Ends the folio's life: hands it to the reaper.
    pub(crate) fn free(self) {
        blocking::note_unfrozen();
        self.folios.reaper.reap(self);
    }
}

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
const CONTENDED: u32 = 2;

/// The folio lock: a futex in the descriptor, four bytes, no allocation.
///
/// Held by whoever fills, writes, truncates or evicts a folio, for as long as one I/O at the most.
/// Readers of an uptodate folio never take it. Waiters of a fill are waiters of this lock.
///
/// ```text
///  UNLOCKED --try/lock--> LOCKED --somebody waits--> CONTENDED
///     ^--------unlock-------'                            |
///     ^--------unlock, wake one--------------------------'
/// ```
///
/// Lock order: folio locks of one file in order of their index; a folio lock before the LRU lock,
/// the dirty lock of its owner and the arena's lock. Reclaim only tries folio locks, so it may come
/// to one holding anything. A holder must have a reference, or the folio could die locked.
#[derive(Debug, Default)]
struct FolioLock(AtomicU32);

impl FolioLock {
    fn try_acquire(&self) -> bool {
        // Acquire: pairs with the Release in `release`: we see what the last holder did.
        self.0.compare_exchange(UNLOCKED, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn acquire(&self) {
        if self.try_acquire() {
            return;
        }
        // A thread that slept takes the lock as CONTENDED: there may be others asleep.
        // Acquire: pairs with the Release in `release`.
        while self.0.swap(CONTENDED, Ordering::Acquire) != UNLOCKED {
            futex::wait(&self.0, CONTENDED);
        }
    }

    /// As [`Self::acquire`], but asks about every millisecond whether the lock is still wanted;
    /// `false` if it is not, and was not taken.
    fn acquire_while(&self, wants: &dyn Fn() -> bool) -> bool {
        // Acquire: pairs with the Release in `release`. A thread that gives up has made it
        // CONTENDED: at the worst one wake too many.
        while self.0.swap(CONTENDED, Ordering::Acquire) != UNLOCKED {
            if !wants() {
                return false;
            }
            futex::wait_for(&self.0, CONTENDED, 1);
        }
        true
    }

    fn release(&self) {
        // Release: pairs with the Acquire in `try_acquire` and `acquire`.
        if self.0.swap(UNLOCKED, Ordering::Release) == CONTENDED {
            futex::wake(&self.0, 1);
        }
    }
}

/// Proof that the caller holds the lock of a folio; unlocks on drop.
#[derive(Debug)]
pub(crate) struct LockedFolio<'a> {
    folio: &'a Folio,
    /// The thread counts it (`sync/inside.rs`).
    not_send: PhantomData<*const ()>,
}

impl<'a> LockedFolio<'a> {
    /// The guard of a lock that is the caller's, which counts as one that the thread holds.
    fn of(folio: &'a Folio) -> Self {
        inside::add(1);
        Self { folio, not_send: PhantomData }
    }

    /// Leaves the folio locked, for an I/O that ends on another thread.
    pub(crate) fn leave_locked(self) {
        inside::add(-1);
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
        inside::add(-1);
    }
}

/// Folios in a batch. Tiny in a model run, so that a full batch is a common case there.
pub(crate) const BATCH_SLOTS: usize = if cfg!(all(test, loom)) { 2 } else { 31 };

/// A batch of folios: up to 31 ids in one small array, as the kernel's folio batch.
///
/// Thirty-one words and a count fill whole cache lines; the number is the same in reads, LRU
/// insertion and reclaim, so that one batch is the unit of work everywhere. A batch owns one
/// reference for each folio in it, unless the place that uses it says otherwise.
#[derive(Debug, Default)]
pub(crate) struct FolioBatch {
    count: u32,
    ids: [FolioId; BATCH_SLOTS],
}

impl FolioBatch {
    /// Adds a folio; the batch must not be full. Tells whether it is full now.
    pub(crate) fn push(&mut self, id: FolioId) -> bool {
        self.ids[self.count as usize] = id;
        self.count += 1;
        self.is_full()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.count as usize == BATCH_SLOTS
    }

    /// The folios, oldest first.
    pub(crate) fn as_slice(&self) -> &[FolioId] {
        &self.ids[..self.count as usize]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_try_that_fails_leaves_the_lock_with_its_holder() {
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
