//! The lookup: from page index to a counted reference (L1-L4 of `page/mapping.rs`).
//!
//! The steps are those of the kernel's `filemap_get_entry`: load, try to get, reload, retry. What
//! is found may be locked, under I/O or not uptodate: the reference only says that it stays.
//! [`Mapping::peek`] is for callers that need none.

use super::{Entry, Flag, Folio, FolioRef, Folios, Mapping, TryGet};
use crate::sync::{AtomicU64, Backoff, Ordering, blocking, fence};
use std::time::Instant;

/// The content of an index.
#[derive(Debug)]
pub(crate) enum Lookup<'a> {
    /// A folio, held by the reference that comes with it.
    Folio(FolioRef<'a>),
    /// No folio: the Entry of the unit's first page, a hole or a value.
    Absent(Entry),
    /// A folio that has as many references as one can have.
    Refused,
}

/// The time that a lookup waited for frozen folios.
#[derive(Debug, Default)]
pub(crate) struct FrozenWaits {
    pub(crate) rounds: u64,
    /// When the first round began.
    pub(crate) since: Option<Instant>,
}

impl Mapping {
    /// Finds the folio that holds page `index`, whatever its size, and takes a reference to it. It
    /// may begin before the unit of the page.
    ///
    /// Waits while the folio is frozen, which is for a few instructions of another thread, or, in a
    /// region, until the unmapping has ended.
    pub(crate) fn get_folio<'a>(&self, folios: &'a Folios, index: u64) -> Lookup<'a> {
        self.get_folio_and_tell(folios, index, &mut FrozenWaits::default())
    }

    /// As [`Self::get_folio`]; `waits` is what it has waited.
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

    /// As [`Self::get_folio`], but does not wait; `None` while the folio is frozen.
    #[inline]
    pub(crate) fn try_get_folio<'a>(&self, folios: &'a Folios, index: u64) -> Option<Lookup<'a>> {
        // MAPPING-2: the head Entry decides.
        let head = self.head_index(index);
        // Acquire: pairs with the Release in I1; we see the descriptor set up.
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

    /// Takes a reference to the folio that `seen`, the Entry of page `index`, names (L2, L3).
    ///
    /// [`TryGet::Frozen`]: it is frozen, free, or no longer the one at this index.
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

    /// Takes a reference to the folio that `seen`, the READY Entry of page `index`, names, if the
    /// Entry is READY with the reference in hand: see [`recheck_ready`].
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

    /// Looks at a folio without a reference: what `look` makes of its Entry, at the first page
    /// `head` of a unit, and of its descriptor. An error: no folio is there, or, once `look` has
    /// seen one, not that one; the Entry that says so.
    ///
    /// A snapshot: a caller that is to act on it takes a reference and looks again.
    pub(crate) fn peek<T>(
        &self,
        folios: &Folios,
        head: u64,
        look: impl FnOnce(Entry, &Folio) -> T,
    ) -> Result<T, Entry> {
        // Acquire: pairs with the Release in I1; we see the descriptor set up.
        let seen = self.table.load(head, Ordering::Acquire);
        if !seen.is_folio() {
            return Err(seen);
        }
        #[cfg(all(test, not(loom)))]
        crate::sync::meanwhile::here("before a folio is looked at");
        let result = look(seen, folios.get(seen.folio_id()));
        // Acquire: pairs with the Release in `Flags::set`, `Flags::reset` and in
        // `FolioLock::release`: if `look` saw a flag as it was set after E4, or in a later life of
        // the frame, the load below sees E4. (Index and order of a new life are stored Relaxed:
        // `look` may see those too early.)
        fence(Ordering::Acquire);
        let now = self.table.load(head, Ordering::Relaxed);
        if now.names_same_folio(seen) { Ok(result) } else { Err(now) }
    }

    /// Whether the folio at the first page `head` of a unit was written, or is filled from where
    /// it was: all but one that was allocated and nothing else. An error: no folio is there; the
    /// Entry that says so.
    pub(crate) fn is_written(&self, folios: &Folios, head: u64) -> Result<bool, Entry> {
        loop {
            let is_written = self.peek(folios, head, |seen, folio| {
                // The flag of a descriptor that may be another page's by now: `peek` looks again.
                seen.is_ready() || !folio.flags.get(Flag::Allocated)
            });
            match is_written {
                // Evicted and filled again meanwhile.
                Err(now) if now.is_folio() => {}
                answer => return answer,
            }
        }
    }
}

/// L3: does the Entry still name the folio we hold now? [`TryGet::Frozen`] if it does not. Nothing
/// else that `seen` said need be true any more: it may be of an earlier life of the folio's frames.
#[inline(always)]
pub(crate) fn recheck<'a>(
    word: &AtomicU64,
    folio: FolioRef<'a>,
    seen: Entry,
) -> Result<FolioRef<'a>, TryGet> {
    // Acquire: pairs with the Release in I1: if another life of the frame came here, we see its
    // descriptor. The try_get before it orders this load after our reference.
    let now = Entry(word.load(Ordering::Acquire));
    if now.names_same_folio(seen) { Ok(folio) } else { Err(TryGet::Frozen) }
}

/// L3 for whoever is after the bytes: is the Entry, which was READY when it was `seen`, READY now,
/// and names the folio we hold? [`TryGet::Frozen`] if not.
///
/// Race (why the first look, which was before the reference, does not tell):
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
    // Acquire: pairs with the Release in `set_ready` and in `WriteSection::drop`: the bytes are
    // there.
    let now = Entry(word.load(Ordering::Acquire));
    if now.names_same_ready_folio(seen) { Ok(folio) } else { Err(TryGet::Frozen) }
}
