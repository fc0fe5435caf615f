//! The pin word of a descriptor: it counts references, and can refuse new ones.
//!
//! ```text
//!   63          40  39      38                                   0
//!  +--------------+--------+---------------------------------------+
//!  |  generation  | FROZEN |                 count                 |
//!  +--------------+--------+---------------------------------------+
//!
//!  FROZEN  count   meaning
//!    0      n > 0  live, n references
//!    0      0      staged for freeing: the last reference was put; a `try_get` may still rescue it
//!    1      0      free, or frozen by the thread that owns every reference
//!    1      k      as above, with k failed `try_get` in flight or not yet wiped
//! ```
//!
//! PROTOCOL PIN, as two columns (A takes references, B ends the generation):
//!
//! ```text
//!  A: get, put                                B: freeze, free, reuse
//!  A1 fetch_add(n)                            B1 CAS (g, expected) -> (g, FROZEN)    freeze
//!  A2 FROZEN clear in the result: got it      B2 read what only an owner may see
//!  A3 else: while the word is (g, FROZEN, k)  B3 store (g, n)                        unfreeze, or
//!     CAS -> (g, FROZEN, 0); then give up     B4 ... free, and much later
//!  A4 put: fetch_sub(n); was it the last?     B5 store (g + 1, n)                    init
//!  A5 CAS (g, 0) -> (g, FROZEN); the winner,
//!     and only it, frees
//! ```
//!
//! - PIN-1: exactly one thread wins A5 or B1 for a generation and does not unfreeze; it frees.
//! - PIN-2: a failed `try_get` never subtracts: B3 or B5 may have wiped its add. A3 keeps abandoned
//!   adds from ever carrying out of the count.
//! - PIN-3: FROZEN is cleared only by B3 (same generation) and B5 (next generation). So a put that
//!   paused between A4 and A5 while the folio was freed and reused fails its CAS.
//! - PIN-4: while the word is frozen, no owner is left that could put: B1 succeeds only if
//!   `expected` counts all references.
//! - PIN-5: a count never exceeds [`COUNT_MAX`], half the field: it can never carry into FROZEN.
//!
//! Orderings: A2, B1 and A5 acquire (accesses to the folio follow), A4, B3 and B5 release (changes
//! to the folio precede). With a relaxed A5 the winner would free while the accesses of a thread
//! that got and put in between are still unordered (loom: `pin_r2`).
//!
//! The generation has 24 bits: A5 is fooled only if its thread sleeps through 2^24 generations of
//! one frame (more than 16 s, at a microsecond each) and wakes when the count is exactly 0, which
//! lasts for two instructions per generation.

use crate::sync::{AtomicU64, Ordering, store_owned};

const COUNT_BITS: u32 = 39;
const GENERATION_BITS: u32 = 24;
const FROZEN: u64 = 1 << COUNT_BITS;
const COUNT_MASK: u64 = FROZEN - 1;
const GENERATION_SHIFT: u32 = COUNT_BITS + 1;
const _: () = assert!(COUNT_BITS + 1 + GENERATION_BITS == u64::BITS);

pub(crate) const COUNT_MAX: u64 = COUNT_MASK >> 1;
/// Bits that are set in the result of an add that found FROZEN or exceeded the limit.
const NOT_GOT: u64 = FROZEN | (COUNT_MAX + 1);

/// The state of a pin word at one moment: the decisions of the protocol without the atomics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PinState(pub(crate) u64);

impl PinState {
    pub(crate) fn live(generation: u64, count: u64) -> Self {
        debug_assert!(count <= COUNT_MAX, "{count} references");
        Self((generation << GENERATION_SHIFT) | count)
    }

    pub(crate) fn frozen(generation: u64) -> Self {
        Self((generation << GENERATION_SHIFT) | FROZEN)
    }

