//! The mapping: from page index to Entry, one word per page, read without locks.
//!
//! PROTOCOL READ. Two kinds of readers run against three kinds of changes, of which eviction and
//! the write section are in `change.rs`; a fourth, the relocation, has its columns in
//! `relocate.rs`. Changers hold the folio lock; readers hold nothing.
//!
//! ```text
//!  OPTIMISTIC READ (optimistic.rs)            WRITE, folio locked
//!  O1 load Entry (Acquire)                    W1 store Entry without READY
//!  O2 copy the bytes of its frame             W2 fence (Release)
//!  O3 fence (Acquire)                         W3 change the bytes
//!  O4 load Entry; was O1 READY, and is        W4 store Entry READY, version + 1 (Release)
//!     this the same version?
//!     yes: the bytes are of one version
//!     no: retry, then take a reference        EVICT, folio locked
//!                                             E1 store Entries without READY
//!  LOOK UP (below)                            E2 freeze(expected); else E1 back, give up
//!  L1 load Entry; a folio?                    E3 dirty? then unfreeze, E1 back
//!  L2 try_get its folio; frozen: wait, L1     E4 store Entries: value or hole
//!  L3 load Entry again (Acquire); the same    E5 unlock, free the frame
//!     folio? no: put, L1
//!  L4 the reference keeps it there            INSERT, new folio locked, a unit
//!                                             I1 CAS head Entry: hole or value -> folio, not
//!                                                READY, version of the frame + 1
//!                                             I2 store the other Entries
//!                                             I3 fill, set UPTODATE, store Entries READY, unlock
//! ```
//!
//! Race (why E1 comes first and why the version outlives the folio):
//!
//! ```text
//!   reader: O1 load (frame 5, v7, READY)  |
//!   reader: O2 copies half                |  E1..E5 evict it; frame 5 goes to page 900
//!                                         |  I3 fills frame 5 with other bytes
//!   reader: O2 copies the other half      |
//!   reader: O4 sees hole, shadow or, if frame 5 came back to this page, v8 or later: retry
//! ```
//!
//! O4 sees E1 if O2 saw a byte of the new fill: E1 happens before the frame is freed and allocated
//! again (the lock of the arena), and the filler issues a Release fence, which pairs with O3,
//! before it writes a byte ([`Mapping::insert`], [`Mapping::begin_fill`]).
//!
//! Invariants:
//! - MAPPING-1: Entries of a folio change only under its lock; a hole only by I1, a value only by
//!   I1 or [`Mapping::take_value`], each a CAS: the thread whose CAS succeeds owns what the value
//!   names. The one exception is the REFERENCED mark, which readers set and reclaim clears by CAS
//!   on the exact word: such a CAS succeeds only if the word is unchanged.
//! - MAPPING-2: the table of a file consists of units, the size of the folios that are inserted; a
//!   folio covers one unit or several. The head Entry (the first page of a unit) is the authority.
//!   Those of the other pages may lag behind it while a folio is inserted, moved or evicted,
//!   but never name a folio that the head did not name first. An eviction or a removal stores the
//!   head of a unit after its other pages, and does not touch the unit again: from then on the unit
//!   may be filled, whatever folio its neighbours still name. A relocation stores the head first;
//!   the folio that the other pages name until it reaches them is frozen, and no other thread
//!   may store there.
//! - MAPPING-3: L2 took a reference before L3 saw the Entry name the folio, and a folio is removed
//!   from its table only frozen, or under its lock with the table's own reference: so after L3 the
//!   folio is at this index. Comparing the frame is enough: if the frame had been removed and
//!   inserted again, a freeze would have had to consume the reference of L2. The version need not
//!   match, so a writer cannot starve a lookup. L3 proves only the place of the folio: a caller
//!   that uses its bytes tests READY in the Entry of L3, not of L1, which may be of an earlier
//!   generation of the frame (`recheck_ready`), or takes the lock.
//! - MAPPING-4: READY implies UPTODATE, and implies that the page lies below the file's length
//!   rounded up to the folio.
//!
//! The version has 24 bits. An optimistic reader is fooled only if it sleeps between O1 and O4
//! while its page is written (or its frame recycled) an exact multiple of 2^24 times: at 50 ns per
//! write, a sleep of 0.84 s in one short copy that ends at one version in sixteen million.

