//! Injects refusals: fails system calls that maps depend on at random, as a kernel might.
//!
//! Compiled for torture only (the feature `refusals`); otherwise no call checks. The rates are per
//! process, like a seccomp filter; but they can be reset.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A call that can be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusable {
    /// The scan for pages that were stored to (`PAGEMAP_SCAN`).
    Scan,
    /// The protection of pages that are written out (the same call).
    Protect,
    /// The unmapping of pages (`process_madvise`, or `madvise`). A thread is never refused it twice
    /// in succession: a page that cannot be unmapped at all poisons the cache.
    Unmap,
}

/// Refused calls per 1024, for each [`Refusable`].
static SHARES: [AtomicU32; 3] = [const { AtomicU32::new(0) }; 3];
/// Number of calls so far: the state of the random number generator.
static CALLS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static WAS_REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// Sets how many calls per 1024 fail from now on, in all threads.
pub fn refuse(call: Refusable, share: u32) {
    // Relaxed: a call that misses the change counts as an earlier call.
    SHARES[call as usize].store(share, Ordering::Relaxed);
}

/// Refuses a call at random, before the call is made.
///
/// # Errors
/// `EPERM` or `ENOMEM` if the call is refused.
pub(crate) fn check(call: Refusable) -> io::Result<()> {
    // Relaxed: as in `refuse`.
    let share = SHARES[call as usize].load(Ordering::Relaxed);
    if share == 0 || call == Refusable::Unmap && WAS_REFUSED.replace(false) {
        return Ok(());
    }
    // SplitMix64 (Steele, Lea and Flood, 2014).
    // Relaxed: only needs to be a number that no other call gets.
    let state = CALLS.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    let drawn = mixed ^ (mixed >> 31);
    if drawn % 1024 >= u64::from(share) {
        return Ok(());
    }
    WAS_REFUSED.set(call == Refusable::Unmap);
    let errors = [libc::EPERM, libc::ENOMEM];
    Err(io::Error::from_raw_os_error(errors[(drawn >> 32) as usize % 2]))
}