    pub(crate) fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT
    }

    pub(crate) fn is_frozen(self) -> bool {
        self.0 & FROZEN != 0
    }

    /// References held; 0 while frozen, whatever failed gets left in the field.
    pub(crate) fn count(self) -> u64 {
        if self.is_frozen() { 0 } else { self.0 & COUNT_MASK }
    }

    #[inline(always)]
    pub(crate) fn is_got(self) -> bool {
        self.0 & NOT_GOT == 0
    }

    /// Returns the word that a failed get writes to wipe its add (A3); `None` if the word was
    /// unfrozen, reused or wiped since.
    pub(crate) fn wiped(self, generation: u64) -> Option<Self> {
        let clean = Self::frozen(generation);
        let is_its = self.is_frozen() && self.generation() == generation;
        (is_its && self != clean).then_some(clean)
    }
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TryGet {
    Got,
    /// The folio is frozen or free: look it up again.
    Frozen,
    /// The count would pass [`COUNT_MAX`].
    Refused,
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// Other references exist, or another thread frees the folio. It may be freed at any moment.
    Done,
    /// The caller put the last reference, and must free the folio, which is frozen.
    Last,
}

#[derive(Debug, Default)]
pub(crate) struct PinWord(AtomicU64);

impl PinWord {
    pub(crate) fn state(&self) -> PinState {
        // Relaxed: a hint; a caller that acts on it does so through a read-modify-write.
        PinState(self.0.load(Ordering::Relaxed))
    }

    /// Makes fresh, zeroed memory a free descriptor. No other thread knows the word yet.
    pub(crate) fn init_free(&self) {
        self.0.store(PinState::frozen(0).0, Ordering::Relaxed);
    }

    /// Takes `references` references unless the folio is frozen (A1..A3).
    #[inline(always)]
    pub(crate) fn try_get(&self, references: u64) -> TryGet {
        // Acquire: pairs with the Release in `unfreeze` and `init`; after it this thread sees what
        // the owner did to the folio while it was frozen or being set up.
        let before = self.0.fetch_add(references, Ordering::Acquire);
        let after = PinState(before.wrapping_add(references));
        if after.is_got() { TryGet::Got } else { self.try_get_cold(after, references) }
    }

    /// PIN-A3: gives up. Puts references beyond the limit, or wipes the adds that failed on a
    /// frozen word.
    #[cold]
    fn try_get_cold(&self, after: PinState, references: u64) -> TryGet {
        if !after.is_frozen() {
            // Over the limit, but the references are counted: put them. If all COUNT_MAX others
            // were put in this instant, the folio leaks, frozen.
            let put = self.put_and_test(references);
            debug_assert_eq!(put, Put::Done);
            return TryGet::Refused;
        }
        let mut current = after;
        while let Some(wiped) = current.wiped(after.generation()) {
            // Relaxed: nothing is published or read through a word that refused the reference.
            let exchange = (Ordering::Relaxed, Ordering::Relaxed);
            match self.0.compare_exchange(current.0, wiped.0, exchange.0, exchange.1) {
                Ok(_) => break,
                Err(now) => current = PinState(now),
            }
        }
        TryGet::Frozen
    }