use super::entry::PAGE_BYTES;
use super::hot::HotPlace;
use super::table::MemorySource;
use super::{
    Entry, Flag, Folio, FolioId, FolioRef, Folios, Hot, LockedFolio, Table, TryGet, Values,
};
use crate::sync::{AtomicU64, Backoff, Ordering, barrier_of_store_and_load, blocking, fence};
use std::ops::Range;
use std::sync::atomic::AtomicU64 as HintWord;
use std::time::Instant;

#[derive(Debug)]
pub(crate) struct Mapping {
    pub(super) table: Table,
    /// log2 of the pages of a unit, the size of each inserted folio.
    pub(super) order: u8,
    pub(super) hot: HotPlace,
    pub(super) resident: AtomicU64,
    pub(super) cuts: AtomicU64,
    pub(super) prediction: Prediction,
}

impl Mapping {
    pub(crate) fn new(
        source: &MemorySource,
        order: u8,
        len_bytes: u64,
        len_bytes_max: u64,
        values: Values,
    ) -> std::io::Result<Self> {
        Ok(Self {
            table: Table::new(source, table_pages(order, len_bytes_max), values)?,
            order,
            hot: HotPlace::new(source, len_bytes)?,
            resident: AtomicU64::new(0),
            cuts: AtomicU64::new(0),
            prediction: Prediction::default(),
        })
    }

    /// Extends the table for a file of `len_bytes_max` bytes, as [`Table::reserve`] does.
    pub(crate) fn reserve(&self, len_bytes_max: u64) -> std::io::Result<()> {
        self.table.reserve(table_pages(self.order, len_bytes_max))
    }

    #[inline(always)]
    pub(crate) fn order(&self) -> u8 {
        self.order
    }

    #[inline(always)]
    pub(crate) fn folio_bytes(&self) -> u64 {
        PAGE_BYTES << self.order
    }

    #[inline(always)]
    pub(crate) fn hot(&self) -> &Hot {
        self.hot.get()
    }

    /// Returns the offsets of the words of [`Hot`] and of the first array of the table in shared
    /// memory; `None` in private memory.
    #[cfg(not(all(test, loom)))]
    pub(crate) fn shared_offsets(&self) -> Option<(u64, u64)> {
        Some((self.hot.shared_offset()?, self.table.shared_offset()?))
    }

    #[inline(always)]
    pub(crate) fn len_bytes(&self) -> u64 {
        self.hot().len_bytes()
    }

    pub(crate) fn set_len_bytes(&self, len_bytes: u64) {
        // Release: pairs with the Acquire in `len_bytes`.
        self.hot().len_bytes.store(len_bytes, Ordering::Release);
    }

    pub(crate) fn resident_folios(&self) -> u64 {
        // Acquire: pairs with the Release in `unlink`.
        self.resident.load(Ordering::Acquire)
    }

    #[inline(always)]
    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    #[inline(always)]
    pub(crate) fn head_index(&self, index: u64) -> u64 {
        index >> self.order << self.order
    }

    #[inline(always)]
    pub(crate) fn end_of_unit(&self, index: u64) -> u64 {
        self.head_index(index) + (1 << self.order)
    }

    /// Clears the REFERENCED marks of a folio. Returns `true` if any was set.
    pub(crate) fn test_and_clear_referenced(&self, folio: &Folio) -> bool {
        let clear = |found, index| found | self.table.test_and_clear_referenced(index);
        self.pages_of(folio).fold(false, clear)
    }

    pub(super) fn pages_of(&self, folio: &Folio) -> Range<u64> {
        folio.index()..folio.index() + folio.pages()
    }

