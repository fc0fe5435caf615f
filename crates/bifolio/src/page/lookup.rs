//! The lookup: from page index to a counted reference (READ-L1..L4).
//!
//! The steps are those of the kernel's `filemap_get_entry`: load, try to get, reload, retry. The
//! folio found may be locked, under I/O or not uptodate: the reference only keeps it in memory.
//! [`Mapping::peek`] is for callers that need no reference.

use super::{Entry, Flag, Folio, FolioRef, Folios, Mapping, TryGet};
use crate::sync::{AtomicU64, Backoff, Ordering, blocking, fence};
use std::time::Instant;

#[derive(Debug)]
pub(crate) enum Lookup<'a> {
    /// A folio, kept in memory by this reference.
    Folio(FolioRef<'a>),
    /// No folio: the Entry of the unit's first page, a hole or a value.
    Absent(Entry),
    /// A folio whose reference count is at its limit.
    Refused,
}

/// Time that a lookup waited for frozen folios.
#[derive(Debug, Default)]
pub(crate) struct FrozenWaits {
    pub(crate) rounds: u64,
    pub(crate) since: Option<Instant>,
}

impl Mapping {
    /// Finds the folio that holds page `index`, of any size, and takes a reference to it. The folio
    /// may begin before the unit of the page.
    ///
    /// Waits while the folio is frozen: a few instructions of another thread or, in a region, until
    /// the unmapping has ended.
    pub(crate) fn get_folio<'a>(&self, folios: &'a Folios, index: u64) -> Lookup<'a> {
        self.get_folio_and_tell(folios, index, &mut FrozenWaits::default())
    }

    /// Acts as [`Self::get_folio`] and adds the time waited to `waits`.
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

    /// Acts as [`Self::get_folio`] but does not wait; returns `None` while the folio is frozen.
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
    /// READ-L3).
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
        recheck(self.table.word(index), folio, seen)
    }

    /// Takes a reference to the folio that `seen`, the READY Entry of page `index`, names. Succeeds
    /// only if the Entry is still READY once the reference is held: see [`recheck_ready`].
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

    /// Returns `true` if the folio at `head`, the first page of a unit, was written or is being
    /// filled from its store, `false` if it was only allocated. Fails with the Entry found if that
    /// names no folio.
    pub(crate) fn is_written(&self, folios: &Folios, head: u64) -> Result<bool, Entry> {
        loop {
            let is_written = self.peek(folios, head, |seen, folio| {
                // The descriptor may belong to another page by now: `peek` rechecks.
                seen.is_ready() || !folio.flags.get(Flag::Allocated)
            });
            match is_written {
                // Evicted and filled again since: retry.
                Err(now) if now.is_folio() => {}
                answer => return answer,
            }
        }
    }
}

/// READ-L3: succeeds if the Entry still names the referenced folio; otherwise fails with
/// [`TryGet::Frozen`]. The other fields of `seen` may be stale: they may be of an earlier
/// generation of the frames.
#[inline(always)]
pub(crate) fn recheck<'a>(
    word: &AtomicU64,
    folio: FolioRef<'a>,
    seen: Entry,
) -> Result<FolioRef<'a>, TryGet> {
    // Acquire: pairs with the Release in READ-I1: if another generation of the frame is at this
    // index, this thread sees its descriptor. The `try_get` before it orders this load after the
    // reference.
    let now = Entry(word.load(Ordering::Acquire));
    if now.names_same_folio(seen) { Ok(folio) } else { Err(TryGet::Frozen) }
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