    /// The compare-and-swap variant that the pin word replaces, for comparison.
    #[inline(always)]
    pub(crate) fn try_get_compare_exchange(&self, references: u64) -> TryGet {
        let next = |current: u64| {
            let next = PinState(current.wrapping_add(references));
            next.is_got().then_some(next.0)
        };
        // Acquire: pairs as in `try_get`.
        match self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, next) {
            Ok(_) => TryGet::Got,
            Err(now) if PinState(now).is_frozen() => TryGet::Frozen,
            Err(_) => TryGet::Refused,
        }
    }

    /// Puts `references` references; the caller of the last put must free (A4, A5).
    #[inline(always)]
    pub(crate) fn put_and_test(&self, references: u64) -> Put {
        // Release: pairs with the Acquire of the CAS in `put_cold` and in `try_freeze`; the thread
        // that frees or freezes sees everything this thread did with the folio.
        let before = PinState(self.0.fetch_sub(references, Ordering::Release));
        // In a forked child, where the descriptors are zeros, a put does nothing.
        let is_wiped = before.0.wrapping_neg() <= COUNT_MAX;
        let has_enough = before.count() >= references || is_wiped;
        debug_assert!(has_enough, "put of {references} on {before:?}");
        if before.0 & COUNT_MASK == references { self.put_cold(before) } else { Put::Done }
    }

    #[cold]
    fn put_cold(&self, before: PinState) -> Put {
        let staged = PinState::live(before.generation(), 0);
        let frozen = PinState::frozen(before.generation());
        // Acquire: pairs with the Release of every earlier put; the caller is about to free. On
        // failure, Relaxed: another thread rescued or freed the folio, and nothing is read.
        match self.0.compare_exchange(staged.0, frozen.0, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Put::Last,
            Err(_) => Put::Done,
        }
    }

    /// Freezes the folio if the caller's `expected` references are the only ones (B1).
    #[must_use]
    pub(crate) fn try_freeze(&self, expected: u64) -> bool {
        let current = self.state();
        let wanted = PinState::live(current.generation(), expected);
        if current != wanted {
            return false;
        }
        let frozen = PinState::frozen(current.generation());
        // Acquire: pairs with the Release of the puts that reduced the count to `expected`: what
        // those holders did (above all, dirtying the folio) is seen by the tests that follow.
        self.0.compare_exchange(wanted.0, frozen.0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Ends a freeze, in the same generation (B3).
    pub(crate) fn unfreeze(&self, references: u64) {
        let state = self.state();
        debug_assert!(state.is_frozen() && references > 0, "unfreeze({references}) of {state:?}");
        let live = PinState::live(state.generation(), references);
        // Release: pairs with the Acquire in `try_get`: a getter sees what was done while frozen.
        store_owned(&self.0, live.0, Ordering::Release);
    }

    /// Starts the next generation with `references` references (B5).
    pub(crate) fn init(&self, references: u64) {
        let state = self.state();
        debug_assert!(state.is_frozen() && references > 0, "init({references}) of {state:?}");
        let generation = (state.generation() + 1) & ((1 << GENERATION_BITS) - 1);
        let live = PinState::live(generation, references);
        // Release: pairs with the Acquire in `try_get`: a getter sees the folio set up.
        store_owned(&self.0, live.0, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn live(references: u64) -> PinWord {
        let word = PinWord::default();
        word.init_free();
        word.init(references);
        word
    }

    #[test]
    fn a_count_at_the_limit_is_refused_and_unchanged() {
        let word = live(COUNT_MAX);
        assert_eq!(word.try_get(1), TryGet::Refused);
        assert_eq!(word.state().count(), COUNT_MAX);
        assert_eq!(word.put_and_test(1), Put::Done);
        assert_eq!(word.try_get(1), TryGet::Got);
    }

    #[test]
    fn a_failed_get_leaves_no_trace() {
        let word = live(1);
        assert!(word.try_freeze(1));
        let frozen = word.state();
        assert_eq!(word.try_get(3), TryGet::Frozen);
        assert_eq!(word.state(), frozen);
        assert_eq!(frozen.count(), 0);
    }

    #[test]
    fn freezing_needs_every_reference() {
        let word = live(2);
        assert!(!word.try_freeze(1));
        assert!(!word.try_freeze(3));
        assert!(word.try_freeze(2));
        assert!(!word.try_freeze(2));
        word.unfreeze(2);
        assert_eq!(word.state().count(), 2);
    }

    #[test]
    fn the_last_put_freezes_and_the_next_init_is_a_new_generation() {
        let word = live(2);
        let generation = word.state().generation();
        assert_eq!(word.put_and_test(1), Put::Done);
        assert_eq!(word.put_and_test(1), Put::Last);
        assert!(word.state().is_frozen());
        word.init(1);
        assert_eq!(word.state().generation(), generation + 1);
    }

    #[test]
    fn the_generation_wraps_to_zero() {
        let word = live(1);
        word.0.store(PinState::frozen((1 << GENERATION_BITS) - 1).0, Ordering::Relaxed);
        word.init(1);
        assert_eq!(word.state(), PinState::live(0, 1));
    }
}