    /// Saves the versions of the folio's Entries per frame, so that no later use of a frame repeats
    /// one (rule 6 of `page`). The Entries must still name the folio.
    pub(super) fn save_versions(&self, folios: &Folios, pages: Range<u64>) {
        for index in pages {
            let entry = self.table.load(index, Ordering::Relaxed);
            folios.get(FolioId(entry.frame())).set_version(entry.version());
        }
    }
}

fn table_pages(order: u8, len_bytes_max: u64) -> u64 {
    let units = len_bytes_max.div_ceil(PAGE_BYTES << order).max(1);
    // One extra page: a read of no bytes at the very end loads its Entry.
    (units << order) + 1
}

/// Error of an insertion: another thread's folio is at the index. The caller uses that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InsertError;

/// Insertion (I1..I3).
impl Mapping {
    /// Inserts `folio`, locked and not yet uptodate, at its index if the Entry is still `expected`.
    /// `table_reference` becomes the table's. On failure it is put, and `folio` has no owner.
    ///
    /// Race (why a folio that was not inserted has no owner once it is unlocked):
    ///
    /// ```text
    ///   filler: loses, unlocks            |
    ///                                     |  evacuation of its chunk: gets a reference, locks
    ///                                     |  it, sees the owner, freezes the two existing
    ///                                     |  references, stores a shadow at the index
    ///   filler: puts a reference that     |
    ///     was counted by the freeze       |  [the winner's folio lost its Entry]
    /// ```
    pub(crate) fn insert(
        &self,
        folios: &Folios,
        folio: &LockedFolio<'_>,
        table_reference: FolioRef<'_>,
        expected: Entry,
    ) -> Result<(), InsertError> {
        debug_assert!(!expected.is_folio());
        debug_assert_eq!(folio.order(), self.order, "only whole units are inserted (MAPPING-2)");
        let first = table_reference.id();
        let entry_of = |page: u64| {
            let frame = first.0 + page as u32;
            let version = folios.get(FolioId(frame)).version().wrapping_add(1);
            Entry::folio(frame, version, folio.order())
        };
        let head = folio.index();
        // AcqRel: the Release pairs with the Acquire in `get_folio`: a thread that finds the folio
        // sees it set up. The Acquire pairs with the Release in `unlink`: these Entries follow
        // those of a folio that was inserted and evicted since the caller saw `expected`. On
        // failure, Relaxed: the caller looks up again.
        let exchange = (Ordering::AcqRel, Ordering::Relaxed);
        let word = self.table.word(head);
        if word.compare_exchange(expected.0, entry_of(0).0, exchange.0, exchange.1).is_err() {
            Folio::clear_owner(folio);
            return Err(InsertError);
        }
        for page in 1..folio.pages() {
            // Release: pairs with the Acquire in `try_get_named`, as for the head.
            self.table.store(head + page, entry_of(page), Ordering::Release);
        }
        let _kept_by_the_table = table_reference.into_id();
        let resident = self.resident.fetch_add(1, Ordering::Relaxed) + 1;
        let published = &self.hot().predicted_distance;
        self.prediction.note_insert(head, first.0, resident, published);
        self.begin_fill();
        Ok(())
    }

    /// Returns `true` if a folio that the caller has just inserted, based on an earlier length, is
    /// beyond the end of file: then the caller must remove it (MAPPING-4).
    ///
    /// Race (why the length is read again, and what the barriers are for):
    ///
    /// ```text
    ///   filler: page 7 is inside           |
    ///                                      |  truncate: sets the length; barrier; walks, and finds
    ///                                      |    nothing at page 7
    ///   filler: inserts page 7; barrier;   |
    ///     is it inside? no                 |
    /// ```
    ///
    /// Covered by `loom_lookup_vs_cut_no_page_stays_beyond_the_end`.
    pub(crate) fn was_cut(&self, folio: &LockedFolio<'_>) -> bool {
        barrier_of_store_and_load();
        folio.index() * PAGE_BYTES >= self.len_bytes()
    }

