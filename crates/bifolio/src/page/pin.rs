//! The pin word: one 64-bit word that counts references and says when nobody may take one.
//!
//! Owned by a descriptor (`descriptor.rs`), which wraps every reference in a guard; nothing
//! outside this folder sees the word. After the dedicated bit that was proposed for the page
//! reference count of Linux (`PAGEREF_LOCKED_BIT`, later `PAGEREF_FROZEN_BIT`, 2025 and 2026), with
//! a generation added against reuse.
//!
//! ```text
//!   63          40  39      38                                   0
//!  +--------------+--------+---------------------------------------+
//!  |  generation  | FROZEN |                 count                 |
//!  +--------------+--------+---------------------------------------+
//!
//!  FROZEN  count   meaning
//!    0      n > 0  live, n references
//!    0      0      staged for freeing: its last owner left; a `try_get` may still rescue it
//!    1      0      free, or frozen by somebody who owns every reference
//!    1      k      the same, with k failed `try_get` in flight or not yet wiped
//! ```
//!
//! PROTOCOL, as two columns (A takes references, B ends the folio's life):
//!
//! ```text
//!  A: get, put                                B: freeze, free, reuse
//!  A1 fetch_add(n)                            B1 CAS (g, expected) -> (g, FROZEN)    freeze
//!  A2 FROZEN clear in the result: got it      B2 look at what only an owner may see
//!  A3 else: while the word is (g, FROZEN, k)  B3 store (g, n)                        unfreeze, or
//!     CAS -> (g, FROZEN, 0); then give up     B4 ... free, and much later
//!  A4 put: fetch_sub(n); was it the last?     B5 store (g + 1, n)                    init
//!  A5 CAS (g, 0) -> (g, FROZEN); the winner,
//!     and only it, frees
//! ```
//!
//! - PIN-1: exactly one thread wins A5 or B1 for a generation and does not unfreeze; it frees.
//! - PIN-2: a failed `try_get` owes nothing and never subtracts: B3 or B5 may have wiped its add.
//!   A3 is hygiene: it keeps lost adds from ever carrying out of the count.
//! - PIN-3: FROZEN leaves the word only by B3 (same generation) and B5 (next generation). So the
//!   put that paused between A4 and A5 while the folio was freed and reused loses its CAS.
//! - PIN-4: while frozen there is no owner to put: B1 succeeds only if `expected` counts all.
//! - PIN-5: a count never passes [`COUNT_MAX`], half the field: it can never carry into FROZEN.
//!
//! Orderings: A2 and B1, A5 acquire (they are about to look at the folio), A4, B3, B5 release
//! (they are done changing it). A relaxed A5 would be a data race: the winner would free while the
//! accesses of a thread that got and put in between are still unordered (loom: `pin_r2`).
//!
//! The generation has 24 bits: A5 is fooled only if its thread sleeps through 2^24 lives of one
//! frame, each of which takes at least an allocation, a fill and an eviction under locks (more
//! than a microsecond, so more than 16 s between two instructions), and wakes at a word with
//! exactly count 0, which lasts for two instructions in each life.

use crate::sync::{AtomicU64, Ordering, store_owned};

const COUNT_BITS: u32 = 39;
const GENERATION_BITS: u32 = 24;
const FROZEN: u64 = 1 << COUNT_BITS;
const COUNT_MASK: u64 = FROZEN - 1;
const GENERATION_SHIFT: u32 = COUNT_BITS + 1;
const _: () = assert!(COUNT_BITS + 1 + GENERATION_BITS == u64::BITS);

/// The most references one folio can have; one more is refused.
pub(crate) const COUNT_MAX: u64 = COUNT_MASK >> 1;
/// Set in the result of an add that froze or passed the limit: one test for the hot path.
const NOT_GOT: u64 = FROZEN | (COUNT_MAX + 1);

/// The state of a pin word at one moment. Pure: the decisions of the protocol, without the atomics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PinState(pub(crate) u64);

impl PinState {
    /// The live (or staged) word of `generation` with `count` references.
    pub(crate) fn live(generation: u64, count: u64) -> Self {
        debug_assert!(count <= COUNT_MAX, "{count} references");
        Self((generation << GENERATION_SHIFT) | count)
    }

    /// The frozen word of `generation`.
    pub(crate) fn frozen(generation: u64) -> Self {
        Self((generation << GENERATION_SHIFT) | FROZEN)
    }

    pub(crate) fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT
    }

    pub(crate) fn is_frozen(self) -> bool {
        self.0 & FROZEN != 0
    }

    /// References held: none while frozen, whatever failed gets left in the field.
    pub(crate) fn count(self) -> u64 {
        if self.is_frozen() { 0 } else { self.0 & COUNT_MASK }
    }

    /// Whether the word may be that of a forked child, in which the descriptors are zeros: there
    /// references that the parent has are put, and that does nothing. (A word that is alive has a
    /// generation, but once in 2^24 lives.)
    fn is_wiped(self) -> bool {
        self.0.wrapping_neg() <= COUNT_MAX
    }

    /// Whether an add that gave this word got its reference.
    #[inline(always)]
    pub(crate) fn is_got(self) -> bool {
        self.0 & NOT_GOT == 0
    }

    /// The word that a failed get writes to wipe its add (A3), or `None` when there is nothing to
    /// wipe: the word was unfrozen, reused or wiped meanwhile.
    pub(crate) fn wiped(self, generation: u64) -> Option<Self> {
        let clean = Self::frozen(generation);
        let excess = self.is_frozen() && self.generation() == generation && self != clean;
        excess.then_some(clean)
    }
}

