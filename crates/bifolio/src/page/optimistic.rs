//! The optimistic read: copy first, check afterwards (O1-O4 of `page/mapping.rs`).
//!
//! The same idea as a sequence lock, with the sequence in the Entry; after the versioned pages of
//! vmcache (SIGMOD 2023) and a read without a reference that was proposed for the fast path of the
//! kernel's page cache (October 2025). It writes no shared memory. Where to copy from is the
//! caller's business, so that the protocol runs unchanged under the model checker.

use super::entry::Entry;
use crate::sync::{AtomicU64, Ordering, fence};

/// Reads one page's bytes without a reference: `copy` gets the Entry that says where they are.
///
/// `None`: the Entry was not `wanted`, or changed meanwhile; what `copy` produced means nothing
/// then. Everything is judged at once, after the copy: one branch instead of two lets the processor
/// keep more reads in flight. So `copy` is called whatever the Entry says, and must only touch
/// memory that stays mapped; ENTRY-1 sees to it that every Entry leads into the frames.
#[inline(always)]
pub(crate) fn read_validated<R>(
    word: &AtomicU64,
    is_wanted: impl FnOnce(Entry) -> bool,
    copy: impl FnOnce(Entry) -> R,
) -> Option<R> {
    // Acquire: pairs with the Release of W4 and I3: the bytes of this version are there.
    let seen = Entry(word.load(Ordering::Acquire));
    let result = copy(seen);
    // Acquire: pairs with the Release fences of W2 and of `insert`: if the copy saw a byte of a
    // later version, the load below sees READY gone.
    fence(Ordering::Acquire);
    let now = Entry(word.load(Ordering::Relaxed));
    // Exactly the same word: a mark that came or went meanwhile costs a retry, nothing else.
    (is_wanted(seen) & (now == seen)).then_some(result)
}