    /// Called after a truncation has set the length: a walk then finds all folios beyond the end
    /// except those for which [`Self::was_cut`] returns `true`.
    pub(crate) fn begin_walk_behind_end(&self) {
        // Release: pairs with the Acquire in `cuts`. The barrier orders it before the walk.
        self.cuts.fetch_add(1, Ordering::Release);
        barrier_of_store_and_load();
    }

    /// Returns a number that each truncation changes between its change of the length and its first
    /// removal. If it is the same before a length was read and after a hole was seen, the hole was
    /// not made by a truncation of that length.
    pub(crate) fn cuts(&self) -> u64 {
        // Acquire: pairs with the Release in `begin_walk_behind_end`: a length that is read later
        // is that of the truncation, or a later one. A hole is read with Acquire, and made with
        // Release: a thread that has seen it loads the number of the truncation that made it.
        self.cuts.load(Ordering::Acquire)
    }

    /// Called before bytes of folios that are inserted and not uptodate are written, by the thread
    /// that writes them. (`io/transfer.rs` has this fence for the writes of a backing; writes of
    /// the kernel are ordered by the system calls that start and complete them.)
    pub(crate) fn begin_fill(&self) {
        // Release: pairs with the Acquire fence in `read_validated` (O3): an optimistic reader of
        // the previous use of the frame that sees a byte of the fill sees its Entry changed.
        fence(Ordering::Release);
    }

    /// Marks a filled folio uptodate and READY: readers may use it (I3).
    pub(crate) fn mark_uptodate(&self, folio: &LockedFolio<'_>) {
        folio.flags.set(Flag::Uptodate);
        folio.flags.clear(Flag::Allocated);
        self.set_ready(folio);
    }

    /// Marks a folio of which a page is missing as not uptodate until it is filled again.
    pub(crate) fn mark_absent(&self, folio: &LockedFolio<'_>) {
        self.clear_ready(folio);
        folio.flags.clear(Flag::Uptodate);
    }

    /// Stores READY into every Entry of the folio, without a change of version.
    pub(super) fn set_ready(&self, folio: &LockedFolio<'_>) {
        for index in self.pages_of(folio) {
            let entry = self.table.load(index, Ordering::Relaxed);
            // Release: pairs with the Acquire in `read_validated` (O1).
            self.table.store(index, entry.with_ready(), Ordering::Release);
        }
    }
}

#[derive(Debug)]
pub(crate) enum Lookup<'a> {
    Folio(FolioRef<'a>),
    /// No folio: the Entry of the unit's first page, a hole or a value.
    Absent(Entry),
    Refused,
}

#[derive(Debug, Default)]
pub(crate) struct FrozenWaits {
    pub(crate) rounds: u64,
    pub(crate) since: Option<Instant>,
}