/// The result of a `try_get`.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TryGet {
    /// The caller owns the references it asked for.
    Got,
    /// The folio is frozen or free: look it up again.
    Frozen,
    /// The count would pass [`COUNT_MAX`]; nothing was taken.
    Refused,
}

/// The result of a put.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// Somebody else is in charge of the folio. It may be freed at any moment.
    Done,
    /// The caller put the last reference: the word is frozen, and the caller must free the folio.
    Last,
}

/// See the head of the file.
#[derive(Debug, Default)]
pub(crate) struct PinWord(AtomicU64);

impl PinWord {
    /// The word as it is now. A count read so is a hint: others change it.
    pub(crate) fn state(&self) -> PinState {
        // Relaxed: a hint; whoever acts on it does so through a read-modify-write.
        PinState(self.0.load(Ordering::Relaxed))
    }

    /// Makes fresh, zeroed memory a free descriptor. Nobody else knows the word yet.
    pub(crate) fn init_free(&self) {
        self.0.store(PinState::frozen(0).0, Ordering::Relaxed);
    }

    /// Takes `references` references unless the folio is frozen (A1-A3).
    #[inline(always)]
    pub(crate) fn try_get(&self, references: u64) -> TryGet {
        // Acquire: pairs with the Release in `unfreeze` and `init`; after it we see what the owner
        // did to the folio while it was frozen or being set up.
        let before = self.0.fetch_add(references, Ordering::Acquire);
        let after = PinState(before.wrapping_add(references));
        if after.is_got() { TryGet::Got } else { self.try_get_cold(after, references) }
    }

    #[cold]
    fn try_get_cold(&self, after: PinState, references: u64) -> TryGet {
        if !after.is_frozen() {
            // Over the limit, but ours: give back. It is the last only if all of the COUNT_MAX
            // others put in this instant; then the folio leaks, frozen, and nothing worse.
            let put = self.put_and_test(references);
            debug_assert_eq!(put, Put::Done);
            return TryGet::Refused;
        }
        let mut current = after;
        while let Some(wiped) = current.wiped(after.generation()) {
            // Relaxed: nothing is published or read through a word we failed to get.
            let exchange = (Ordering::Relaxed, Ordering::Relaxed);
            match self.0.compare_exchange(current.0, wiped.0, exchange.0, exchange.1) {
                Ok(_) => break,
                Err(now) => current = PinState(now),
            }
        }
        TryGet::Frozen
    }

    /// The "before" of the thread: load, test, compare-and-swap until it works.
    #[inline(always)]
    pub(crate) fn try_get_compare_exchange(&self, references: u64) -> TryGet {
        let mut current = self.0.load(Ordering::Relaxed);
        loop {
            if PinState(current).is_frozen() {
                return TryGet::Frozen;
            }
            let next = current + references;
            if !PinState(next).is_got() {
                return TryGet::Refused;
            }
            // Acquire: pairs as in `try_get`.
            match self.0.compare_exchange_weak(current, next, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return TryGet::Got,
                Err(now) => current = now,
            }
        }
    }

    /// Gives `references` references back; the caller of the last put must free (A4, A5).
    #[inline(always)]
    pub(crate) fn put_and_test(&self, references: u64) -> Put {
        // Release: pairs with the Acquire of the CAS in `put_cold` and in `try_freeze`; whoever
        // frees or freezes sees all we did with the folio.
        let before = PinState(self.0.fetch_sub(references, Ordering::Release));
        debug_assert!(
            before.count() >= references || before.is_wiped(),
            "put of {references} on {before:?}"
        );
        if before.0 & COUNT_MASK == references { self.put_cold(before) } else { Put::Done }
    }

    #[cold]
    fn put_cold(&self, before: PinState) -> Put {
        let staged = PinState::live(before.generation(), 0);
        let frozen = PinState::frozen(before.generation());
        // Acquire: pairs with the Release of every put before ours; we are about to free. Failure
        // is Relaxed: somebody rescued the folio, or freed it, and owes us nothing.
        match self.0.compare_exchange(staged.0, frozen.0, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Put::Last,
            Err(_) => Put::Done,
        }
    }

    /// Freezes the folio if the caller's `expected` references are all there are (B1).
    #[must_use]
    pub(crate) fn try_freeze(&self, expected: u64) -> bool {
        let current = self.state();
        let wanted = PinState::live(current.generation(), expected);
        if current != wanted {
            return false;
        }
        let frozen = PinState::frozen(current.generation());
        // Acquire: pairs with the Release of the puts that brought the count down to ours: what
        // those holders did (dirtying the folio above all) is seen by the tests that follow.
        self.0.compare_exchange(wanted.0, frozen.0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Ends a freeze with `references` references, in the same generation (B3).
    pub(crate) fn unfreeze(&self, references: u64) {
        let state = self.state();
        debug_assert!(state.is_frozen() && references > 0, "unfreeze({references}) of {state:?}");
        let live = PinState::live(state.generation(), references);
        // Release: pairs with the Acquire in `try_get`: a getter sees what was done while frozen.
        store_owned(&self.0, live.0, Ordering::Release);
    }

    /// Starts a new life with `references` references, in the next generation (B5).
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
    fn the_last_put_freezes_and_the_next_life_is_a_new_generation() {
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
