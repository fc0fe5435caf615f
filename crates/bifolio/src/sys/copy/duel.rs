//! The choice between two copies of a page whose successor is known, made once per process.
//!
//! `memcpy` after a prefetch of the next page's first lines wins on most processors; on some the
//! loop that prefetches a line with each line wins. So the two copy the same pages in turns, for
//! at most [`TIME_MAX`], and the loop is chosen only if it is more than 5 % ahead. Until the duel
//! has run, `memcpy` is in use.
//!
//! Called when a cache is built; the answer is read by each long copy.
//!
//! # Safety
//! Copies between two allocations of its own.
#![allow(unsafe_code)]

use super::LINE_BYTES;
use super::x86_64::{copy_after_prefetch, copy_by_lines};
use std::arch::x86_64::{_mm_clflush, _mm_mfence};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// No timed_copy starts later: with the last timed_copy the duel stays below 2 ms.
const TIME_MAX: Duration = Duration::from_micros(1500);
/// Turns of each copy, at most.
const ROUNDS_MAX: usize = 40;
/// Fewer rounds than this decide nothing.
const ROUNDS_MIN: usize = 5;
/// The loop is chosen if `memcpy` takes more than this many times as long.
const LINES_GAIN_MIN: f64 = 1.05;

const PAGE_BYTES: usize = 4096;
const PAGES: usize = 64;
/// Pages copied per round and form.
const ROUND_PAGES: usize = 16;
/// Odd, so that its multiples visit all pages, and far enough for no two neighbours to follow.
const STRIDE: usize = 27;

static PREFERS_LINES: AtomicBool = AtomicBool::new(false);

/// Returns `true` if the duel has chosen the loop.
#[inline(always)]
pub(super) fn prefers_lines() -> bool {
    // Relaxed: only the value counts; both copies are right at any time.
    PREFERS_LINES.load(Ordering::Relaxed)
}

/// Runs the duel at the first call. Returns the time of `memcpy` over that of the loop; `None` if
/// there was too little time to tell.
pub(super) fn lines_gain() -> Option<f64> {
    static GAIN: OnceLock<Option<f64>> = OnceLock::new();
    *GAIN.get_or_init(|| {
        let gain = gain_of(&mut rounds());
        // Relaxed: as in `prefers_lines`.
        PREFERS_LINES.store(gain.is_some_and(|gain| gain > LINES_GAIN_MIN), Ordering::Relaxed);
        gain
    })
}

/// Returns the lower quartile of the ratios, on which three of four rounds agree. A median of so
/// few rounds is 2 % off on a loaded machine.
fn gain_of(ratios: &mut [f64]) -> Option<f64> {
    ratios.sort_by(f64::total_cmp);
    (ratios.len() >= ROUNDS_MIN).then(|| ratios[ratios.len() / 4])
}

/// The time of `memcpy` over that of the loop, round by round, until the time is up.
fn rounds() -> Vec<f64> {
    let started = Instant::now();
    // Written once: every page is resident, and none is the zero page.
    let source = vec![1; PAGES * PAGE_BYTES];
    let mut target = vec![0; PAGE_BYTES];
    let mut ratios = Vec::with_capacity(ROUNDS_MAX);
    while ratios.len() < ROUNDS_MAX && started.elapsed() < TIME_MAX {
        let first = ratios.len() * ROUND_PAGES;
        // Every second round backwards: neither copy always comes first.
        let (memcpy, lines) = if ratios.len().is_multiple_of(2) {
            let memcpy = timed_copy(&source, &mut target, first, copy_after_prefetch);
            (memcpy, timed_copy(&source, &mut target, first, copy_by_lines))
        } else {
            let lines = timed_copy(&source, &mut target, first, copy_by_lines);
            (timed_copy(&source, &mut target, first, copy_after_prefetch), lines)
        };
        ratios.push(memcpy.as_secs_f64() / lines.as_secs_f64().max(1e-9));
    }
    ratios
}

/// Copies some pages out of order, none of which is in a cache of the processor, and says how long
/// that took.
fn timed_copy(
    source: &[u8],
    target: &mut [u8],
    first: usize,
    copy: unsafe fn(*const u8, *mut u8, usize, *const u8),
) -> Duration {
    let page = |number: usize| source[number * STRIDE % PAGES * PAGE_BYTES..].as_ptr();
    for number in first..=first + ROUND_PAGES {
        for line in 0..PAGE_BYTES / LINE_BYTES {
            // SAFETY: a line of `source`; its bytes stay what they are.
            unsafe { _mm_clflush(page(number).wrapping_add(line * LINE_BYTES)) };
        }
    }
    // SAFETY: a fence; the lines are gone when it ends.
    unsafe { _mm_mfence() };
    let started = Instant::now();
    for number in first..first + ROUND_PAGES {
        // SAFETY: a page of `source`, which nothing changes, and one of `target`, which is ours.
        unsafe { copy(page(number), target.as_mut_ptr(), PAGE_BYTES, page(number + 1)) };
    }
    started.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loop_is_chosen_only_if_three_of_four_rounds_say_so() {
        let gain = |ratios: &[f64]| gain_of(&mut ratios.to_vec());
        assert_eq!(gain(&[2.0, 2.0, 2.0, 2.0]), None, "too few rounds");
        assert_eq!(gain(&[9.0, 1.0, 1.1, 9.0, 9.0, 9.0, 1.0, 9.0]), Some(1.1));
    }

    #[test]
    fn the_duel_is_decided_once() {
        let gain = lines_gain();
        assert_eq!(lines_gain(), gain);
        assert_eq!(prefers_lines(), gain.is_some_and(|gain| gain > LINES_GAIN_MIN));
    }

    #[test]
    fn a_round_visits_every_page_before_it_repeats_one() {
        let mut visited = [false; PAGES];
        for number in 0..PAGES {
            visited[number * STRIDE % PAGES] = true;
        }
        assert!(visited.iter().all(|visited| *visited));
    }
}