/// The lookup: from page index to a counted reference (READ-L1..L4). The folio found may be locked,
/// under I/O or not uptodate. [`Mapping::peek`] is for callers that need no reference.
impl Mapping {
    /// Finds the folio that holds page `index`, of any size, and takes a reference to it. The folio
    /// may begin before the unit of the page.
    ///
    /// Waits while the folio is frozen: a few instructions of another thread or, in a region, until
    /// the unmapping has ended.
    pub(crate) fn get_folio<'a>(&self, folios: &'a Folios, index: u64) -> Lookup<'a> {
        self.get_folio_and_tell(folios, index, &mut FrozenWaits::default())
    }

    /// Finds a folio like [`Self::get_folio`], and adds the time waited to `waits`.
    pub(crate) fn get_folio_and_tell<'a>(
        &self,
        folios: &'a Folios,
        index: u64,
        waits: &mut FrozenWaits,
    ) -> Lookup<'a> {
        let mut backoff = Backoff::default();
        loop {
            if let Some(found) = self.try_get_folio(folios, index) {
                return found;
            }
            blocking::check("a frozen folio");
            waits.rounds += 1;
            waits.since.get_or_insert_with(Instant::now);
            backoff.wait();
        }
    }

    /// Finds a folio like [`Self::get_folio`], but never waits: `None` while the folio is frozen.
    #[inline]
    pub(crate) fn try_get_folio<'a>(&self, folios: &'a Folios, index: u64) -> Option<Lookup<'a>> {
        // MAPPING-2: the head Entry decides.
        let head = self.head_index(index);
        // Acquire: pairs with the Release in READ-I1; this thread sees the descriptor set up.
        let seen = self.table.load(head, Ordering::Acquire);
        if !seen.is_folio() {
            return Some(Lookup::Absent(seen));
        }
        match self.try_get_named(folios, head, seen) {
            Ok(folio) => Some(Lookup::Folio(folio)),
            Err(TryGet::Refused) => Some(Lookup::Refused),
            Err(_) => None,
        }
    }

    /// Takes a reference to the folio that `seen`, the Entry of page `index`, names (READ-L2,
    /// READ-L3). The other fields of `seen` may be of an earlier generation of the frames.
    ///
    /// Fails with [`TryGet::Frozen`] if the folio is frozen, free, or no longer at this index.
    #[inline(always)]
    pub(crate) fn try_get_named<'a>(
        &self,
        folios: &'a Folios,
        index: u64,
        seen: Entry,
    ) -> Result<FolioRef<'a>, TryGet> {
        let folio = folios.try_get(seen.folio_id())?;
        // Acquire: pairs with the Release in READ-I1: if another generation of the frame is at this
        // index, this thread sees its descriptor. The `try_get` before it orders this load after
        // the reference.
        let now = self.table.load(index, Ordering::Acquire);
        if now.names_same_folio(seen) { Ok(folio) } else { Err(TryGet::Frozen) }
    }

    /// Takes a reference as [`Self::try_get_named`] does, if the Entry, which was READY, still is
    /// once the reference is held: see [`recheck_ready`].
    #[inline(always)]
    pub(crate) fn try_get_ready<'a>(
        &self,
        folios: &'a Folios,
        index: u64,
        seen: Entry,
    ) -> Result<FolioRef<'a>, TryGet> {
        let folio = folios.try_get(seen.folio_id())?;
        recheck_ready(self.table.word(index), folio, seen)
    }

    /// Calls `look` with the Entry at `head`, the first page of a unit, and its descriptor, without
    /// a reference. Fails with the Entry found if it names no folio, or if it no longer names that
    /// folio after the call.
    ///
    /// The result is a snapshot: a caller that acts on it takes a reference and checks again.
    pub(crate) fn peek<T>(
        &self,
        folios: &Folios,
        head: u64,
        look: impl FnOnce(Entry, &Folio) -> T,
    ) -> Result<T, Entry> {
        // Acquire: pairs with the Release in READ-I1; this thread sees the descriptor set up.
        let seen = self.table.load(head, Ordering::Acquire);
        if !seen.is_folio() {
            return Err(seen);
        }
        #[cfg(all(test, not(loom)))]
        crate::sync::test_hook::reach("before a folio is looked at");
        let result = look(seen, folios.get(seen.folio_id()));
        // Acquire: pairs with the Release in `Flags::set`, `Flags::reset` and in
        // `FolioLock::release`: if `look` saw a flag that was set after READ-E4, or in a later
        // generation of the frame, the load below sees READ-E4. (Index and order of a new
        // generation are stored Relaxed: `look` may see those early.)
        fence(Ordering::Acquire);
        let now = self.table.load(head, Ordering::Relaxed);
        if now.names_same_folio(seen) { Ok(result) } else { Err(now) }
    }

    /// Looks at the folio at `head` like [`Self::peek`], again if it was evicted and filled
    /// meanwhile. Fails with the Entry found if that names no folio.
    pub(crate) fn look<T>(
        &self,
        folios: &Folios,
        head: u64,
        look: impl Fn(Entry, &Folio) -> T,
    ) -> Result<T, Entry> {
        loop {
            match self.peek(folios, head, &look) {
                Err(now) if now.is_folio() => {}
                answer => return answer,
            }
        }
    }
}

/// READ-L3 for callers that use the bytes: succeeds if the Entry, which was READY when it was
/// `seen`, is READY now and names the referenced folio. Otherwise fails with [`TryGet::Frozen`].
///
/// Race (why the first load, before the reference was taken, is not enough):
///
/// ```text
///   pin: load (frame 5, v7, READY)   |
///                                    |  evict the page; claim it again, in frame 5: (v8), locked
///   pin: try_get frame 5: got it     |
///   pin: load (frame 5, v8)          |  read the bytes from the device
///   pin: the same folio, READY? no   |
/// ```
///
/// Covered by `loom_lookup_r12_a_pin_waits_for_the_fill`.
#[inline(always)]
pub(crate) fn recheck_ready<'a>(
    word: &AtomicU64,
    folio: FolioRef<'a>,
    seen: Entry,
) -> Result<FolioRef<'a>, TryGet> {
    debug_assert!(seen.is_ready());
    // Acquire: pairs with the Release in `set_ready` and in `WriteSection::drop`: this thread sees
    // the bytes.
    let now = Entry(word.load(Ordering::Acquire));
    if now.names_same_ready_folio(seen) { Ok(folio) } else { Err(TryGet::Frozen) }
}

/// Bit set in a published distance; 0 means no prediction. Distances are multiples of the page
/// size.
const PREDICTS: u64 = 1;

/// Predicts the frame of a page before its Entry has been loaded.
///
/// A file that was filled in order has its frames in the order of its pages, at a constant
/// distance. While at least seven in eight of its folios have that distance, it is published, and a
/// hit touches the predicted bytes while the Entry is still being loaded: two cache misses overlap.
/// A wrong prediction costs one access to a cache line; nothing is ever read through it. It is a
/// hint: nothing orders it, and its counts may drift under races.
#[derive(Debug, Default)]
pub(super) struct Prediction {
    distance: HintWord,
    following: HintWord,
}

impl Prediction {
    /// Records an insertion; the file now has `resident` folios.
    pub(super) fn note_insert(&self, index: u64, frame: u32, resident: u64, published: &HintWord) {
        let distance = u64::from(frame).wrapping_sub(index);
        let following = self.following.load(Ordering::Relaxed);
        if distance == self.distance.load(Ordering::Relaxed) {
            self.following.store(following + 1, Ordering::Relaxed);
        } else if following * 2 < resident {
            self.distance.store(distance, Ordering::Relaxed);
            self.following.store(1, Ordering::Relaxed);
        }
        self.publish(resident, published);
    }

    pub(super) fn note_removal(&self, index: u64, frame: u32, resident: u64, published: &HintWord) {
        let distance = u64::from(frame).wrapping_sub(index);
        if distance == self.distance.load(Ordering::Relaxed) {
            let following = self.following.load(Ordering::Relaxed);
            self.following.store(following.saturating_sub(1), Ordering::Relaxed);
        }
        self.publish(resident, published);
    }

    /// Publishes the distance. Stores only changes: the word shares its cache line with words that
    /// every hit reads.
    fn publish(&self, resident: u64, published: &HintWord) {
        let following = self.following.load(Ordering::Relaxed);
        let distance_bytes = self.distance.load(Ordering::Relaxed).wrapping_mul(PAGE_BYTES);
        let worth_it = following > 0 && following * 8 >= resident * 7;
        let word = if worth_it { distance_bytes | PREDICTS } else { 0 };
        if published.load(Ordering::Relaxed) != word {
            published.store(word, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_filled_in_order_is_predicted() {
        let (prediction, published) = (Prediction::default(), HintWord::new(0));
        // The end first, then in order from the start, as many file formats are read.
        prediction.note_insert(999, 100, 1, &published);
        for index in 0..100 {
            prediction.note_insert(index, 101 + index as u32, index + 2, &published);
        }
        assert_eq!(published.load(Ordering::Relaxed), (101 << 12) | PREDICTS);
        // A quarter of it is evicted and filled again elsewhere.
        for index in 0..25 {
            prediction.note_removal(index, 101 + index as u32, 100, &published);
            prediction.note_insert(index, 900 - index as u32, 101, &published);
        }
        assert_eq!(published.load(Ordering::Relaxed), 0);
    }
}
